"""Estimated against measured, on measurements made by hand."""

from __future__ import annotations

import csv
import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from memcalc.cli.app import app
from memcalc.compare import REST, STATES, Comparison, Row, compare, compare_run, exact
from memcalc.errors import FileError
from memcalc.estimate import estimate
from memcalc.layout import Layout
from memcalc.measurement import Measurement, RankMeasurement
from memcalc.models import MODELS
from memcalc.plan import Plan
from memcalc.timeline import BEFORE, MOMENTS

PLAN = Plan(model=MODELS["gpt2-tiny"], tokens=32, micro_batch=2, strategy="ddp", ranks=2, device="cpu")
ESTIMATE = estimate(PLAN)


def rank(number: int, **changes: object) -> RankMeasurement:
    """A rank on which everything is exactly as estimated, but for the changes."""
    states = {category: exact(PLAN, category) for category in STATES}
    same = RankMeasurement(
        rank=number,
        instrument="test scales",
        moment=ESTIMATE.peak.moment,
        allocated_peak=ESTIMATE.peak.bytes,
        by_moment=dict(ESTIMATE.peak.by_moment),
        **states,
    )
    return replace(same, **changes)  # type: ignore[arg-type]


def measurement(*ranks: RankMeasurement) -> Measurement:
    return Measurement(plan=PLAN, status="done", device="cpu", versions={}, losses=[2.0, 1.5], ranks=ranks)


def write(run: Path, *ranks: RankMeasurement) -> None:
    record = measurement(*ranks)
    record.save(run / "run.json")
    (run / "measured").mkdir()
    for each in ranks:
        each.save(run / "measured" / f"rank-{each.rank}.json")


@pytest.fixture
def comparison() -> Comparison:
    peak = ESTIMATE.peak.bytes
    return compare(
        ESTIMATE, measurement(rank(0, allocated_peak=peak - 8), rank(1, allocated_peak=peak + 100, optimizer=7))
    )


def test_an_exact_run_has_no_error() -> None:
    same = compare(ESTIMATE, measurement(rank(0), rank(1)))
    assert same.fullest == 0
    assert same.states_equal()
    assert {row.error_bytes for row in same.rows} == {0}
    assert {row.instrument for row in same.rows} == {"test scales"}


def test_states_are_compared_before_an_allocator_rounds_them_up() -> None:
    plan = replace(PLAN, device="cuda", strategy="single", ranks=1)
    parameters = sum(weight.numel for weight in plan.family.weights(plan.model))
    assert exact(plan, "parameters") == exact(plan, "gradients") == 4 * parameters
    assert exact(plan, "optimizer") == 8 * parameters


def test_every_rank_meter_moment_and_category_has_its_row() -> None:
    rows = compare(ESTIMATE, measurement(rank(0, reserved_peak=1), rank(1, device_peak=2, host_peak=3))).rows
    keys = {(row.rank, row.meter, row.category, row.moment) for row in rows}
    assert len(keys) == len(rows)
    for number in (0, 1):
        for moment in (name for name in MOMENTS if name not in BEFORE):
            assert (number, "allocated", "all", moment) in keys
        for category in (*STATES, REST):
            assert (number, "allocated", category, "peak") in keys
    assert (0, "reserved", "all", "peak") in keys
    assert (0, "device", "all", "peak") not in keys
    assert {(1, "device", "all", "peak"), (1, "host", "all", "peak")} <= keys


def test_the_fullest_rank_judges(comparison: Comparison) -> None:
    assert comparison.fullest == 1
    assert comparison.peak.error_bytes == -100
    assert comparison.row(0, "allocated", "all", "peak").error_bytes == 8
    with pytest.raises(KeyError):
        comparison.row(2, "allocated", "all", "peak")


def test_states_are_judged_on_the_rank_that_holds_most_of_them() -> None:
    """Two ranks of ZeRO-1 can have the same peak up to a few bytes, but one of them has more states."""
    peak = ESTIMATE.peak.bytes
    assert compare(ESTIMATE, measurement(rank(0), rank(1, optimizer=7, allocated_peak=peak + 1))).states_equal()
    assert not compare(ESTIMATE, measurement(rank(0, optimizer=8), rank(1, optimizer=7))).states_equal()
    assert not compare(ESTIMATE, measurement(rank(0), rank(1, gradients=2**30))).states_equal()


def test_parts_add_up_to_the_peak(comparison: Comparison) -> None:
    for number in (0, 1):
        peak, parameters, optimizer, rest = (
            comparison.row(number, "allocated", category, "peak")
            for category in ("all", "parameters", "optimizer", REST)
        )
        assert parameters.measured + optimizer.measured + rest.measured == peak.measured
        assert parameters.low + optimizer.low + rest.low == peak.low


