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


def why(plan: Plan, fitting: Sequence[Plan], searched: Sequence[Plan]) -> str:
    """One sentence on a plan, given all plans of its search and those of them that fit."""
    rank, text = _plainness(plan), _SENDS.get(plan.strategy, plan.strategy_row.summary)
    if plan.ranks > 1 and plan.strategy_row.shards_optimizer:
        if any(_plainness(other) < rank for other in fitting):
            text = f"{text}; each rank updates only its share"
        elif any(_plainness(other) < rank for other in searched):
            text = f"the plainest that fits: {text}"
    return text + _on_checkpointing(plan, fitting, searched) + _on_batch(plan)


def _plainness(plan: Plan) -> tuple[int, int]:
    return (list(STRATEGIES).index(plan.strategy), plan.checkpoint_every)


def _on_checkpointing(plan: Plan, fitting: Sequence[Plan], searched: Sequence[Plan]) -> str:
    if not plan.checkpoint_every:
        return "; nothing is computed twice"
    without = max((other.micro_batch for other in fitting if _is_without(plan, other)), default=None)
    if without is not None and plan.micro_batch > without:
        return f"; checkpointing makes room for a micro batch of {plan.micro_batch} instead of {without}"
    if without is None and any(_is_without(plan, other) for other in searched):
        return "; without checkpointing it does not fit"
    return "; checkpointing saves memory and computes the forward pass twice"


def _is_without(plan: Plan, other: Plan) -> bool:
    """The same structure without checkpointing."""
    same = (plan.strategy, plan.ranks, plan.precision) == (other.strategy, other.ranks, other.precision)
    return same and not other.checkpoint_every


def _on_batch(plan: Plan) -> str:
    return f"; {plan.accumulation} micro batches make up a step" if plan.accumulation > 1 else ""
