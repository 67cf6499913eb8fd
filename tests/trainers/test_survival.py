"""Runs that are told to stop, lose a rank, or are spread over nodes end with the losses of one that nothing happened to."""

from __future__ import annotations

import os
import re
import signal
import socket
import time
from pathlib import Path

import pytest

from memcalc.measurement import Measurement
from memcalc.models import MODELS
from memcalc.plan import Plan
from tests.trainers.launched import anything_left, ended, memcalc, ranks_of
from tests.trainers.runs import SECONDS

PLAN = Plan(
    model=MODELS["gpt2-tiny"], tokens=64, micro_batch=2, strategy="fsdp-full-shard", ranks=2, device="cpu", dropout=0.1
)
STEPS = 48
WORDS = ("--steps", STEPS, "--checkpoint-every", 12, "--keep-checkpoints", 2)


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plan") / "plan.json"
    PLAN.save(path)
    return path


@pytest.fixture(scope="module")
def undisturbed(plan: Path, tmp_path_factory: pytest.TempPathFactory) -> list[float | None]:
    run = tmp_path_factory.mktemp("undisturbed") / "run"
    code, _, err = ended(memcalc("launch", plan, *WORDS, "--out", run))
    assert code == 0, err
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["step-36", "step-48"]
    return losses(run)


def losses(run: Path) -> list[float | None]:
    record = Measurement.from_json(run / "run.json")
    assert (record.status, len(record.losses)) == ("done", STEPS)
    return record.losses


def saved(run: Path) -> None:
    """Wait for the run's first checkpoint."""
    deadline = time.monotonic() + SECONDS
    while not any((run / "checkpoints").glob("step-*/done.json")):
        assert time.monotonic() < deadline, "no checkpoint"
        time.sleep(0.02)


@pytest.mark.parametrize("who", ["launcher", "one rank"])
def test_a_run_that_is_told_to_stop_saves_and_goes_on(
    plan: Path, undisturbed: list[float | None], tmp_path: Path, who: str
) -> None:
    run = tmp_path / "run"
    process = memcalc("launch", plan, *WORDS, "--out", run)
    saved(run)
    os.kill(process.pid if who == "launcher" else ranks_of(run)[1], signal.SIGTERM)
    code, _, err = ended(process)
    said = re.fullmatch(
        rf"memcalc: stopped by SIGTERM and saved; resume with: memcalc (launch {run}/plan.json --out {run} --resume) "
        r"\(from step (\d+)\)\n", err,
    )  # fmt: skip
    assert said, err
    assert code == 75
    assert anything_left(run) == []
    code, out, err = ended(memcalc(*said[1].split()))
    assert code == 0, err
    assert f"resumed at step {said[2]}" in out
    assert losses(run) == pytest.approx(undisturbed, abs=1e-6, rel=0)


def test_a_run_comes_back_from_a_killed_rank(plan: Path, undisturbed: list[float | None], tmp_path: Path) -> None:
    run = tmp_path / "run"
    process = memcalc("launch", plan, *WORDS, "--max-restarts", 1, "--out", run)
    saved(run)
    os.kill(ranks_of(run)[1], signal.SIGKILL)
    code, out, err = ended(process)
    assert code == 0, err
    assert "resumed at step " in out
    assert losses(run) == pytest.approx(undisturbed, abs=1e-6, rel=0)


def test_two_nodes_on_one_machine(plan: Path, undisturbed: list[float | None], tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        place = f"127.0.0.1:{free.getsockname()[1]}"
    run = tmp_path / "run"
    words = ("launch", plan, *WORDS, "--out", run, "--nodes", 2, "--rdzv", place, "--node-rank")
    first, second = (memcalc(*words, node) for node in (0, 1))
    code, out, err = ended(first)
    assert code == 0, err
    assert "allocated" in out
    assert ended(second)[0] == 0
    assert losses(run) == pytest.approx(undisturbed, abs=1e-6, rel=0)
    assert {path.name for path in (run / "logs").iterdir()} == {
        "rank-0.log", "rank-1.log", "torchrun.log", "torchrun-node-1.log",
    }  # fmt: skip
