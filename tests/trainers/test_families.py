"""Every model family beside its torch twin: the same weights, and real runs that agree with the ledger.

``memcalc validate`` covers the first families; here are the others, each with the strategies, precisions and kinds of
checkpointing in which a family could differ.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import lru_cache
from itertools import product

import pytest

from memcalc.ledger import ledger
from memcalc.models import FAMILIES, MODELS, Model
from memcalc.plan import Plan
from memcalc.validate import CHECKPOINTING, Result, loss_problems, validate
from trainers.models import build, units

SMALL = {
    "bert": Model(
        name="small-bert", family="bert", layers=4, hidden=128, heads=4, kv_heads=4, ffn=512, vocab=1000, context=128,
        types=2, tied=True,
    ),
    "moe": Model(
        name="small-moe", family="moe", layers=4, hidden=128, heads=4, kv_heads=2, ffn=192, vocab=1000, context=128,
        experts=4, top_k=2, shared_ffn=96,
    ),
    "resnet": Model(
        name="small-resnet", family="resnet", stages=(1, 2), bottleneck=True, hidden=32, image=64, channels=3,
        features=3 * 64 * 64, classes=10,
    ),
    "t5": Model(
        name="small-t5", family="t5", layers=2, decoder_layers=2, hidden=128, heads=4, kv_heads=4, ffn=512, vocab=1000,
        context=64, buckets=32, tied=True,
    ),
    "vit": Model(
        name="small-vit", family="vit", layers=4, hidden=128, heads=4, kv_heads=4, ffn=512, image=64, channels=3,
        patch=8, features=3 * 64 * 64, classes=10,
    ),
}  # fmt: skip
BATCH = {"bert": 8, "moe": 8, "resnet": 64, "t5": 8, "vit": 32}
"""Samples per step, over all ranks. oneDNN's scratch memory for a ResNet's 16-bit products, up to half a MiB
whatever the batch and not in the ledger, weighs less than a percent of so many."""
EXTRAS: dict[str, dict[str, object]] = {
    "bert dropout": {"dropout": 0.1},
    "bert eager": {"attention": "eager"},
    "bert math bf16": {"attention": "math", "precision": "bf16"},
    "bert amp": {"precision": "amp-bf16"},
    "bert amp checkpoint": {"precision": "amp-bf16", "checkpoint_every": 2},
    "moe eager": {"attention": "eager"},
    "moe amp": {"precision": "amp-bf16"},
    "moe without a shared expert": {"model": dataclasses.replace(SMALL["moe"], shared_ffn=0)},
    "resnet of basic blocks": {
        "model": dataclasses.replace(SMALL["resnet"], stages=(2, 1), bottleneck=False),
        "precision": "bf16",
    },
    "resnet amp": {"precision": "amp-bf16"},
    "t5 dropout": {"dropout": 0.1},
    "t5 amp": {"precision": "amp-bf16"},
    "t5 checkpoints of two blocks": {"checkpoint_every": 2},
    "t5 gated, with a head of its own": {"model": dataclasses.replace(SMALL["t5"], gated=True, tied=False)},
    "vit dropout": {"dropout": 0.1},
    "vit amp": {"precision": "amp-bf16"},
    "bert reentrant": {"checkpoint_every": 1, "reentrant": True},
}


def plan(model: Model, /, **changes: object) -> Plan:
    fields = {"model": model, "tokens": model.context, "micro_batch": BATCH[model.family], "device": "cpu", **changes}
    return Plan(**fields)  # type: ignore[arg-type]


def plans(name: str) -> dict[str, Plan]:
    """Everything that is run of one family."""
    found = {}
    for strategy, precision, (kind, every) in product(
        ("single", "ddp", "fsdp-full-shard"), ("fp32", "bf16"), CHECKPOINTING.items()
    ):
        ranks = 1 if strategy == "single" else 2
        found[f"{name} {strategy} {precision} {kind}"] = plan(
            SMALL[name], strategy=strategy, ranks=ranks, precision=precision, checkpoint_every=every,
            micro_batch=BATCH[name] // ranks,
        )  # fmt: skip
    return found | {case: plan(SMALL[name], **changes) for case, changes in EXTRAS.items() if case.split()[0] == name}


Runs = Callable[[str], dict[str, Result]]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """The results of one family, run when they are first asked for: two torchrun calls each."""

    @lru_cache
    def of(family: str) -> dict[str, Result]:
        folder = tmp_path_factory.mktemp(family)
        return {result.name: result for result in validate(plans(family), out=folder, show=lambda result: None)}

    return of


@pytest.mark.parametrize("name", [case for family in SMALL for case in plans(family)])
def test_the_ledger_agrees_with_a_real_run(runs: Runs, name: str) -> None:
    result = runs(name.split()[0])[name]
    assert result.problem is None, result


# Batch norm takes its statistics over a rank's own samples, so a ResNet's losses depend on the ranks.
@pytest.mark.parametrize("family", [name for name in SMALL if name != "resnet"])
def test_fp32_losses_do_not_depend_on_the_strategy(runs: Runs, family: str) -> None:
    # Dropout differs by rank.
    same = [r for r in runs(family).values() if not r.plan.dropout and r.plan.model == SMALL[family]]
    assert len(same) > 5
    assert loss_problems(same) == []


def test_what_experts_keep_does_not_depend_on_the_routing(runs: Runs) -> None:
    """Real routers are not balanced, but the moment of the loss, when all that is kept is alive, agrees to a few bytes:
    the profiler's random generator and the scalars of the loss."""
    result = runs("moe")["moe single fp32 none"]
    assert result.comparison is not None
    measured = result.comparison.measurement.ranks[0].by_moment["loss"]
    assert abs(ledger(result.plan).peak().by_moment["loss"] - measured) <= 16


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
