"""What a verdict has to be read with: of plans whose numbers are known to be less sure, or whose words leave out a cure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memcalc.precision import DTYPE_BYTES
from memcalc.units import format_both

if TYPE_CHECKING:
    from memcalc.plan import Plan

__all__ = [
    "CLOSE", "CLOSE_SAID", "FROZEN_ABOVE", "FROZEN_MOST_PCT", "FROZEN_READINGS", "close", "copied_once", "frozen", "hints", "keeps_whole_gradients",
    "machine_host", "per_machine", "whole_gradients",
]  # fmt: skip

CLOSE = 0.02
"""Headroom below this part of the card is pointed out: a desktop or another process takes as much."""
CLOSE_SAID = (
    f"less than {CLOSE:.0%} of the card is left, and what else runs on it may take that; --keep-free 5% leaves more"
)

# What memcalc bench says of memcalc/bench/facts.csv: published readings of nvidia-smi of runs with frozen weights, how many of
# them are above the high end of the estimate, and by how much at most.
FROZEN_READINGS = 39
FROZEN_ABOVE = 12
FROZEN_MOST_PCT = 24


def frozen(plan: Plan) -> str:
    """How sure the high end is where weights are frozen, in a sentence; blank where none are, and on CPU cores."""
    if not plan.adapter.freezes or plan.device == "cpu":
        return ""
    return (
        f"of {FROZEN_READINGS} published readings of nvidia-smi with frozen weights (LoRA, QLoRA) {FROZEN_ABOVE} were above the "
        f"high end, by up to {FROZEN_MOST_PCT} % (foundation-model-stack/fms-acceleration, scripts/benchmarks/refs)"
    )


def keeps_whole_gradients(plan: Plan) -> bool:
    """FSDP that sums gradients over the micro batches of a step before it reduces them (no_sync)."""
    accumulates = plan.accumulation > 1 and plan.layout.pipeline == 1
    return plan.strategy_row.gathers and plan.shards > 1 and accumulates and not plan.fsdp.sync_every_micro_batch


def whole_gradients(plan: Plan) -> str:
    """That they are kept, and how not to, in a sentence; blank where they are not."""
    if not keeps_whole_gradients(plan):
        return ""
    return (
        f"FSDP keeps whole gradients from the first of the {plan.accumulation} micro batches of a step to the last (no_sync); "
        "--sync-every-micro-batch keeps shards only"
    )


def per_machine(plan: Plan) -> int:
    """Ranks that share the RAM of a machine."""
    return -(-plan.ranks // plan.nodes)


def machine_host(plan: Plan, host: int) -> str:
    """Host memory of a machine where something is offloaded, of ``host`` bytes a rank; blank elsewhere."""
    each = per_machine(plan)
    if plan.device == "cpu" or not plan.offload.on:
        return ""
    return f"{each} rank{'s' * (each > 1)} of a machine: {format_both(each * host)} of host memory"


def close(left: int, there: int) -> bool:
    """So few of the bytes that are ``there`` are left that what else runs on the card may take them."""
    return left < CLOSE * there


def hints(plan: Plan, verdict: str, *, high: int, limit: int, keep_free: int = 0) -> list[str]:
    """What to do about a verdict on a card, in sentences. All in bytes: the ``high`` end, and the ``limit`` it is held against,
    which leaves ``keep_free`` of the card."""
    if verdict in ("tight", "does-not-fit"):
        return [said for said in (whole_gradients(plan),) if said]
    if verdict != "fits":
        return []
    if frozen(plan) and high * (100 + FROZEN_MOST_PCT) > limit * 100:
        more = "" if keep_free else "; --keep-free 20% would leave room for that"
        return [f"{frozen(plan)}{more}"]
    return [CLOSE_SAID] if not keep_free and close(limit - high, limit) else []


def copied_once(plan: Plan) -> str:
    """What a static graph takes in the first step alone (torch/nn/parallel/distributed.py, _DDPSink), and whether a peak
    could be higher for it: the states of the optimizer are not there yet."""
    first = "static graph: DDP copies the model's output in the first step, before there are optimizer states"
    if not plan.model.says_words:
        return f"{first}; that copy is not counted"
    low = plan.precision_row.weights
    output = plan.micro_batch * plan.tokens * plan.model.vocab * DTYPE_BYTES[plan.precision_row.compute]
    states = sum(
        sum(plan.optimizer_row.state_bytes(weight, weight.dtype or low)) for weight in plan.weights if weight.trainable
    )
    if output <= states:
        return (
            f"{first}: at most {format_both(output)} in the place of {format_both(states)}, so that no peak is higher"
        )
    return f"{first}; that copy, at most {format_both(output)}, is not counted"
