"""What differs between two plans of a contest, by the names people turn them by."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from memcalc.plan import Plan

__all__ = ["KNOBS", "knobs_of"]

KNOBS: dict[str, Callable[[Plan], Any]] = {
    "strategy": lambda plan: (plan.strategy, plan.fsdp.version if plan.strategy_row.gathers else ""),
    "layout": lambda plan: (plan.layout.tensor, plan.layout.pipeline, plan.layout.context, plan.layout.expert),
    "schedule": lambda plan: (plan.layout.schedule, plan.layout.chunks),
    "shard size": lambda plan: plan.shards if plan.strategy_row.shards_optimizer else 0,
    "micro batch": lambda plan: plan.micro_batch,
    "checkpointing": lambda plan: (plan.checkpoint_every, plan.checkpointing),
    "compile": lambda plan: plan.compute.compile,
    "offload": lambda plan: (plan.offload.optimizer, plan.offload.parameters, plan.compute.offload_activations),
    "optimizer": lambda plan: (plan.optimizer, plan.optimizer_kind, plan.update),
    "precision": lambda plan: (plan.precision, plan.compute.float8),
    "attention": lambda plan: plan.attention,
}
"""Each knob and its setting in a plan. Accumulation and data parallel follow from the others."""


def knobs_of(one: Plan | None, other: Plan | None) -> tuple[str, ...]:
    """Names of the knobs in which two plans differ; of shards only where strategy and layout are the same."""
    if one is None or other is None:
        return ()
    found = [name for name, setting in KNOBS.items() if setting(one) != setting(other)]
    if "shard size" in found and {"strategy", "layout"} & set(found):
        found.remove("shard size")
    return tuple(found)
