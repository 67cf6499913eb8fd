"""Small models of the families that ``memcalc validate`` leaves out, each with the strategies, precisions and kinds of
checkpointing in which a family could differ."""

from __future__ import annotations

import dataclasses
import os

from memcalc.models import Model
from memcalc.plan import Plan
from memcalc.validate import CHECKPOINTING
from tests.trainers.runs import some

__all__ = ["SMALL", "plans"]

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
