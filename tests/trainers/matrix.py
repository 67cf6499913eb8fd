"""What the matrix of strategies shares: runs that are metered, saved in the middle, and gone on with from there."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from memcalc.deepspeed import DeepSpeed
from memcalc.fsdp import Fsdp
from memcalc.ledger import ledger
from memcalc.measurement import Measurement
from memcalc.models import MODELS, Model
from memcalc.offload import Offload
from memcalc.plan import Plan
from memcalc.training import Training
from tests.trainers.runs import Job, Result, run
from trainers.loop import train
from trainers.process import Rank, join

GPT2 = dataclasses.replace(MODELS["gpt2-tiny"], layers=4)
LLAMA = Model(
    name="llama-of-4", family="llama", layers=4, hidden=64, heads=4, kv_heads=2, ffn=192, vocab=256, context=128
)  # fmt: skip
MLP = Model(
    name="mlp-of-4", family="mlp", layers=4, hidden=96, features=64, classes=10, widths=(96, 160, 64, 48), activation="gelu"
)  # fmt: skip
TIED = dataclasses.replace(LLAMA, name="llama-of-4-tied", tied=True)
HOST = Offload(optimizer="cpu", parameters="cpu")
SMALL = DeepSpeed(reduce_bucket_size=50_000, prefetch_bucket_size=20_000, persistence_threshold=500)
OLD = Fsdp(version="1")
STEPS, STOP, BATCH, TOKENS = 4, 3, 8, 64  # metered before the first checkpoint, whose tensors are no step's

Fields = dict[str, object]


def plan(ranks: int, *, model: Model = GPT2, **fields: object) -> Plan:
    """A plan whose step takes the same samples whatever the layout."""
    tokens = TOKENS if model.context else 0
    single = Plan(model=model, tokens=tokens, micro_batch=BATCH, device="cpu", ranks=ranks, **fields)  # type: ignore[arg-type]
    return dataclasses.replace(single, micro_batch=BATCH // single.data_parallel // single.accumulation)


@dataclass(frozen=True)
class Runs:
    """Runs of one number of ranks: plans, whole runs, and those resumed in the middle."""

    plans: dict[str, Plan]
    whole: dict[str, Result]
    resumed: dict[str, Result]


def both(
    plans: dict[str, Plan], ranks: int, folder: Path, by_name: dict[str, dict[str, object]] | None = None,
    more: dict[str, Job] | None = None, once: Collection[str] = (), driver: str = "driver.py", **options: object,
) -> Runs:  # fmt: skip
    """Train all plans, and each once more from its checkpoint in the middle; ``by_name`` are options of single ones.

    ``more`` are jobs beside them, whose results stand with the resumed ones; plans named in ``once`` are not gone on with.
    """
    saved, jobs = Path("checkpoints") / f"step-{STOP}", {}
    for name, each in plans.items():
        given = {"checkpoint_every": STOP, **options, **(by_name or {}).get(name, {})}
        first, again = folder / name, folder / f"{name}-again"
        jobs[name] = Job(each, steps=STEPS, out=first, measure_steps=STOP, options=tuple(given.items()))
        if name in once:
            continue
        goes_on = tuple((given | {"resume": True}).items())
        jobs[f"{name}-again"] = Job(each, steps=STEPS, out=again, options=goes_on, copy=(first / saved, again / saved))
    found = run(jobs | (more or {}), ranks, folder, driver=driver, timeout=900)
    resumed = {name: found[f"{name}-again"] for name in plans if name not in once}
    resumed |= {name: found[name] for name in more or {}}
    return Runs(plans, {name: found[name] for name in plans}, resumed)


def references(models: list[Model], **options: Any) -> dict[str, Measurement]:
    """The same steps on one rank, by model, in this process."""
    settings = Training(steps=STEPS, measure_steps=0, learning_rate=1e-3, **options)
    with join(Rank(rank=0, local=0, world=1), "cpu", 0) as process:
        return {model.name: train(plan(1, model=model), settings, process) for model in models}


def check_losses(runs: Runs, name: str, alone: dict[str, Measurement], places: float = 5e-5) -> None:
    """To 4 decimals what one rank has."""
    reference = alone[runs.plans[name].model.name]
    assert runs.whole[name].losses == pytest.approx(reference.losses, abs=places, rel=0)
    assert runs.whole[name].evaluation == pytest.approx(reference.evaluation_loss, abs=places, rel=0)


def check_peak(runs: Runs, name: str, percent: float) -> None:
    """The fullest rank of each stage holds what the ledger says."""
    each = runs.plans[name]
    for index in range(each.layout.pipeline):
        mine = [rank.allocated_peak for rank in runs.whole[name].ranks if each.layout.stage_of(rank.rank) == index]
        assert ledger(each, index).steady().bytes == pytest.approx(max(mine), rel=percent / 100), index


def check_resumed(runs: Runs, name: str) -> None:
    """A run that was stopped goes on as if it had not been."""
    assert runs.resumed[name].losses == pytest.approx(runs.whole[name].losses, abs=5e-5, rel=0)
    assert runs.resumed[name].evaluation == pytest.approx(runs.whole[name].evaluation, abs=5e-5, rel=0)
