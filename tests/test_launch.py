"""Launching: what is refused before anything starts, and how the ranks are called. No torch needed."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

from memcalc import launch as launch_module
from memcalc.cli.app import app
from memcalc.errors import FileError, InputError, PlanError, RunError
from memcalc.fsdp import Fsdp
from memcalc.launch import check, command, environment, installed_torch
from memcalc.models import Model
from memcalc.optimizers import OPTIMIZERS
from memcalc.plan import Plan
from memcalc.sound import unheard
from memcalc.training import Training
from tests.launching import PLAN, TWO, refused, run

ROOT = Path(__file__).resolve().parent.parent


pytestmark = pytest.mark.usefixtures("machine")


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


def test_what_a_plan_says_in_vain_is_named(tmp_path: Path) -> None:
    """Options that change nothing are refused; a plan's file may have been edited."""
    plan = replace(PLAN, bucket_views=True, fsdp=Fsdp(reduce_dtype="compute"), torch=installed_torch() or PLAN.torch)
    said = check(plan, out=tmp_path, training=Training())
    assert said[-2:] == [
        "the plan says what changes nothing: --bucket-views is for DDP's buckets, not for strategy single",
        f"the plan says what changes nothing: --reduce-dtype {plan.fsdp.idle(plan)['reduce_dtype']}",
    ]
    assert unheard(PLAN) == [] == unheard(replace(TWO, bucket_views=True))


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
