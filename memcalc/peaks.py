"""The allocated peak of plans, of steps of which no part is played twice.

A step is played in two parts. What lives between steps and the update are of each plan; its passes it shares with its like:
plans that differ in how the optimizer walks, in who holds its states, or in how many layers there are.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from memcalc.alike import Events, Fullest, Outline
from memcalc.collector import uncollected
from memcalc.ledger import play
from memcalc.loss import Loss
from memcalc.passes import all_passes, in_parts, stand_in
from memcalc.plan import Plan
from memcalc.stages import stage, telling
from memcalc.step import Step

__all__ = ["REPEATS", "fullest_of", "outline", "peak_of", "shared", "stages_of"]

REPEATS = 3
"""Micro batches of a step that are played one by one without a pipeline: a first, a middle and a last one differ."""

KEPT = 512
"""Outlines that are kept for another look."""

Passes = tuple[tuple[Events, ...], tuple[Events, ...]]


def peak_of(plan: Plan) -> int:
    """Allocated peak in bytes, of the fullest stage. Raises PlanError past 4 EiB.

    >>> from memcalc.ledger import peaks
    >>> from memcalc.models import MODELS
    >>> plan = Plan(model=MODELS["gpt2-xl"], tokens=1024, micro_batch=4, ranks=8, strategy="fsdp-full-shard")
    >>> [peak_of(plan)] == peaks(plan, [4])
    True
    """
    return max(outline(plan, index).peak(plan.micro_batch) for index in stages_of(plan))


def fullest_of(plan: Plan) -> Fullest:
    """The fullest point of the fullest stage, the first of equals. Raises PlanError past 4 EiB."""
    return max(
        (outline(plan, index).fullest(plan.micro_batch) for index in stages_of(plan)), key=lambda each: each.bytes
    )


def stages_of(plan: Plan) -> list[int]:
    """Those of which one is the fullest; without a pipeline stage 0."""
    return [each.index for each in telling(plan)]


def outline(plan: Plan, index: int) -> Outline:
    """A step of one stage, whatever the micro batch of the plan. Only the last stage of a pipeline takes the loss, so that the
    others share one for all its forms."""
    if plan.loss.chunk_head and index < plan.layout.pipeline - 1:
        plan = stand_in(plan, loss=Loss(vocab_multiple=plan.loss.vocab_multiple))
    return _outline(shared(plan), index)


def shared(plan: Plan) -> Plan:
    """The plan that stands for all with its step: of another micro batch, and where nothing is divided over the ranks
    that hold the same weights, of two of these."""
    row = plan.strategy_row
    whole = not (row.shards_optimizer or row.shards_parameters or row.one_process or row.zero_stage is not None)
    ranks = 2 * plan.layout.model_parallel if whole and plan.data_parallel > 2 else plan.ranks
    return stand_in(
        plan, micro_batch=1 if plan.micro_batch else 0, ranks=ranks, nodes=plan.nodes if ranks == plan.ranks else 1,
        accumulation=plan.accumulation if plan.layout.pipeline > 1 else min(plan.accumulation, REPEATS),
    )  # fmt: skip


@lru_cache(maxsize=KEPT)
def _outline(plan: Plan, index: int) -> Outline:
    if not in_parts(plan):
        return Outline.whole(play(plan, stage(plan, index)))
    with uncollected():
        step = Step(plan, stage(plan, index))
        step.begin()
        cut = step.tape.events
        step.end()
        bones = step.skeleton()
    return replace(
        all_passes(plan, index), before=Events.of(bones, slice(0, cut)), after=Events.of(bones, slice(cut, None))
    )
