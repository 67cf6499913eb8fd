"""Launching: what is refused before anything starts, and what a run that fails says. No torch needed."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

from memcalc import launch as launch_module
from memcalc.cli.app import app
from memcalc.errors import FileError, InputError, PlanError, RunError
from memcalc.failure import failure
from memcalc.launch import check, command, environment
from memcalc.models import Model
from memcalc.optimizers import OPTIMIZERS
from memcalc.plan import Plan
from memcalc.training import Training
from tests.launching import CHECKPOINT, PLAN, TWO, refused, run

ROOT = Path(__file__).resolve().parent.parent
pytestmark = pytest.mark.usefixtures("machine")


# -- refused before anything is written ------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"steps": 0}, "steps 0 must be at least 1"),
        ({"eval_every": -1}, "eval every -1 must be at least 0"),
        ({"learning_rate": 0.0}, "learning rate 0.0 must be above 0"),
        ({"learning_rate": float("nan")}, "learning rate nan must be above 0"),
        ({"learning_rate": 1001.0}, "learning rate 1001.0 must be above 0 and at most 1000, like 3e-4"),
        ({"steps": 10**9 + 1}, "steps 1000000001 must be at most 1000000000"),
        ({"seed": -1}, "seed -1 must be at least 0"),
        ({"seed": 2**31}, "seed 2147483648 must be at most 2147483647"),
        ({"checkpoint_every": 10**100}, r"checkpoint every 10+\.\.\. must be at most 1000000000"),
        ({"measure_steps": 1}, "measure steps 1 would meter the first step only, .*; give 0 or at least 2"),
        ({"clip": float("inf")}, "clip inf must be at least 0"),
    ],
)
def test_options_that_make_no_sense(options: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        Training(**options)  # type: ignore[arg-type]


def test_options_at_their_limits() -> None:
    most = Training(steps=10**9, seed=2**31 - 1, learning_rate=1e3, eval_every=10**9, checkpoint_every=10**9)
    assert most.rate_at(10**9) == pytest.approx(100)
    assert Training(steps=1, measure_steps=1).measure_steps == 1


@pytest.mark.parametrize(
    ("words", "name"),
    [
        (["launch", "", "--out", "run"], "PLAN"),
        (["launch", "plan.json", "--out", ""], "--out"),
        (["launch", "plan.json", "--out", "run", "--data", ""], "--data"),
        (["launch", "plan.json", "--out", "run", "--tokenizer", ""], "--tokenizer"),
        (["compare", ""], "RUN_DIR"),
        (["validate", "--out", ""], "--out"),
    ],
)
def test_an_empty_path(words: list[str], name: str) -> None:
    done = CliRunner().invoke(app, words)
    assert (done.exit_code, done.output) == (2, f"memcalc: {name} '' is not a path\n")


def test_data_that_does_not_exist(tmp_path: Path) -> None:
    with pytest.raises(FileError, match=r"data .*book\.txt does not exist"):
        Training(data=tmp_path / "book.txt")


def test_more_ranks_than_gpus(tmp_path: Path, machine: SimpleNamespace) -> None:
    plan = replace(TWO, device="cuda")
    refused(plan, tmp_path, "needs 2 GPUs, this machine has no GPU", PlanError)
    refused(replace(PLAN, device="cuda"), tmp_path, "needs 1 GPU, this machine has no GPU", PlanError)
    machine.gpus = (SimpleNamespace(usable_bytes=2**34),)
    refused(plan, tmp_path, "needs 2 GPUs, this machine has 1 GPU;", PlanError)


def test_plans_that_cannot_be_run_here(tmp_path: Path) -> None:
    refused(
        replace(TWO, nodes=2), tmp_path, "2 nodes; on each of them give --node-rank R and --rdzv HOST:PORT", PlanError
    )
    size = Model(name="1,000 parameters", family="size", parameters=1000)
    refused(Plan(model=size, device="cpu"), tmp_path, "known by its size only", PlanError)


@pytest.mark.parametrize(("optimizer", "library"), [("lion", "lion_pytorch"), ("adamw-8bit", "bitsandbytes")])
def test_an_optimizer_that_torch_has_not(tmp_path: Path, optimizer: str, library: str) -> None:
    plan = replace(PLAN, optimizer=optimizer, optimizer_kind=OPTIMIZERS[optimizer].kinds[0])
    message = rf"^{optimizer} can be estimated but not trained: {library}.* is not part of torch, take adamw$"
    refused(plan, tmp_path / "run", message, PlanError)


def test_without_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    refused(PLAN, tmp_path / "run", r"torch is not installed; to train: pip install 'torch>=2\.6'$", RunError)


def test_warnings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch_module, "installed_torch", lambda: "2.6")
    assert check(replace(PLAN, strategy="ddp", ranks=4), out=tmp_path, training=Training()) == [
        "4 ranks share 2 cores and will be slow",
        f"the plan is for torch {PLAN.torch}, installed is 2.6: its estimate may differ",
    ]


# -- the call --------------------------------------------------------------------------------------


def test_the_call_of_torchrun(tmp_path: Path) -> None:
    words = command(2, "trainers", "plan.json", *Training(steps=7, data=tmp_path, resume=True).arguments())
    assert words[:2] == [sys.executable, "-m"]
    assert " ".join(words[2:9]) == "torch.distributed.run --standalone --max-restarts 0 --nproc-per-node 2 -m"
    assert " ".join(words[9:]) == (
        "trainers plan.json --steps 7 --seed 0 --learning-rate 0.0003 --clip 1.0 --eval-every 0 --checkpoint-every 0 "
        f"--measure-steps 3 --keep-checkpoints 0 --data {tmp_path} --resume"
    )


def test_the_environment_of_the_ranks() -> None:
    assert environment({})["OMP_NUM_THREADS"] == "1"
    assert environment({"OMP_NUM_THREADS": "8"})["OMP_NUM_THREADS"] == "8"
    assert environment({"PYTHONPATH": "/mine"})["PYTHONPATH"] == f"/mine{os.pathsep}{ROOT}"


def test_a_run_that_goes_well(tmp_path: Path, stub: Callable[[str], None]) -> None:
    stub("print('step 1'); sys.stderr.write('noise')")
    lines: list[str] = []
    done = run(PLAN, tmp_path / "deep" / "run", lines)
    assert lines[-1] == "step 1"
    assert Plan.load(done.out / "plan.json") == PLAN
    assert (done.out / "logs" / "torchrun.log").read_text() == "noise"


# -- what a failure says ---------------------------------------------------------------------------


def said(rank: int, kind: str, message: str, moment: str = "backward") -> str:
    error = {"rank": rank, "moment": moment, "kind": kind, "message": message}
    return f"(out / 'errors').mkdir(exist_ok=True); (out / 'errors' / 'rank-{rank}.json').write_text({json.dumps(error)!r})\n"


def test_the_first_rank_that_failed_is_named(tmp_path: Path, stub: Callable[[str], None]) -> None:
    stub(
        said(1, "error", "bad\n  gradient")
        + "time.sleep(0.05)\n"
        + said(0, "error", "connection closed by peer")
        + "sys.exit(1)"
    )
    with pytest.raises(
        RunError, match=rf"^rank 1 of 2 failed in backward: bad gradient; see {tmp_path}/logs/rank-1.log$"
    ) as caught:
        run(TWO, tmp_path)
    assert caught.value.exit_code == 1


def test_out_of_memory_names_the_next_plan(
    tmp_path: Path, stub: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def next_plan(plan: Plan, capacity: int) -> Plan:
        asked.append(capacity)
        return replace(plan, checkpoint_every=1, micro_batch=2)

    monkeypatch.setattr(import_module("memcalc.recommend"), "next_plan", next_plan)
    stub(
        said(0, "error", "connection closed")
        + "time.sleep(0.05)\n"
        + said(1, "oom", "CUDA out of memory")
        + "sys.exit(1)"
    )
    with pytest.raises(RunError) as caught:
        run(TWO, tmp_path)
    assert str(caught.value) == (
        "rank 1 of 2 ran out of memory in backward (estimated 2.625 MB there, 629.76 kB of it new gradients); "
        "what should fit: micro batch 2, checkpoint every 1 "
        f"(saved as {tmp_path}/next-plan.json); see {tmp_path}/logs/rank-1.log"
    )
    assert asked == [4 * 2**30]  # two ranks share the RAM
    assert Plan.load(tmp_path / "next-plan.json").checkpoint_every == 1


def test_out_of_memory_and_nothing_fits(
    tmp_path: Path, stub: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(import_module("memcalc.recommend"), "next_plan", lambda plan, capacity: None)
    stub(said(0, "oom", "") + "sys.exit(1)")
    with pytest.raises(RunError, match="no plan for this model fits on this machine"):
        run(PLAN, tmp_path)


ROOT_CAUSE = """
trainers FAILED
Root Cause (first observed failure):
[0]:
  time      : 2026-01-01_00:00:00
  rank      : 1 (local_rank: 1)
  exitcode  : {code} (pid: 7)
