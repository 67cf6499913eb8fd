"""Ranks, agents and launchers killed at any moment, during a checkpoint too: every run ends with the same last loss.

Two kills by default; ``make chaos`` takes 50 and draws them anew each time.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import time
from dataclasses import replace
from pathlib import Path

import pytest

from memcalc.measurement import Measurement
from memcalc.models import MODELS
from memcalc.plan import Plan
from memcalc.run_folder import newest_checkpoint
from tests.trainers.launched import anything_left, ended, memcalc, ranks_of

KILLS = int(os.environ.get("KILLS", "2"))
STEPS = 40
BASE = Plan(model=MODELS["gpt2-tiny"], tokens=64, micro_batch=2, strategy="ddp", ranks=2, device="cpu")
STRATEGIES = ("fsdp-full-shard", "zero-1", "ddp", "fsdp-shard-grad-op", "fsdp-no-shard")
WORDS = ("--steps", STEPS, "--checkpoint-every", 3, "--keep-checkpoints", 2, "--measure-steps", 0)
LONGEST = 180.0
"""Seconds a launch may take on a busy machine; a hang is a failure."""


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, float | None]:
    """The last loss of each strategy when nothing happens, filled as strategies come up."""
    return {}


def last_loss(run: Path) -> float | None:
    record = Measurement.from_json(run / "run.json")
    assert (record.status, len(record.losses)) == ("done", STEPS)
    return record.losses[-1]


def victim(process: subprocess.Popen[str], run: Path, who: str) -> int:
    """The process to kill: the launcher, torchrun's agent, or a rank; the launcher where there is none yet."""
    children = [int(child) for child in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]
    ranks = ranks_of(run)
    found = {"launcher": process.pid, "agent": children[0] if children else 0, "rank": ranks.get(1, 0)}
    return found[who] or process.pid


@pytest.mark.parametrize("number", range(KILLS))
def test_a_run_that_is_killed_ends_as_if_it_had_not_been(
    tmp_path: Path, undisturbed: dict[str, float | None], number: int
) -> None:
    drawn = random.Random(number if "KILLS" not in os.environ else None)
    strategy = STRATEGIES[number % len(STRATEGIES)]
    plan, run = tmp_path / "plan.json", tmp_path / "run"
    replace(BASE, strategy=strategy).save(plan)
    if strategy not in undisturbed:
        started = time.monotonic()
        code, _, err = ended(memcalc("launch", plan, *WORDS, "--out", tmp_path / "whole"))
        assert code == 0, err
        undisturbed[strategy] = last_loss(tmp_path / "whole")
        undisturbed[f"seconds of {strategy}"] = time.monotonic() - started
    seconds = undisturbed[f"seconds of {strategy}"] or 0.0
    process = memcalc("launch", plan, *WORDS, "--out", run)
    time.sleep(drawn.uniform(0.0, seconds))
    who, how = drawn.choice(("launcher", "agent", "rank")), drawn.choice((signal.SIGKILL, signal.SIGTERM))
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError, FileNotFoundError):  # it ended between the look and the kill
            os.kill(victim(process, run, who), how)
    process.communicate(timeout=LONGEST)
    deadline = time.monotonic() + LONGEST  # after a SIGKILL nobody is left to wait with
    while anything_left(run) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert anything_left(run) == [], f"{who} {how.name}"
    if newest_checkpoint(run) is not None:
        code, out, err = ended(memcalc("launch", run / "plan.json", "--out", run, "--resume"))
    else:
        code, out, err = ended(memcalc("launch", plan, *WORDS, "--out", tmp_path / "again"))
        run = tmp_path / "again"
    assert code == 0, f"{who} {how.name}: {err}"
    assert last_loss(run) == pytest.approx(undisturbed[strategy], abs=5e-5, rel=0), f"{who} {how.name}"
    assert [path.name for path in run.rglob(".*") if path.name != ".metadata"] == []
