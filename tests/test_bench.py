"""The bench: how rows are scored and shown, and that accuracy is not lost unseen."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import published
import pytest
from click.testing import CliRunner, Result
from hypothesis import given
from hypothesis import strategies as st

from memcalc.bench import run
from memcalc.bench.rows import COLUMNS
from memcalc.bench.run import by_meter, by_source, reasons, score
from memcalc.bench.score import Score, percentile, summarise, worst
from memcalc.cli import progress
from memcalc.cli.app import app
from memcalc.estimate import estimate
from memcalc.hardware import GPUS
from memcalc.hints import FROZEN_ABOVE, FROZEN_MOST_PCT, FROZEN_READINGS
from memcalc.reserved import UNSEEN_PCT, replayed
from tests.published_rows import GPT2, MLP, facts, plan_of, row_of, text_of


def test_a_score_by_hand() -> None:
    plan = plan_of()
    timeline = estimate(plan).timeline
    counted = replayed(plan, timeline).peak_allocated / 2**30  # blocks, not what was asked for
    found = score(row_of(value_gib="2"))
    assert found.estimated_gib == pytest.approx(counted, abs=1e-4)
    assert found.error_pct == pytest.approx(100 * (counted / 2 - 1), abs=0.01)
    assert (found.measured_gib, found.moment, found.verdict) == (2.0, timeline.peak().moment, "fits")


def test_each_meter_is_read_as_itself() -> None:
    plan = plan_of(strategy="ddp8", n_gpus="8")
    held = replayed(plan, estimate(plan).timeline)
    found = {
        metric: score(row_of(strategy="ddp8", n_gpus="8", metric=metric)).estimated_gib
        for metric in ("max_memory_allocated", "max_memory_reserved", "nvidia-smi")
    }
    card = GPUS["a100-80gb"]
    outside = (sum(card.context) + sum(card.nccl)) / 2
    assert found["max_memory_allocated"] == pytest.approx(held.peak_allocated / 2**30, abs=1e-4)
    assert found["max_memory_reserved"] == pytest.approx(held.peak_reserved / 2**30, abs=1e-4)
    assert found["nvidia-smi"] == pytest.approx((held.peak_reserved + outside) / 2**30, abs=1e-3)


def test_a_context_the_source_states_is_taken() -> None:
    cells = MLP | {"metric": "nvidia-smi", "micro_batch_per_gpu": "1"}
    without, stated = (
        score(row_of(**cells, source=source)).estimated_gib for source in ("a/b c", "itu-rad/GPUMemNet x")
    )
    assert without is not None and stated is not None
    difference = (1229 + 1536) / 2 / 1024 - sum(GPUS["a100-80gb"].context) / 2 / 2**30
    assert stated - without == pytest.approx(difference, abs=1e-3)


def test_outcomes_are_held_against_the_card() -> None:
    small, large = (
        {"metric": "fits", "value_gib": ""},
        {"metric": "OOM", "value_gib": "", "micro_batch_per_gpu": "4000"},
    )
    fits, oom = score(row_of(**small)), score(row_of(**large))
    assert (fits.verdict, fits.error_pct, fits.measured_gib) == ("fits", None, None)
    assert (oom.verdict, oom.skipped) == ("does-not-fit", None)
    assert summarise([fits, oom]).to_dict() == {
        "rows": 2, "median_abs_error_pct": None, "p90_abs_error_pct": None, "bias_pct": None,
        "false_fits": 0, "false_ooms": 0,
    }  # fmt: skip
    wrong = [score(row_of(**small | {"metric": "OOM"})), score(row_of(**large | {"metric": "fits"}))]
    assert (summarise(wrong).false_fits, summarise(wrong).false_ooms) == (1, 1)


def made(
    error: float | None, *, metric: str = "nvidia-smi", verdict: str = "tight", skipped: str | None = None
) -> Score:
    return Score(id="x", metric=metric, measured_gib=1.0, error_pct=error, verdict=verdict, skipped=skipped)


def test_statistics_by_hand() -> None:
    found = summarise([*map(made, (-10.0, -1.0, 2.0, 3.0)), made(None, skipped="x"), made(None, metric="OOM")])
    assert found.rows == 5
    assert found.median_abs_error_pct == 2.5  # of 1, 2, 3, 10
    assert found.p90_abs_error_pct == 7.9  # 0.9 of the way through three gaps: 3 + 0.7 * 7
    assert found.bias_pct == 0.5  # of -10, -1, 2, 3
    assert (found.under_estimates, found.skipped, found.false_fits, found.false_ooms) == (2, 1, 0, 0)
    assert summarise([]).median_abs_error_pct is None


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=30), st.floats(0, 1))
def test_a_percentile_lies_within_its_values(values: list[float], share: float) -> None:
    found = percentile(values, share)
    assert found is not None
    assert min(values) - 1e-6 <= found <= max(values) + 1e-6
    assert percentile(values, 0) == min(values)
    assert percentile(values, 1) == max(values)


def test_the_worst_come_first() -> None:
    wrong = made(None, metric="OOM", verdict="fits")
    right = made(None, metric="fits", verdict="fits")
    ordered = worst([made(1.0), made(-5.0), right, wrong, made(None, skipped="x"), made(0.0)], 5)
    assert [each.error_pct for each in ordered] == [None, -5.0, 1.0]
    assert len(worst([made(1.0), made(2.0)], 1)) == 1


def test_meters_are_never_mixed() -> None:
    rows = [row_of(), row_of(metric="max_memory_reserved"), row_of(metric="OOM", value_gib=""), row_of(source="a/b c")]
    scores = [score(row) for row in rows]
    assert {meter: each.rows for meter, each in by_meter(rows, scores).items()} == {
        "allocated": 2, "reserved": 1, "boundary": 1,
    }  # fmt: skip
    assert list(by_source(rows, scores)) == [
        ("a/b", "allocated"),
        ("someone/project", "allocated"),
        ("someone/project", "reserved"),
        ("someone/project", "boundary"),
    ]


def test_reasons_are_counted_alone_and_together() -> None:
    skipped = [made(None, skipped=text) for text in ("a; b", "a", "a; c", "b; c")]
    assert reasons([*skipped, made(1.0)]) == [("a", 3, 1), ("b", 2, 0), ("c", 2, 0)]


@pytest.fixture
def bench(tmp_path: Path) -> Callable[..., Result]:
    path = tmp_path / "rows.csv"
    path.write_text(text_of(GPT2, GPT2 | {"id": "x-2", "optimizer": "Lomo"}, GPT2 | {"id": "x-3", "value_gib": "1"}))
    return lambda *words: CliRunner().invoke(app, ["bench", str(path), *words])


def test_json_has_the_shape_of_the_issue(bench: Callable[..., Result]) -> None:
    found = json.loads(bench("--format", "json").stdout)
    assert list(found) == ["summary", "meters", "sources", "rows"]
    six = ["rows", "median_abs_error_pct", "p90_abs_error_pct", "bias_pct", "false_fits", "false_ooms"]
    assert list(found["summary"]) == six
    assert list(found["meters"]["allocated"]) == six
    assert found["sources"][0]["skipped"] == 1
    assert [list(row) for row in found["rows"]] == [
        ["id", "metric", "measured_gib", "estimated_gib", "error_pct", "verdict", "moment", "assumptions", "skipped"]
    ] * 3
    assert [row["skipped"] for row in found["rows"]] == [None, "optimizer Lomo", None]
    assert found["summary"]["rows"] == 2
    only = json.loads(bench("--format", "json", "--worst", "1").stdout)
    assert [row["id"] for row in only["rows"]] == ["x-3"]
    assert only["summary"] == found["summary"]


def test_the_table_shows_sources_worst_rows_and_reasons(bench: Callable[..., Result]) -> None:
    text = bench("--worst", "1").stdout
    assert re.search(r"^someone/project +allocated +2 +1 ", text, re.MULTILINE)
    assert re.search(r"^all +allocated +2 +1 ", text, re.MULTILINE)
    assert re.search(r"^x-3 +max_memory_allocated +1\.000 ", text, re.MULTILINE)
    assert re.search(r"^optimizer Lomo +1 +1$", text, re.MULTILINE)
    assert bench("--format", "markdown").stdout.startswith("| source ")
    lines = bench("--format", "csv").stdout.splitlines()
    assert len(lines) == 4
    assert lines[2] == "x-2,max_memory_allocated,4.000,,,,,optimizer Lomo"


@pytest.mark.parametrize(
    ("words", "fault"),
    [
        (["--tier", "D"], "unknown tier 'D'"),
        (["--source", "nobody"], "none of the 3 rows is left"),
        (["--use", "score"], "no column 'use'"),
        (["--worst", "0"], "--worst 0 must be at least 1"),
        (["--format", "xml"], "unknown format"),
    ],
)
def test_mistakes_are_one_line(bench: Callable[..., Result], words: list[str], fault: str) -> None:
    done = bench(*words)
    assert done.exit_code == 2
    assert fault in done.stderr
    assert len(done.stderr.splitlines()) == 1


@given(st.lists(st.tuples(st.sampled_from(COLUMNS[2:28]), st.text(max_size=12)), max_size=4))
def test_no_cell_breaks_the_bench(changes: list[tuple[str, str]]) -> None:
    found = score(row_of(**dict(changes)))
    assert (found.skipped is None) == (found.estimated_gib is not None)


# Percent, median and 90th percentile of the absolute errors over the facts that come with memcalc: today's figures
# rounded up. They guard what has been reached; no constant of memcalc is fitted to them. Lower them with each new term.
REACHED = {
    ("bigscience-workshop/bigscience", "device"): (4, 10),
    ("deepspeedai/DeepSpeed", "allocated"): (1, 1),
    ("foundation-model-stack/fms-acceleration", "allocated"): (1, 2),
    ("foundation-model-stack/fms-acceleration", "device"): (3, 18),
    ("hpcaitech/ColossalAI", "allocated"): (2, 2),
    ("huggingface/transformers", "device"): (12, 14),
    ("itu-rad/GPUMemNet", "device"): (3, 11),
    ("Lightning-AI/lightning-thunder", "allocated"): (3, 5),
    ("Lightning-AI/litgpt", "allocated"): (5, 12),
    ("Lightning-AI/pytorch-lightning", "allocated"): (1, 17),
    ("microsoft/DeepSpeedExamples", "allocated"): (2, 2),
    ("NVIDIA/Megatron-LM", "allocated"): (1, 2),
    ("open-mmlab/mmaction2", "allocated"): (1, 1),
    ("pytorch/ao", "allocated"): (1, 1),
    ("pytorch/ao", "reserved"): (4, 18),
    ("pytorch/torchtitan", "allocated"): (2, 2),
    ("pytorch/torchtitan", "reserved"): (4, 12),
    ("pytorch/torchtune", "allocated"): (1, 3),
    ("pytorch/tutorials", "allocated"): (2, 2),
}
# Said to fit, but went out of memory; docs/validation/published.md says what is known of them.
FALSE_FITS = {"oom-095"}
# Readings of nvidia-smi above the range: today's, whose cards hold more than the replay has; lower it as well.
DEVICE_ABOVE = 23


def test_whoever_watches_a_terminal_sees_how_far_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    monkeypatch.setattr(progress.click, "echo", lambda text, **where: seen.append(text) if where.get("err") else None)
    for watched in (False, True):
        monkeypatch.setattr(progress.sys, "stderr", type("terminal", (), {"isatty": lambda self, w=watched: w})())
        assert list(progress.counted("abc", "rows")) == ["a", "b", "c"]
        assert bool(seen) == watched
    assert seen[1] == "\r1 of 3 rows" and seen[-1].strip() == ""


def test_accuracy_on_published_facts_is_not_lost() -> None:
    rows, scores = facts()
    assert [found.skipped for found in scores if found.skipped] == []
    assert {each.id for each in scores if each.metric == "OOM" and each.verdict == "fits"} == FALSE_FITS
    assert [each.id for each in scores if each.metric == "fits" and each.verdict == "does-not-fit"] == []
    found = by_source(rows, scores)
    assert {key for key in found if key[1] != "boundary"} == set(REACHED)
    for key, summary in found.items():
        if key in REACHED:
            median, highest = summary.median_abs_error_pct, summary.p90_abs_error_pct
            assert median is not None and highest is not None
            assert (median <= REACHED[key][0], highest <= REACHED[key][1]) == (True, True), key


def test_published_runs_reserved_no_more_than_the_range_holds() -> None:
    """The high end is what a verdict rests on; without its last percent some are above it (memcalc/reserved.py)."""
    rows, scores = facts()
    found = by_meter(rows, scores)
    assert found["reserved"].above == 0
    read = [each for each in scores if each.metric == "max_memory_reserved"]
    less = [replace(each, high_gib=(each.high_gib or 0) * 100 / (100 + UNSEEN_PCT)) for each in read]
    assert len(read) > 20
    assert sum(each.above for each in less) > 3
    assert found["device"].above <= DEVICE_ABOVE
    assert found["allocated"].above == 0, "which is no range"


def test_what_is_said_of_frozen_weights_is_what_the_bench_finds_today() -> None:
    rows, scores = facts()
    device = by_meter(rows, scores)["device"]
    page = Path(published.PAGE.parent.parent, "ci.md").read_text(encoding="utf-8")
    assert f"Of {device.rows} published readings of `nvidia-smi` {device.above} were above it" in page
    adapted = {row["id"] for row in rows if row["lora_rank"]}
    read = [each for each in scores if each.metric == "nvidia-smi" and each.id in adapted and not each.skipped]
    above = [each for each in read if each.above]
    assert (len(read), len(above)) == (FROZEN_READINGS, FROZEN_ABOVE)
    most = 100 * max((each.measured_gib or 0) / (each.high_gib or 1) for each in above)
    assert 99 + FROZEN_MOST_PCT < most <= 100 + FROZEN_MOST_PCT


def test_the_page_of_results_is_of_today(monkeypatch: pytest.MonkeyPatch) -> None:
    known = {found.id: found for found in facts()[1]}
    monkeypatch.setattr(run, "score", lambda row: known[row.id])
    text = published.PAGE.read_text(encoding="utf-8")
    assert published.refreshed(text) == text, "run `make docs`"
