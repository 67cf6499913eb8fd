"""Plan → timeline, from formulas: one steady-state training step on the fullest rank, without torch.

The step is the trainers' own (``trainers/loop.py``), played on the tape:

    init      where the whole model is built first: that, until each rank has its part
    resume    where a checkpoint is loaded to the device: that
    start     the next micro batch is made while the last one is still there
    forward   the model, block by block, with checkpointing and sharding around each
    loss      cross-entropy; then the model's output is dropped
    backward  the graph in reverse
    step      the optimizer's temporaries; gradients are freed
"""

from __future__ import annotations

from dataclasses import replace

from memcalc.collector import uncollected
from memcalc.parallel import Zero3
from memcalc.plan import Plan
from memcalc.stages import Stage, telling
from memcalc.stages import stage as stage_of
from memcalc.step import Step
from memcalc.timeline import Skeleton, Timeline

__all__ = ["fullest", "ledger", "peaks", "play", "skeleton", "skeletons"]


def ledger(plan: Plan, stage: int | None = None) -> Timeline:
    """The timeline of the plan's step, on the fullest stage of a pipeline or on the one asked for.

    >>> from memcalc.models import MODELS
    >>> ledger(Plan(model=MODELS["gpt2"], tokens=128, micro_batch=1, precision="bf16")).peak().moment
    'step'
    """
    return skeleton(plan, stage).at(plan.micro_batch)


def skeleton(plan: Plan, stage: int | None = None) -> Skeleton:
    """The same with the micro batch left open; the fullest stage is the one that is at the plan's micro batch."""
    return fullest(plan)[1] if stage is None else play(plan, stage_of(plan, stage))


def skeletons(plan: Plan) -> dict[int, Skeleton]:
    """Every stage that could be the fullest at some micro batch; without a pipeline stage 0."""
    return {each.index: play(plan, each) for each in telling(plan)}


def fullest(plan: Plan, played: dict[int, Skeleton] | None = None) -> tuple[int, Skeleton]:
    """The fullest stage at the plan's micro batch, the first of equals, and its skeleton.

    ``played`` are the skeletons of a plan that differs in nothing but the micro batch, where they are known.
    """
    found = skeletons(plan) if played is None else played
    return max(found.items(), key=lambda item: (item[1].peaks([plan.micro_batch])[0], -item[0]))


def peaks(plan: Plan, micro_batches: list[int]) -> list[int]:
    """Peak bytes of the fullest stage at each micro batch, of one structure."""
    found = [bones.peaks(micro_batches) for bones in skeletons(plan).values()]
    return [max(each) for each in zip(*found, strict=True)]


def play(plan: Plan, stage: Stage) -> Skeleton:
    """One step of one stage, recorded."""
    with uncollected():
        step = Step(plan, stage)
        if isinstance(step.hooks, Zero3):  # the first step records the order in which modules run
            rehearsal = Step(replace(plan, accumulation=1), stage)
            rehearsal.run()
            assert isinstance(rehearsal.hooks, Zero3)
            step.hooks.modules.follow(rehearsal.hooks.modules.seen)
        step.run()
        return step.skeleton()