"""


@pytest.mark.parametrize(
    ("log", "message"),
    [
        (
            ROOT_CAUSE.format(code=-9),
            r"rank 1 was killed \(signal 9\), as the kernel does when memory runs out",
        ),
        (ROOT_CAUSE.format(code=-15), "rank 1 was killed (signal 15, Terminated)"),
        (ROOT_CAUSE.format(code=3), "rank 1 ended with exit code 3 and left no message"),
        (
            "Traceback ...\nImportError: libcudart.so.12: cannot open\n\n",
            "torchrun failed: ImportError: libcudart.so.12: cannot open;",
        ),
        ("", "torchrun ended with exit code 5"),
    ],
)
def test_a_rank_that_left_no_word(tmp_path: Path, log: str, message: str) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "torchrun.log").write_text(log)
    assert str(failure(TWO, tmp_path, 5)).startswith(message.replace("\\", ""))


def survivor(out: Path, log: str, kind: str = "error") -> str:
    """What is said of a run whose rank 0 left a message, and whose torchrun wrote ``log``."""
    (out / "logs").mkdir()
    (out / "logs" / "torchrun.log").write_text(log)
    (out / "errors").mkdir()
    error = {"rank": 0, "moment": "backward", "kind": kind, "message": "Connection reset by peer"}
    (out / "errors" / "rank-0.json").write_text(json.dumps(error))
    return str(failure(TWO, out, 1))


OTHERS = """Failures:
[1]:
  time      : 2026-01-01_00:00:00
  rank      : {rank} (local_rank: {rank})
  exitcode  : {code} (pid: 6)
