"""Every model family beside its torch twin: the same weights, and real runs that agree with the ledger.

``memcalc validate`` covers the first families; here are the others, each with the strategies, precisions and kinds of
checkpointing in which a family could differ.
"""

from __future__ import annotations

import dataclasses
import os

import pytest

from memcalc.ledger import ledger
from memcalc.models import FAMILIES, MODELS, Model
from memcalc.plan import Plan
from memcalc.validate import CHECKPOINTING, Result, loss_problems, validate
from tests.trainers.runs import some
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
EXTRAS: dict[str, dict[str, object]] = some(
    {
        "bert dropout": {"dropout": 0.1},
        "bert amp checkpoint": {"precision": "amp-bf16", "checkpoint_every": 2},
        "moe amp": {"precision": "amp-bf16"},
        "moe without a shared expert": {"model": dataclasses.replace(SMALL["moe"], shared_ffn=0)},
        "resnet of basic blocks": {"model": dataclasses.replace(SMALL["resnet"], stages=(2, 1), bottleneck=False)},
        "t5 dropout": {"dropout": 0.1},
        "t5 amp": {"precision": "amp-bf16"},
        "t5 gated, with a head of its own": {"model": dataclasses.replace(SMALL["t5"], gated=True, tied=False)},
        "vit amp": {"precision": "amp-bf16"},
    }
)


def plan(model: Model, /, **changes: object) -> Plan:
    fields = {"model": model, "tokens": model.context, "micro_batch": BATCH[model.family], "device": "cpu", **changes}
    return Plan(**fields)  # type: ignore[arg-type]


# One of each strategy, precision and kind of checkpointing; all of them together take ten minutes on two cores. The last
# is run by ``make test-all`` only.
CORNERS = (
    ("single", "fp32", "none"),
    ("ddp", "fp32", "full"),
    ("fsdp-full-shard", "fp32", "none"),
    ("fsdp-full-shard", "bf16", "full"),
)[: 4 if os.environ.get("ALL_RUNS") else 3]


def plans(name: str) -> dict[str, Plan]:
    """Everything that is run of one family."""
    found = {}
    for strategy, precision, kind in CORNERS:
        ranks = 1 if strategy == "single" else 2
        found[f"{name} {strategy} {precision} {kind}"] = plan(
            SMALL[name], strategy=strategy, ranks=ranks, precision=precision, checkpoint_every=CHECKPOINTING[kind],
            micro_batch=BATCH[name] // ranks,
        )  # fmt: skip
    return found | {case: plan(SMALL[name], **changes) for case, changes in EXTRAS.items() if case.split()[0] == name}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Result]:
    """All of them, in two torchrun calls."""
    everything = {case: made for family in SMALL for case, made in plans(family).items()}
    folder = tmp_path_factory.mktemp("families")
    return {result.name: result for result in validate(everything, out=folder, show=lambda result: None)}


@pytest.mark.parametrize("name", [case for family in SMALL for case in plans(family)])
def test_the_ledger_agrees_with_a_real_run(results: dict[str, Result], name: str) -> None:
    assert results[name].problem is None, results[name]


# Batch norm takes its statistics over a rank's own samples, so a ResNet's losses depend on the ranks.
@pytest.mark.parametrize("family", [name for name in SMALL if name != "resnet"])
def test_fp32_losses_do_not_depend_on_the_strategy(results: dict[str, Result], family: str) -> None:
    # Dropout differs by rank.
    same = [r for r in results.values() if not r.plan.dropout and r.plan.model == SMALL[family]]
    assert len({r.plan.strategy for r in same}) == 3
    assert loss_problems(same) == []


def test_what_experts_keep_does_not_depend_on_the_routing(results: dict[str, Result]) -> None:
    """Real routers are not balanced, but the moment of the loss, when all that is kept is alive, agrees to a few bytes:
    the profiler's random generator and the scalars of the loss."""
    result = results["moe single fp32 none"]
    assert result.comparison is not None
    measured = result.comparison.measurement.ranks[0].by_moment["loss"]
    assert abs(ledger(result.plan).peak().by_moment["loss"] - measured) <= 16


@pytest.mark.parametrize(
    "name",
    [name for name, model in MODELS.items() if model.parameters == 0 and not FAMILIES[model.family].untrained(model)],
)
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
