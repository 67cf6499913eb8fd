"""What laws of plans share: other plans made of a drawn one, and what of a timeline they speak of."""

from __future__ import annotations

import dataclasses

import numpy as np

from memcalc.compute import Compute
from memcalc.layout import Layout
from memcalc.ledger import ledger
from memcalc.offload import Offload
from memcalc.optimizers import OPTIMIZERS
from memcalc.plan import Plan
from memcalc.timeline import CATEGORIES, MOMENTS, Timeline
from memcalc.update import Update

__all__ = [
    "QUANTISING", "STATES", "adaptable", "at_home", "divided_by_strategy_alone", "kept_activations", "model_states",
    "padding", "replaced", "with_states_that_divide",
]  # fmt: skip

STATES = ("parameters", "gradients", "optimizer")
# Keep large tensors in fewer bits, or elsewhere.
QUANTISING = tuple(name for name in OPTIMIZERS if name.endswith(("-8bit", "-ao")) or name.startswith("paged"))


def kept_activations(timeline: Timeline) -> int:
    """Activation bytes alive when the model's forward pass is done."""
    last = np.flatnonzero(timeline.moment == MOMENTS.index("forward"))[-1]
    of_kind = np.where(timeline.category == CATEGORIES.index("activations"), timeline.delta, 0)
    return int(of_kind[: last + 1].sum())


def model_states(plan: Plan) -> int:
    """Parameters, gradients and optimizer states when the step begins."""
    timeline = ledger(plan)
    first = np.flatnonzero(timeline.moment == MOMENTS.index("step"))
    upto = first[0] if len(first) else len(timeline.delta)
    kinds = np.isin(timeline.category[:upto], [CATEGORIES.index(name) for name in STATES])
    return int(timeline.delta[:upto][kinds].sum())


def with_states_that_divide(plan: Plan) -> Plan:
    """Some states are quantised, paged or counted only for large tensors, so that a smaller shard may cost more."""
    plan = replaced(plan, update=dataclasses.replace(plan.update, in_backward=False))
    if plan.optimizer not in ("adamw", "sgd", "adafactor"):
        plan = replaced(plan, optimizer="adamw", optimizer_kind="foreach", update=Update(ema=plan.update.ema))
    return plan


def divided_by_strategy_alone(plan: Plan) -> Plan:
    """Data parallel of what any strategy can train: no other layout, and no master copies."""
    precision = "fp32" if plan.precision_row.master else plan.precision
    update = dataclasses.replace(plan.update, in_backward=False)
    return replaced(
        plan,
        ranks=plan.data_parallel,
        nodes=1,
        layout=Layout(),
        precision=precision,
        attention="auto",
        update=update,
        compute=Compute(compile=plan.compute.compile),
    )


def at_home(plan: Plan) -> Plan:
    """Nothing waits on the host, where small tensors do not go: a larger one may then leave and take less."""
    return replaced(plan, compute=dataclasses.replace(plan.compute, offload_activations=False))


def padding(plan: Plan) -> int:
    """Bytes by which buffers of a plan's strategy may be longer than their weights, with 20 bytes of states each."""
    if plan.strategy == "megatron-distributed":
        return 20 * 128 * plan.shards
    # FSDP 1 begins each weight at a multiple of 16 bytes, and pads to a multiple of the ranks.
    return 20 * (8 + plan.shards) * len(plan.weights) if plan.fsdp.version == "1" else 0


def adaptable(plan: Plan) -> Plan:
    """Divided by a strategy that can train adapters."""
    plan, row = replaced(divided_by_strategy_alone(plan), offload=Offload(), update=Update()), plan.strategy_row
    other = row.main_grads or row.zero_stage is not None or plan.fsdp.version == "1"
    return replaced(plan, strategy="ddp", loss_dtype="float32") if other else plan


def replaced(plan: Plan, **changes: object) -> Plan:
    """The plan with other fields, and without what belongs to the device or the strategy that it had."""
    if changes.get("device") == "cpu" or "strategy" in changes:
        changes = {"offload": Offload()} | changes
    if "adapter" in changes:
        changes = {"fsdp": dataclasses.replace(plan.fsdp, version="2"), "offload": Offload()} | changes
    if "strategy" in changes or "ranks" in changes:
        changes = {"fsdp": dataclasses.replace(plan.fsdp, replicas=0)} | changes
    return dataclasses.replace(plan, **changes)  # type: ignore[arg-type]