------------------------------------------------------------"""


@pytest.mark.parametrize(
    "log",
    [
        OTHERS.format(rank=0, code=1) + ROOT_CAUSE.format(code=-9),
        # Both ended within a second, and torchrun took the wrong one for the first.
        OTHERS.format(rank=1, code=-9) + ROOT_CAUSE.format(code=1).replace("rank      : 1", "rank      : 0"),
    ],
)
def test_a_killed_rank_is_named_and_not_the_one_that_lost_it(tmp_path: Path, log: str) -> None:
    assert survivor(tmp_path, log) == (
        f"rank 1 was killed (signal 9), as the kernel does when memory runs out; see {tmp_path}/logs"
    )


@pytest.mark.parametrize("code", [-6, -15])
def test_a_rank_that_ended_because_another_failed_is_no_cause(tmp_path: Path, code: int) -> None:
    assert survivor(tmp_path, ROOT_CAUSE.format(code=code)).startswith("rank 0 of 2 failed in backward: Connection")


def test_a_rank_that_torchrun_had_to_kill_is_no_cause(tmp_path: Path) -> None:
    log = "Unable to shutdown process 7 via 15, forcefully exiting via 9\n" + ROOT_CAUSE.format(code=-9)
    assert survivor(tmp_path, log).startswith("rank 0 of 2 failed in backward: Connection")


def test_a_rank_that_said_it_is_out_of_memory_goes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(import_module("memcalc.recommend"), "next_plan", lambda plan, capacity: None)
    assert survivor(tmp_path, ROOT_CAUSE.format(code=-9), "oom").startswith("rank 0 of 2 ran out of memory")


def test_a_full_disk_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=4096))
    assert str(failure(PLAN, tmp_path, 1)) == (
        f"no space left on the disk of {tmp_path}; torchrun ended with exit code 1; see {tmp_path}/logs"
    )
    message = survivor(tmp_path, ROOT_CAUSE.format(code=1))
    assert message.startswith(f"no space left on the disk of {tmp_path}; rank 0 of 2 failed in backward: Connection")


@pytest.mark.parametrize("text", ["", "{", "[]", '{"rank": "x"}', "\x00"])
def test_a_torn_error_file_hides_nothing(tmp_path: Path, text: str) -> None:
    (tmp_path / "errors").mkdir()
    (tmp_path / "errors" / "rank-0.json").write_text(text)
    assert str(failure(PLAN, tmp_path, 5)) == f"torchrun ended with exit code 5; see {tmp_path}/logs"


def test_what_an_earlier_try_said_is_forgotten(tmp_path: Path, stub: Callable[[str], None]) -> None:
    stub(said(0, "error", "old") + CHECKPOINT.format(step=1) + "sys.exit(1)")
    with pytest.raises(RunError, match="old"):
        run(PLAN, tmp_path)
    stub("sys.exit(9)")
    with pytest.raises(RunError, match="exit code 9"):
        run(PLAN, tmp_path, resume=True)
