"""A resumed run goes on as if it had never stopped; what is not complete does not count."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from memcalc.measurement import Measurement
from memcalc.models.gpt2 import weights
from tests.trainers.runs import Job, Result, plan, run

PLANS = {
    "single": plan(dropout=0.1),
    "ddp": plan(ranks=2, strategy="ddp"),
    "zero-1": plan(ranks=2, strategy="zero-1"),
    "fsdp-full-shard": plan(ranks=2, strategy="fsdp-full-shard", dropout=0.1),
    "fsdp-no-shard": plan(ranks=2, strategy="fsdp-no-shard"),
    "adafactor": plan(ranks=2, strategy="zero-1", optimizer="adafactor", optimizer_kind="for-loop"),
    "adagrad": plan(ranks=2, strategy="fsdp-full-shard", optimizer="adagrad"),
    "amsgrad": plan(ranks=2, strategy="fsdp-shard-grad-op", optimizer="amsgrad"),
    "rmsprop": plan(ranks=2, strategy="fsdp-full-shard", optimizer="rmsprop", optimizer_kind="for-loop"),
    "momentum": plan(ranks=2, strategy="fsdp-full-shard", optimizer="sgd-momentum"),
    "fused": plan(ranks=2, strategy="fsdp-full-shard", optimizer_kind="fused"),
    "sgd": plan(ranks=2, strategy="ddp", optimizer="sgd"),
    "amp-fp16": plan(ranks=2, strategy="ddp", precision="amp-fp16"),
}
STEPS, STOP = 6, 3


def jobs(folder: Path, names: list[str], **options: object) -> dict[str, Job]:
    options = {"checkpoint_every": STOP, **options}
    return {name: Job(PLANS[name], steps=STEPS, out=folder / name, options=tuple(options.items())) for name in names}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def results(folder: Path) -> tuple[dict[str, Result], dict[str, Result]]:
    """Uninterrupted runs, and runs resumed from their checkpoint in the middle."""
    (resumed := folder / "resumed").mkdir()
    groups = {ranks: [name for name, each in PLANS.items() if each.ranks == ranks] for ranks in (1, 2)}
    whole: dict[str, Result] = {}
    for ranks, names in groups.items():
        whole |= run(jobs(folder, names), ranks, folder)
    for name in PLANS:
        (resumed / name).mkdir()
        shutil.copytree(folder / name / "checkpoints" / f"step-{STOP}", resumed / name / "checkpoints" / f"step-{STOP}")
        # One that was cut off while it was written:
        shutil.copytree(
            folder / name / "checkpoints" / f"step-{STEPS}", resumed / name / "checkpoints" / f"step-{STEPS}"
        )
        (resumed / name / "checkpoints" / f"step-{STEPS}" / "done.json").unlink()
    shutil.copytree(resumed / "ddp", resumed / "other-strategy")
    again: dict[str, Result] = {}
    for ranks, names in groups.items():
        more = {}
        if ranks == 1:  # ddp's checkpoint, by one rank with another strategy
            options = (("resume", True), ("checkpoint_every", 0))
            more = {
                "other-strategy": Job(
                    plan(strategy="fsdp-shard-grad-op"), steps=STEPS, out=resumed / "other-strategy", options=options
                )
            }
        again |= run(jobs(resumed, names, resume=True) | more, ranks, resumed)
    return whole, again


@pytest.mark.parametrize("name", PLANS)
def test_resumed_losses(results: tuple[dict[str, Result], dict[str, Result]], name: str) -> None:
    whole, resumed = (side[name] for side in results)
    assert len(whole.losses) == STEPS
    assert resumed.losses == pytest.approx(whole.losses, abs=1e-6, rel=0)
    assert resumed.evaluation == pytest.approx(whole.evaluation, abs=1e-6, rel=0)


def test_another_strategy_and_world_goes_on(results: tuple[dict[str, Result], dict[str, Result]]) -> None:
    whole, resumed = results
    assert resumed["other-strategy"].losses == pytest.approx(whole["ddp"].losses, abs=5e-5, rel=0)


def test_weights_are_whole_and_safe_to_load(results: tuple[dict[str, Result], dict[str, Result]], folder: Path) -> None:
    saved = {name: load_file(folder / name / "weights" / "model.safetensors") for name in ("ddp", "fsdp-full-shard")}
    expected = {weight.name: weight.shape for weight in weights(PLANS["ddp"].model)}
    for tensors in saved.values():
        assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == expected
    again = load_file(folder / "resumed" / "ddp" / "weights" / "model.safetensors")
    assert all(torch.allclose(again[name], saved["ddp"][name], atol=1e-6) for name in expected)


def test_the_record_of_a_resumed_run_is_the_whole_run(
    results: tuple[dict[str, Result], dict[str, Result]], folder: Path
) -> None:
    record = Measurement.from_json(folder / "resumed" / "ddp" / "run.json")
    assert (record.status, len(record.losses), record.plan) == ("done", STEPS, PLANS["ddp"])


def test_another_model_is_refused(
    results: tuple[dict[str, Result], dict[str, Result]], folder: Path, tmp_path: Path
) -> None:
    marker = folder / "single" / "checkpoints" / f"step-{STEPS}" / "done.json"
    assert json.loads(marker.read_text())["model"]["name"] == "gpt2-tiny"
    job = Job(plan("llama-tiny"), out=folder / "single", options=(("resume", True),))
    with pytest.raises(AssertionError, match="was saved by a run with another model or optimizer"):
        run({"other": job}, 1, tmp_path)
