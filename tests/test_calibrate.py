"""Coefficients: fitted on one half of published speeds, or measured on this machine, and kept in a file that is read again."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from math import exp
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

from memcalc import coefficients as table
from memcalc.bench.throughput.rows import Timing, read_timings
from memcalc.bench.throughput.run import coverage
from memcalc.calibrate import machine, published
from memcalc.cli.app import app
from memcalc.cli.bench_throughput import FACTS
from memcalc.coefficient_table import COEFFICIENTS
from memcalc.coefficients import CALIBRATED, own_calibration, read_values
from memcalc.errors import FileError, InputError
from memcalc.estimate import estimate
from memcalc.models import MODELS
from memcalc.plan import Plan
from memcalc.rank_hardware import hardware_of
from memcalc.throughput import step_time
from tests.published_speeds import scored

PLAIN = {name: row.value for name, row in COEFFICIENTS.items()}
CPU = Plan(model=MODELS["gpt2"], tokens=128, micro_batch=1, device="cpu")


def memcalc(*words: str) -> Result:
    return CliRunner().invoke(app, list(words))


@pytest.fixture(scope="module")
def rows() -> list[Timing]:
    return read_timings(FACTS)


@pytest.fixture(scope="module")
def points(rows: list[Timing]) -> list[published.Point]:
    """Of the half that is fitted."""
    return published.points(rows)


def by_the_model(row: Timing, values: dict[str, float]) -> Timing:
    """The row with what the model itself says it would take."""
    (point,) = published.points([row])
    assert row.measured is not None
    assert row.kind is not None
    off = exp(point.residual(values))
    return replace(row, measured=row.measured * off if row.kind.seconds else row.measured / off)


# -- fitting ---------------------------------------------------------------------------------------


def test_a_fit_of_the_models_own_times_finds_the_coefficients_again(rows: list[Timing]) -> None:
    used = [row for row in rows if row.id.startswith("mpt-") and published.points([row])][::9]
    truth = PLAIN | {"efficiency-ampere": 0.62, "efficiency-hopper": 0.75}
    found = published.fit([by_the_model(row, truth) for row in used])
    assert found.after < 0.25 * found.before
    for name in ("efficiency-ampere", "efficiency-hopper"):  # others that have the same effect take a part of it
        assert abs(found.coefficients[name] / truth[name] - 1) < 0.5 * abs(PLAIN[name] / truth[name] - 1)


def test_the_other_half_is_never_seen(rows: list[Timing]) -> None:
    rows = rows[::5]  # of every source some
    points = published.points(rows)
    assert len(points) > 50
    assert {point.run.row.half for point in points} == {published.CALIBRATION}
    others = [row for row in rows if row.half != published.CALIBRATION]
    assert published.points(others) == []
    with pytest.raises(InputError, match="nothing to fit"):
        published.fit(others)
    assert len(published.points(rows, "never used")) > 20


def test_every_fitted_coefficient_is_within_its_bounds() -> None:
    found = read_values(CALIBRATED)
    fitted = [row for row in COEFFICIENTS.values() if row.fitted]
    assert set(found) == {row.name for row in fitted} | {"range-fast", "range-slow"}
    for row in fitted:
        assert row.low <= row.value <= row.high
        assert row.low * 0.999 <= found[row.name] <= row.high * 1.001


def test_outliers_count_in_proportion() -> None:
    assert published.trust(np.array([0.0, 1.5, 3.0])).tolist() == [1.0, 1.0, 0.5]


def test_the_file_of_a_fit_is_read_back(tmp_path: Path) -> None:
    found = published.Fit(coefficients={"overlap-ddp": 0.5, "range-slow": 1.2}, rows=3, before=2.0, after=1.0)
    path = tmp_path / "fit.json"
    path.write_text(published.text(found, "facts.csv", ()))
    assert read_values(path) == found.coefficients


def test_the_file_is_a_fit_of_todays_time_model_to_todays_table(points: list[published.Point]) -> None:
    """Whatever changes a predicted time, a row or a bound changes the loss: the fit has to be made again."""
    data, values = json.loads(CALIBRATED.read_text()), PLAIN | read_values(CALIBRATED)
    stale = "stale: run memcalc calibrate --published"
    assert data["rows"] == len(points), stale
    assert data["loss_after"] == pytest.approx(published.loss(points, values), rel=1e-6), stale
    assert published.spread(points, values).items() <= values.items(), stale
    assert data["range"] == [asdict(each) for each in coverage(scored())], stale


def test_what_a_range_is_worth_as_counted_by_hand(rows: list[Timing], points: list[published.Point]) -> None:
    values, others = PLAIN | read_values(CALIBRATED), published.points(rows, "never used")
    for half, found in ((published.CALIBRATION, points), ("never used", others)):
        count, percent = table.coverage()[half]
        timed = [exp(-point.residual(values)) for point in found if point.units]
        inside = sum(values["range-fast"] <= ratio <= values["range-slow"] for ratio in timed)
        assert (count, percent) == (len(timed), round(100 * inside / len(timed), 1))
    assert table.coverage()["never used"][1] >= 75  # what holds half of other projects' runs is no range


def test_each_project_counts_the_same_in_the_range(points: list[published.Point]) -> None:
    few, many = (replace(points[0], weight=each**-0.5) for each in (1, 9))
    slow = replace(few, run=replace(few.run, row=replace(few.run.row, measured=(few.run.row.measured or 0) / 2)))
    assert published.spread([slow, *[many] * 9], PLAIN) == published.spread([slow, few], PLAIN)


# -- this machine ----------------------------------------------------------------------------------

SEEN: dict[str, Any] = {
    "device": "cpu", "torch": "2.13.0", "ranks": 2, "context": None, "copy": 1e10, "operation": 4e-6,
    "products": [{"dtype": "float32", "width": 64, "flops": 2e10}, {"dtype": "float32", "width": 1024, "flops": 5e10}],
    "reduced": [{"bytes": 1024, "seconds": 1e-4}, {"bytes": 2**20, "seconds": 1e-3}],
}  # fmt: skip
CARD = SEEN | {"device": "cuda", "gpu": "NVIDIA A100-SXM4-80GB", "context": 400 * 2**20,
               "products": [{"dtype": "bfloat16", "width": 4096, "flops": 250e12},
                            {"dtype": "float32", "width": 4096, "flops": 18e12}],
               "reduced": [{"bytes": 2**20, "seconds": 1e-5}]}  # fmt: skip


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[dict[str, Any]], Path]:
    """This machine as if it had been measured."""

    def keep(seen: dict[str, Any]) -> Path:
        path = tmp_path / "own.json"
        path.write_text(machine.record(seen, "2026-11-30"))
        monkeypatch.setenv("MEMCALC_CALIBRATION", str(path))
        return path

    return keep


def test_plans_on_this_machine_use_what_was_measured(own: Callable[[dict[str, Any]], Path]) -> None:
    before, card = step_time(CPU).total, Plan(model=MODELS["gpt2"], tokens=128, micro_batch=1, gpu="h100-80gb")
    others = step_time(card).total
    path = own(SEEN)
    assert hardware_of(CPU).flops["float32"] == 5e10
    assert hardware_of(CPU).link == pytest.approx(2**20 / 1e-3, rel=1e-3)  # four digits are kept
    assert step_time(CPU).total > before
    assert step_time(card).total == others
    assert any(str(path) in said for said in estimate(CPU).assumptions)
    assert not any(str(path) in said for said in estimate(card).assumptions)


def test_a_card_that_was_measured_has_its_own_context(own: Callable[[dict[str, Any]], Path]) -> None:
    plan = Plan(model=MODELS["gpt2"], tokens=128, micro_batch=1, gpu="a100-80gb", precision="bf16")
    wide = estimate(plan)
    own(CARD)
    found = estimate(plan)
    assert found.device.high - found.reserved.high == found.device.low - found.reserved.low == 400 * 2**20
    assert wide.device.high > found.device.high
    assert hardware_of(plan).efficiency == pytest.approx(250 / 312, rel=1e-3)
    assert hardware_of(plan).inside == pytest.approx(2**20 / 1e-5, rel=1e-3)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "empty"), ("[1]", "no calibration"), ('{"memcalc_calibration": 2}', "no calibration"),
        ('{"memcalc_calibration": 1, "device": "cpu"}', "no calibration"),
        ('{"memcalc_calibration": 1, "device": "cpu", "coefficients": {"cpu-lnk": 1}}', "did you mean"),
        ('{"memcalc_calibration": 1, "device": "cpu", "coefficients": {"cpu-link": -1}}', "not a number above 0"),
        ('{"memcalc_calibration": 1, "device": "cpu", "coefficients": {"cpu-link": "fast"}}', "not a number above 0"),
        ('{"memcalc_calibration": 1, "device": "cpu", "coefficients": {"cpu-core-flops": 1e-300}}',
         r"cpu-core-flops 1e-300 must be between 1e\+08 and 1e\+14"),
        ('{"memcalc_calibration": 1, "device": "cpu", "coefficients": {"overlap-ddp": 1.5}}', "overlap-ddp 1.5 must be"),
        ('{"memcalc_calibration": 1, "device": "cuda", "context": "x", "coefficients": {"cpu-link": 1}}', "context"),
    ],
)  # fmt: skip
def test_a_damaged_file_is_one_line(text: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "own.json"
    path.write_text(text)
    monkeypatch.setenv("MEMCALC_CALIBRATION", str(path))
    with pytest.raises(FileError, match=words):
        own_calibration()
    done = memcalc("recommend", "gpt2", "--device", "cpu", "--top", "1")
    assert done.exit_code == 2
    assert str(path) in done.output
    assert "Traceback" not in done.output


def test_where_the_file_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("MEMCALC_CALIBRATION")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert table.calibration_file() == tmp_path / "memcalc" / "calibration.json"
    monkeypatch.setenv("MEMCALC_CALIBRATION", "here.json")
    assert table.calibration_file() == Path("here.json")


def test_the_command_measures_and_keeps(machine_of_two: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "folder" / "own.json"
    monkeypatch.setenv("MEMCALC_CALIBRATION", str(path))
    monkeypatch.setattr(machine, "measure", lambda device, ranks, said: SEEN | {"ranks": ranks})
    done = memcalc("calibrate", "--format", "json")
    assert done.exit_code == 0
    found = json.loads(done.stdout)
    assert found["coefficients"]["cpu-core-flops"] == 5e10
    assert found["measured"]["ranks"] == 2
    assert read_values(path) == found["coefficients"]
    assert done.stderr == f"written to {path}; recommendations for this machine use it\n"
    other = tmp_path / "other.json"
    done = memcalc("calibrate", "-o", str(other))
    assert (
        f"written to {other}; recommendations for this machine use it with MEMCALC_CALIBRATION={other}\n" in done.stderr
    )


@pytest.fixture
def machine_of_two(monkeypatch: pytest.MonkeyPatch) -> None:
    from types import SimpleNamespace

    monkeypatch.setattr("memcalc.machine.detect", lambda: SimpleNamespace(gpus=(), cores=2, ram_bytes=2**33))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("calibrate", "--device", "cuda"), "no GPU"), (("calibrate", "--ranks", "3"), "2 cores"),
        (("calibrate", str(FACTS)), "--published"), (("calibrate", "no-such-file.csv", "--published"), "does not exist"),
        (("calibrate", "--device", "gpu"), "cuda"),
    ],
)  # fmt: skip
def test_mistakes_are_one_line(words: tuple[str, ...], said: str, machine_of_two: None) -> None:
    done = memcalc(*words)
    assert done.exit_code == 2
    assert said in done.output
    assert "Traceback" not in done.output


@pytest.mark.parametrize("format_", ["table", "markdown", "csv", "json"])
def test_what_is_in_use_is_shown(format_: str) -> None:
    done = memcalc("calibrate", "--show", "--format", format_)
    assert done.exit_code == 0
    assert "efficiency-hopper" in done.output


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="looks for processes in Linux's table")
def test_a_signal_leaves_no_process_and_no_folder(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "memcalc", "calibrate", "--device", "cpu", "--ranks", "1"]
    words += ["-o", str(tmp_path / "own.json")]
    started = subprocess.Popen(words, stderr=subprocess.PIPE, text=True, env=os.environ | {"TMPDIR": str(tmp_path)})
    assert started.stderr is not None
    assert "measuring" in started.stderr.readline()
    while not list(tmp_path.glob("memcalc-*/errors.log")):  # the ranks are being started
        time.sleep(0.01)
    time.sleep(0.2)
    started.send_signal(signal.SIGTERM)
    said = started.communicate(timeout=180)[1]
    assert started.returncode == 128 + signal.SIGTERM
    assert "stopped by SIGTERM; no process of the run is left" in said
    assert not list(tmp_path.iterdir())
    assert not [path for path in Path("/proc").glob("[0-9]*/environ") if str(tmp_path).encode() in _bytes(path)]


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:  # gone meanwhile, or another user's
        return b""
