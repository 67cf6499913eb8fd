"""Why a plan was chosen, in one sentence."""

from __future__ import annotations

from collections.abc import Sequence

from memcalc.plan import Plan
from memcalc.strategies import STRATEGIES

__all__ = ["why"]

# What each strategy sends in a step, which is what it costs in time.
_SENDS = {
    "single": "one rank, so nothing is sent",
    "ddp": "fits without dividing anything, so only gradients are sent, once a step",
    "zero-1": "divided optimizer states; the updated weights are sent after the step",
    "fsdp-no-shard": "fits without dividing anything; one flat gradient per block saves DDP's buckets",
    "fsdp-shard-grad-op": "everything divided; weights are gathered once a micro batch",
    "fsdp-full-shard": "everything divided; weights are gathered twice a micro batch",
}


def why(plan: Plan, fitting: Sequence[Plan]) -> str:
    """One sentence on a plan, given all plans of the search that fit."""
    order = list(STRATEGIES)
    rank = (order.index(plan.strategy), plan.checkpoint_every)
    simpler = [other for other in fitting if (order.index(other.strategy), other.checkpoint_every) < rank]
    text = _SENDS.get(plan.strategy, plan.strategy_row.summary)
    if plan.ranks > 1 and plan.strategy_row.shards_optimizer and not simpler:
        text = f"the plainest that fits: {text}"
    elif plan.ranks > 1 and plan.strategy_row.shards_optimizer:
        text = f"{text}; each rank updates only its share"
    return text + _on_checkpointing(plan, fitting) + _on_batch(plan)


def _on_checkpointing(plan: Plan, fitting: Sequence[Plan]) -> str:
    same = [other for other in fitting if (other.strategy, other.precision) == (plan.strategy, plan.precision)]
    without = max((other.micro_batch for other in same if not other.checkpoint_every), default=None)
    if not plan.checkpoint_every:
        return "; nothing is computed twice"
    if without is None:
        return "; without checkpointing it does not fit"
    if plan.micro_batch > without:
        return f"; checkpointing makes room for a micro batch of {plan.micro_batch} instead of {without}"
    return "; checkpointing saves memory and computes the forward pass twice"


def _on_batch(plan: Plan) -> str:
    return f"; {plan.accumulation} micro batches make up a step" if plan.accumulation > 1 else ""
