"""Ranks, agents and launchers killed at any moment, while they save too: every run ends with the same last loss.

One kill by default, test_survival.py has more; ``make chaos`` takes 50, draws them anew each time, and makes docs/validation/chaos.md of what
happened. CHAOS_SEED draws the same again.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from safetensors import safe_open

from memcalc.checkpoints import newest_checkpoint
from memcalc.fsdp import Fsdp
from memcalc.layout import Layout
from memcalc.measurement import Measurement
from memcalc.models import MODELS, Model
from memcalc.plan import Plan
from tests.trainers.chaos import WHO, Kill
from tests.trainers.launched import anything_left, ended, memcalc, ranks_of

KILLS = int(os.environ.get("KILLS", "1"))
SEED = int(os.environ.get("CHAOS_SEED", "0" if "KILLS" not in os.environ else str(time.time_ns() % 10**6)))
STEPS = 40
BASE = Plan(model=MODELS["gpt2-tiny"], tokens=64, micro_batch=2, strategy="ddp", ranks=2, device="cpu")
LLAMA = Model(
    name="llama-chaos", family="llama", layers=2, hidden=32, heads=2, kv_heads=2, ffn=64, vocab=256, context=64
)  # fmt: skip
STRATEGIES: dict[str, dict[str, object]] = {
    "fsdp-full-shard": {"strategy": "fsdp-full-shard"},
    "zero-1": {"strategy": "zero-1"},
    "pipeline": {"strategy": "single", "layout": Layout(pipeline=2), "accumulation": 2},
    "tensor": {"strategy": "single", "model": LLAMA, "layout": Layout(tensor=2)},
    "ddp": {"strategy": "ddp"},
    "fsdp-shard-grad-op": {"strategy": "fsdp-shard-grad-op"},
    "fsdp-full-shard of FSDP 1": {"strategy": "fsdp-full-shard", "fsdp": Fsdp(version="1")},
    "fsdp-hybrid-shard": {"strategy": "fsdp-hybrid-shard", "fsdp": Fsdp(replicas=2)},
    "fsdp-no-shard": {"strategy": "fsdp-no-shard"},
}
WORDS = ("--steps", STEPS, "--checkpoint-every", 3, "--keep-checkpoints", 2, "--measure-steps", 0)
LONGEST = 180.0
"""Seconds a launch, or what is left of a killed one, may take on a busy machine; a hang is a failure."""


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[float | None, float]]:
    """The last loss of each strategy when nothing happens and how long that took, filled as strategies come up."""
    return {}


def last_loss(run: Path) -> float | None:
    record = Measurement.from_json(run / "run.json")
    assert (record.status, len(record.losses)) == ("done", STEPS)
    return record.losses[-1]


def victim(process: subprocess.Popen[str], run: Path, who: str) -> tuple[str, int]:
    """The process to kill: the launcher, torchrun's agent, or a rank; the launcher where there is none yet."""
    children = [int(child) for child in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]
    ranks = ranks_of(run)
    found = {"agent": children[0] if children else 0, "rank 0": ranks.get(0, 0), "rank 1": ranks.get(1, 0)}
    return (who, found[who]) if found.get(who) else ("launcher", process.pid)


def saving(run: Path) -> bool:
    """A checkpoint has been begun and is not complete."""
    return any(not (path / "done.json").exists() for path in (run / "checkpoints").glob("step-*"))


def wait_for(process: subprocess.Popen[str], run: Path, drawn: random.Random, seconds: float) -> None:
    """Until a moment somewhere in the run, one after its first checkpoint, or one in which a checkpoint is being written:
    starting takes longer than all steps, so that few moments of the whole are among these."""
    what, part, begun = drawn.choice(("any", "after one", "saving")), drawn.random(), time.monotonic()
    reached: float | None = begun if what == "any" else None
    while process.poll() is None:
        now = time.monotonic()
        if reached is None and newest_checkpoint(run) is not None:
            reached = now
        if what == "saving" and reached is not None and saving(run):
            return
        if what != "saving" and reached is not None and now - reached > part * seconds * (1 if what == "any" else 0.3):
            return
        time.sleep(0.002)


def torn(run: Path, *, ended: bool = True) -> list[str]:
    """Files that are not whole: that cannot be read or, of a run that ended and was not killed, have not got their names."""
    found = [str(path) for path in run.rglob(".*") if path.name != ".metadata"] if ended else []
    for path in run.rglob("*.json"):
        try:
            json.loads(path.read_text())
        except ValueError:
            found.append(str(path))
    for path in run.rglob("*.safetensors"):
        with safe_open(path, "pt") as file:  # raises when the file is shorter than its header says
            assert file.keys()
    return found


@pytest.mark.parametrize("number", range(KILLS))
def test_a_run_that_is_killed_ends_as_if_it_had_not_been(
    tmp_path: Path, undisturbed: dict[str, tuple[float | None, float]], number: int
) -> None:
    drawn = random.Random(SEED * 1000 + number)
    strategy = list(STRATEGIES)[number % len(STRATEGIES)]
    plan, run = tmp_path / "plan.json", tmp_path / "run"
    replace(BASE, **STRATEGIES[strategy]).save(plan)  # type: ignore[arg-type]
    if strategy not in undisturbed:
        started = time.monotonic()
        code, _, err = ended(memcalc("launch", plan, *WORDS, "--out", tmp_path / "whole"))
        assert code == 0, err
        undisturbed[strategy] = last_loss(tmp_path / "whole"), time.monotonic() - started
    wanted, seconds = undisturbed[strategy]
    process = memcalc("launch", plan, *WORDS, "--out", run)
    wait_for(process, run, drawn, seconds)
    who, how = drawn.choice(WHO), drawn.choice((signal.SIGKILL, signal.SIGTERM))
    saved, at = saving(run), "nothing: it had ended"
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError, FileNotFoundError):  # it ended between the look and the kill
            who, pid = victim(process, run, who)
            os.kill(pid, how)
            at = "while it saved" if saved else "before a checkpoint" if newest_checkpoint(run) is None else "after one"
    begun = time.monotonic()
    process.communicate(timeout=LONGEST)
    while anything_left(run) and time.monotonic() - begun < LONGEST:  # after a SIGKILL nobody is left to wait with
        time.sleep(0.02)
    kill = Kill(
        seed=SEED, number=number, steps=STEPS, strategy=strategy, who=who, how=how.name, at=at, code=process.returncode,
        seconds=time.monotonic() - begun,
    )  # fmt: skip
    assert anything_left(run) == [], kill
    assert torn(run, ended=False) == [], kill
    newest = newest_checkpoint(run)
    if newest is not None:
        code, out, err = ended(memcalc("launch", run / "plan.json", "--out", run, "--resume"))
    else:  # a folder in which no step was finished is free
        run = tmp_path / "again"
        code, out, err = ended(memcalc("launch", plan, *WORDS, "--out", run))
    assert code == 0, f"{kill}: {err}"
    assert last_loss(run) == pytest.approx(wanted, abs=5e-5, rel=0), kill
    assert torn(run) == [], kill
    if log := os.environ.get("CHAOS_LOG"):
        with open(log, "a") as file:
            file.write(json.dumps(asdict(replace(kill, resumed=None if newest is None else newest[0]))) + "\n")