@pytest.mark.parametrize(
    ("low", "high", "measured", "error", "percent"),
    [
        (110, 110, 100, 10, 10.0),
        (95, 105, 100, 0, 0.0),
        (101, 105, 100, 1, 1.0),
        (90, 98, 100, -2, -2.0),
        (5, 5, 0, 5, None),
        (0, 0, 0, 0, 0.0),
    ],
)
def test_the_error_is_signed_and_ranges_forgive(
    low: int, high: int, measured: int, error: int, percent: float | None
) -> None:
    row = Row(
        rank=0, meter="reserved", category="all", moment="peak", low=low, high=high, measured=measured, instrument=""
    )
    assert (row.error_bytes, row.error_percent) == (error, percent)


# -- from files, on the command line ---------------------------------------------------------------


def said(*words: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["compare", *words])
    return done.exit_code, done.output


def test_the_table(tmp_path: Path) -> None:
    write(tmp_path, rank(0, allocated_peak=ESTIMATE.peak.bytes + 1000), rank(1))
    code, text = said(str(tmp_path))
    assert code == 0
    assert text.count(" allocated ") == len(compare_run(tmp_path).rows) // 2 + 2  # of rank 1 the peak only; the summary
    assert "fullest rank: 0; allocated peak -" in text
    assert "equal to the byte\nmeasured by: test scales\n" in text
    assert said(str(tmp_path), "--all-ranks")[1].count(" allocated ") == len(compare_run(tmp_path).rows) + 1


def test_a_measurement_of_the_first_step_alone_says_so(tmp_path: Path) -> None:
    write(tmp_path, rank(0, steps=1), rank(1, steps=1))
    (tmp_path / "lock").touch()
    assert said(str(tmp_path))[1].splitlines()[-1].startswith("note: only the first step was metered; it lacks what")


def test_a_measurement_of_more_steps_has_no_note(tmp_path: Path) -> None:
    write(tmp_path, rank(0, steps=2), rank(1, steps=2))
    assert said(str(tmp_path))[1].splitlines()[-1] == "measured by: test scales"


def test_csv_and_json_hold_every_row_in_bytes(tmp_path: Path) -> None:
    write(tmp_path, rank(0), rank(1, gradients=0))
    rows = compare_run(tmp_path).rows
    table = list(csv.DictReader(io.StringIO(said(str(tmp_path), "--format", "csv")[1])))
    assert [int(row["measured_bytes"]) for row in table] == [row.measured for row in rows]
    objects = json.loads(said(str(tmp_path), "--format", "json")[1])
    assert [row["error_bytes"] for row in objects] == [row.error_bytes for row in rows]
    broken = next(row for row in objects if row["rank"] == 1 and row["category"] == "gradients")
    assert broken["error_percent"] is None


def test_markdown(tmp_path: Path) -> None:
    write(tmp_path, rank(0), rank(1))
    assert said(str(tmp_path), "--format", "markdown")[1].startswith("| rank")


def test_folders_that_hold_no_measured_run(tmp_path: Path) -> None:
    def refused(path: Path, message: str) -> None:
        with pytest.raises(FileError, match=message):
            compare_run(path)
        code, text = said(str(path))
        assert code == 2
        assert len(text.splitlines()) == 1

    refused(tmp_path / "none", "holds no run")
    refused(tmp_path, "holds no run")
    write(tmp_path, rank(0), rank(1))
    (tmp_path / "measured" / "rank-1.json").unlink()
    refused(tmp_path, "lacks rank 1 of 2")
    (tmp_path / "measured" / "rank-1.json").write_text('{"memcalc_measurement": 1, "rank": 1}')
    refused(tmp_path, "rank-1.json")
    rank(0).save(tmp_path / "measured" / "rank-1.json")
    refused(tmp_path, r"rank-1\.json is damaged: it says that it is of rank 0$")
    (tmp_path / "run.json").write_text("{")
    refused(tmp_path, "run.json is not valid JSON")


def test_each_rank_of_a_pipeline_is_held_against_its_own_stage() -> None:
    plan = replace(PLAN, strategy="single", layout=Layout(pipeline=2), accumulation=2)
    stages = [estimate(plan, stage) for stage in range(2)]
    assert stages[0].steady.bytes != stages[1].steady.bytes
    ranks = [
        rank(
            stage,
            allocated_peak=each.steady.bytes,
            by_moment=dict(each.steady.by_moment),
            **{category: exact(plan, category, stage) for category in STATES},
        )
        for stage, each in enumerate(stages)
    ]
    found = compare(estimate(plan), replace(measurement(*ranks), plan=plan))
    assert {row.error_bytes for row in found.rows} == {0}
    assert found.states_equal()
    lesser = compare(estimate(plan), replace(measurement(ranks[0], replace(ranks[1], optimizer=7)), plan=plan))
    assert not lesser.states_equal()
