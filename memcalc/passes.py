"""The forward and backward passes of a step apart from what is held between steps, with what plans share of them played once.

Plans share them that differ in how the optimizer walks, in who holds its states, or in how many layers there are.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from itertools import islice, pairwise
from typing import Any

from memcalc.adapters import Adapter
from memcalc.alike import Events, Outline, stretches
from memcalc.collector import uncollected
from memcalc.errors import InputError
from memcalc.frozen import Frozen
from memcalc.models import FAMILIES, Model
from memcalc.plan import Plan
from memcalc.spec import HEAD, ROOT
from memcalc.stages import stage
from memcalc.step import Step
from memcalc.timeline import Skeleton

__all__ = ["DEEP", "SHALLOW", "all_passes", "first_passes", "in_parts", "stand_in"]

SHALLOW = 3
"""Layers of a stage, counted in those that one checkpoint spans, that are played beside one more: FSDP fetches the next one
ahead, so that the first and the last are not like those between."""

DEEP = 2 * SHALLOW + 2
"""Layers of a stage from which on that is less to play than all of them."""

KEPT = 256
"""Outlines that are kept for another look."""


def stand_in(plan: Plan, **changes: Any) -> Plan:
    """The same with some fields changed and nothing checked: a plan that stands for all that share what is worked out of it.

    >>> from memcalc.models import MODELS
    >>> plan = Plan(model=MODELS["gpt2"], tokens=8, micro_batch=2)
    >>> stand_in(plan, micro_batch=1) == replace(plan, micro_batch=1)
    True
    """
    made = object.__new__(Plan)
    for name in Plan.__slots__:
        object.__setattr__(made, name, changes[name] if name in changes else getattr(plan, name))
    return made


def in_parts(plan: Plan) -> bool:
    """The passes are the same whatever is held between steps, and the update whatever the passes were."""
    return plan.strategy_row.engine == "torch" and not plan.strategy_row.one_process


def all_passes(plan: Plan, index: int) -> Outline:
    """Every pass of one stage, whatever the micro batch of the plan."""
    return _parts(_alike(plan), index, 0)[0]


def first_passes(plan: Plan, count: int) -> tuple[Outline, ...]:
    """The first ``count`` forward passes of the first stage, each by itself, as far as all of them wait for their backward."""
    return _parts(_alike(plan), 0, count)


def _alike(plan: Plan) -> Plan:
    """The plan that stands for all with its passes."""
    layout = plan.layout
    # ZeroRedundancyOptimizer divides updates alone; all its gradients are DDP's.
    strategy = "ddp" if plan.strategy == "zero-1" else plan.strategy
    many = (
        layout.pipeline > 1 and layout.schedule == "1f1b"
    )  # of which no more are played (memcalc/schedules.py, played)
    return stand_in(
        plan, strategy=strategy,
        optimizer_kind=plan.optimizer_kind if plan.update.in_backward else plan.optimizer_row.usual_kind(plan.device),
        accumulation=min(plan.accumulation, 2 * layout.pipeline + 2) if many else plan.accumulation,
    )  # fmt: skip


def _parts(plan: Plan, index: int, climbs: int) -> tuple[Outline, ...]:
    """All passes in one, or so many of the first forward passes one by one."""
    span = max(plan.checkpoint_every, 1) * plan.layout.pipeline * plan.layout.chunks * plan.checkpointing.one_in
    layers, ends = plan.model.layers, plan.layout.first_layers or plan.layout.last_layers
    if layers // span >= DEEP and not ends and _uniform(plan.model, plan.adapter, plan.frozen):
        low = layers % span + SHALLOW * span
        grown = _grown(plan, low, low + span, index, climbs)
        if grown is not None:
            return tuple(replace(each, copies=(layers - low) // span) for each in grown)
    return _whole(plan, index, climbs)


@lru_cache(maxsize=64)
def _uniform(model: Model, adapter: Adapter, frozen: Frozen) -> bool:
    """Every layer has weights of the same shapes and dtypes, of which the same are trained."""
    if model.layers != model.blocks or model.family == "size":
        return False
    layers: dict[str, list[object]] = {}
    for weight in frozen.weights(adapter.weights(FAMILIES[model.family].weights(model), model.heads)):
        if weight.group not in (ROOT, HEAD):
            layers.setdefault(weight.group, []).append((weight.shape, weight.trainable, weight.dtype))
    return len(layers) == model.layers and len({tuple(each) for each in layers.values()}) == 1


@lru_cache(maxsize=KEPT)
def _whole(plan: Plan, index: int, climbs: int) -> tuple[Outline, ...]:
    bones, parts = _played(plan, index, climbs)
    return tuple(Outline(passes=(Events.of(bones, part),)) for part in parts)


@lru_cache(maxsize=KEPT)
def _grown(plan: Plan, low: int, high: int, index: int, climbs: int) -> tuple[Outline, ...] | None:
    """The same of a model of ``low`` layers, with what one of ``high`` has more; None where that is no repetition."""
    try:
        few, more = (replace(plan, model=replace(plan.model, layers=layers)) for layers in (low, high))
    except InputError:  # a family of which layers alone cannot be changed
        return None
    (a, heres), (b, theres) = _played(few, index, climbs), _played(more, index, climbs)
    made: list[Outline] = []
    for here, there in zip(heres, theres, strict=True):
        found = stretches(a, b, here, there)
        if found is None:
            return None
        cuts = [here.start, *(here.start + each.before for each in found), here.stop]
        ends = [(there.start + each.events.start, there.start + each.events.stop) for each in found]
        made.append(Outline(
            passes=tuple(Events.of(a, slice(*each)) for each in pairwise(cuts)),
            more=tuple(Events.of(b, slice(*each)) for each in ends),
        ))  # fmt: skip
    return tuple(made)


def _played(plan: Plan, index: int, climbs: int) -> tuple[Skeleton, list[slice]]:
    """A step up to the update, and which of its events are those of its passes; or of so many forward passes, each."""
    with uncollected():
        step = Step(plan, stage(plan, index))
        step.begin()
        marks = [step.tape.events]
        if climbs:
            for _ in islice(step.climb(), climbs):
                marks.append(step.tape.events)
        else:
            step.passes(few=True)
            marks.append(step.tape.events)
        return step.skeleton(), [slice(*each) for each in pairwise(marks)]
