"""The process in which the code of a module runs: what it leaves, however it ends, and what it says."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

from memcalc.cli.app import app
from memcalc.errors import InputError
from memcalc.models import MODELS
from memcalc.module import describe
from memcalc.plan import Plan

pytest.importorskip("torch")
OWN = Path(__file__).with_name("own_modules.py")


def test_code_that_ends_its_process_or_never_returns_leaves_nothing_but_a_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with pytest.raises(InputError, match=r"ended its process with exit code 7 instead of returning; see /.*log.txt$"):
        describe(f"{OWN}:exits_at_once", shape=(12,))
    started = time.monotonic()
    with pytest.raises(InputError, match=r"did not return within 0.5 s; --module-timeout SECONDS gives it more; see /"):
        describe(f"{OWN}:sleeps", shape=(12,), timeout=0.5)
    assert time.monotonic() - started < 300  # it would sleep 600
    assert not any(f"{OWN}:sleeps" in line for line in _commands())
    assert [path.name for path in tmp_path.glob("*/*")] == ["log.txt", "log.txt"]


def test_what_a_module_s_code_started_in_a_session_of_its_own_is_ended() -> None:
    assert describe(f"{OWN}:detaches", shape=(12,)).name == "own_modules.py:detaches"
    assert not any(f"{OWN}:detaches" in line for line in _commands())


STOPPED = """
import sys
from memcalc.errors import MemcalcError
from memcalc.module import describe, rehearse
from memcalc.plan import Plan
from memcalc.rehearsal import run_apart
try:
    if sys.argv[1] == "describe":
        describe(sys.argv[2], shape=(12,))
    else:
        run_apart(Plan.load(sys.argv[2]), module="tests.rehearsal_stub")
except MemcalcError as error:
    print(error)
    sys.exit(error.exit_code)
"""


@pytest.mark.parametrize("what", ["describe", "run_apart"])
def test_a_command_that_is_told_to_stop_leaves_nothing(what: str, tmp_path: Path) -> None:
    """Neither a process nor a file."""
    left, plan = tmp_path / "left", tmp_path / "plan.json"
    left.mkdir()
    Plan(model=dataclasses.replace(MODELS["gpt2"], name="sleep"), tokens=8, micro_batch=1).save(plan)
    given = {"describe": f"{OWN}:sleeps", "run_apart": str(plan)}[what]
    root = Path(__file__).parents[1]
    where = os.environ | {"TMPDIR": str(left), "PYTHONPATH": str(root)}
    command = [sys.executable, "-c", STOPPED, what, given]
    with subprocess.Popen(command, env=where, cwd=root, stdout=subprocess.PIPE, text=True) as process:
        end = time.monotonic() + 300
        while not any(left.rglob("*.*")) and time.monotonic() < end:
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        said, _ = process.communicate(timeout=300)
    assert (process.returncode, said) == (143, "stopped by SIGTERM; no process of the run is left\n")
    assert not list(left.iterdir())
    assert not any(str(left) in line for line in _commands())


def _commands() -> list[str]:
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            found.append((folder / "cmdline").read_text().replace("\0", " "))
        except OSError:
            continue
    return found


def test_an_estimate_is_a_rehearsal_and_its_json_is_only_json() -> None:
    """What the code prints goes nowhere near it."""
    words = ["--module", f"{OWN}:noisy", "--input-shape", "12", "--batch-size", "4", "--gpu", "t4", "--format", "json"]
    said = CliRunner().invoke(app, ["estimate", *words])
    assert said.exit_code == 0, said.output
    found = json.loads(said.stdout)
    assert found["verdict"] == "fits"
    moments = found["allocated"]["by_moment"]
    assert moments["backward"] > moments["loss"] > 0  # a ledger plays no loss of a module
    assert any(line.startswith("rehearsed: ") for line in found["assumptions"])
    assert found["plan"]["model"]["module"]["loss"] == "cross-entropy"
    assert os.getcwd() not in found["plan"]["model"]["name"]


@pytest.mark.parametrize(
    ("name", "verdict", "note"),
    [
        ("Keeping", "unknown", "memory grows with every step"),
        ("Hosting", "fits", "32,000,000 B that its code makes on the CPU in two steps"),
    ],
)
def test_what_a_rehearsal_cannot_promise_is_said(name: str, verdict: str, note: str) -> None:
    words = ["--module", f"{OWN}:{name}", "--input-shape", "12", "--batch-size", "4", "--gpu", "t4", "--format", "json"]
    said = CliRunner().invoke(app, ["estimate", *words])
    found = json.loads(said.stdout)
    assert found["verdict"] == verdict
    assert any(note in line for line in found["assumptions"])
