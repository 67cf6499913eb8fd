"""Every model family beside its torch twin: the same weights, and real runs that agree with the ledger.

``memcalc validate`` covers the first families; here are the others, each with the strategies, precisions and kinds of
checkpointing in which a family could differ.
"""

from __future__ import annotations

import dataclasses
from itertools import product
from pathlib import Path

import pytest

from memcalc.models import FAMILIES, MODELS, Model
from memcalc.plan import Plan
from memcalc.validate import CHECKPOINTING, Result, loss_problems, validate
from trainers.models import build, units

SMALL = {
    "bert": Model(
        name="small-bert", family="bert", layers=4, hidden=128, heads=4, kv_heads=4, ffn=512, vocab=1000, context=128,
        types=2, tied=True,
    ),
}  # fmt: skip
BATCH = 8
"""Samples per step, over all ranks."""
EXTRAS: dict[str, dict[str, object]] = {
    "bert dropout": {"dropout": 0.1},
    "bert eager": {"attention": "eager"},
    "bert math bf16": {"attention": "math", "precision": "bf16"},
    "bert amp": {"precision": "amp-bf16"},
    "bert amp checkpoint": {"precision": "amp-bf16", "checkpoint_every": 2},
    "bert reentrant": {"checkpoint_every": 1, "reentrant": True},
}


def plan(model: Model, **changes: object) -> Plan:
    fields = {"model": model, "tokens": model.context, "micro_batch": BATCH, "device": "cpu", **changes}
    return Plan(**fields)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Result]:
    """All runs, two torchrun calls in all."""
    plans = {}
    for (name, model), strategy, precision, (kind, every) in product(
        SMALL.items(), ("single", "ddp", "fsdp-full-shard"), ("fp32", "bf16"), CHECKPOINTING.items()
    ):
        ranks = 1 if strategy == "single" else 2
        plans[f"{name} {strategy} {precision} {kind}"] = plan(
            model, strategy=strategy, ranks=ranks, precision=precision, checkpoint_every=every,
            micro_batch=BATCH // ranks,
        )  # fmt: skip
    plans |= {name: plan(SMALL[name.split()[0]], **changes) for name, changes in EXTRAS.items()}
    folder: Path = tmp_path_factory.mktemp("families")
    return {result.name: result for result in validate(plans, out=folder, show=lambda result: None)}


CASES = [
    *(
        f"{name} {strategy} {precision} {kind}"
        for name, strategy, precision, kind in product(
            SMALL, ("single", "ddp", "fsdp-full-shard"), ("fp32", "bf16"), CHECKPOINTING
        )
    ),
    *EXTRAS,
]


@pytest.mark.parametrize("name", CASES)
def test_the_ledger_agrees_with_a_real_run(results: dict[str, Result], name: str) -> None:
    assert results[name].problem is None, str(results[name].comparison)


@pytest.mark.parametrize("family", SMALL)
def test_fp32_losses_do_not_depend_on_the_strategy(results: dict[str, Result], family: str) -> None:
    # Dropout differs by rank and is a run of its own.
    same = [r for r in results.values() if r.plan.model.family == family and not r.plan.dropout]
    assert len(same) > 5
    assert loss_problems(same) == []


@pytest.mark.parametrize("name", [name for name, model in MODELS.items() if model.parameters == 0])
def test_the_twin_has_the_same_weights(name: str) -> None:
    """By shape and order, and by name: of the blocks to the letter."""
    model = MODELS[name]
    if model.layers > 24:
        model = dataclasses.replace(model, layers=2)
    made = Plan(model=model, tokens=model.context and 8, micro_batch=1, device="cpu")
    twin = build(made)
    weights = FAMILIES[model.family].weights(model)
    assert [(n, tuple(p.shape)) for n, p in twin.named_parameters()] == [(w.name, w.shape) for w in weights]
    groups = list(dict.fromkeys(w.group for w in weights if "." in w.group))
    assert len(units(twin, made)) == len(groups)
