"""The allocated peak of plans, of steps of which no part is played twice.

A step is played in two parts. What lives between steps and the update are of each plan; its passes it shares with its like:
plans that differ in how the optimizer walks, in who holds its states, or in how many layers there are.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from itertools import pairwise

from memcalc.adapters import Adapter
from memcalc.alike import Events, Fullest, Outline, stretches
from memcalc.collector import uncollected
from memcalc.errors import InputError
from memcalc.frozen import Frozen
from memcalc.layout import Layout
from memcalc.ledger import Step, play
from memcalc.loss import Loss
from memcalc.models import FAMILIES, Model
from memcalc.plan import Plan
from memcalc.recorder import granularity
from memcalc.spec import HEAD, ROOT
from memcalc.stages import stage, telling
from memcalc.timeline import Skeleton

__all__ = ["REPEATS", "fullest_of", "outline", "peak_of", "stages_of"]

SHALLOW = 3
"""Layers of a stage, counted in those that one checkpoint spans, that are played beside one more: FSDP fetches the next one
ahead, so that the first and the last are not like those between."""

DEEP = 2 * SHALLOW + 2
"""Layers of a stage from which on that is less to play than all of them."""

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
    return max((outline(plan, index).fullest(plan.micro_batch) for index in stages_of(plan)), key=lambda each: each.bytes)


def stages_of(plan: Plan) -> list[int]:
    """Those of which one is the fullest; without a pipeline stage 0."""
    return [each.index for each in telling(plan)]


def outline(plan: Plan, index: int) -> Outline:
    """A step of one stage, whatever the micro batch of the plan. Only the last stage of a pipeline takes the loss, so that the
    others share one for all its forms."""
    if plan.loss.chunk_head and index < plan.layout.pipeline - 1:
        plan = replace(plan, loss=Loss(vocab_multiple=plan.loss.vocab_multiple))
    return _outline(_shared(plan), index)


def _shared(plan: Plan) -> Plan:
    """The plan that stands for all with its step: of another micro batch, and where nothing is divided over the ranks
    that hold the same weights, of two of these."""
    row = plan.strategy_row
    whole = not (row.shards_optimizer or row.shards_parameters or row.one_process or row.zero_stage is not None)
    ranks = 2 * plan.layout.model_parallel if whole and plan.data_parallel > 2 else plan.ranks
    return replace(
        plan, micro_batch=1 if plan.micro_batch else 0, ranks=ranks, nodes=plan.nodes if ranks == plan.ranks else 1,
        accumulation=plan.accumulation if plan.layout.pipeline > 1 else min(plan.accumulation, REPEATS),
    )  # fmt: skip


@lru_cache(maxsize=KEPT)
def _outline(plan: Plan, index: int) -> Outline:
    if plan.strategy_row.engine != "torch" or plan.strategy_row.one_process:
        return Outline.whole(play(plan, stage(plan, index)))
    passes, more, copies = _passes_of(plan, index)
    with uncollected():
        step = Step(plan, stage(plan, index))
        step.begin()
        cut = step.tape.events
        step.end()
        bones = step.tape.skeleton(granularity(plan.device))
    before, after = Events.of(bones, slice(0, cut)), Events.of(bones, slice(cut, None))
    return Outline(before=before, passes=passes, more=more, after=after, copies=copies)


def _passes_of(plan: Plan, index: int) -> tuple[tuple[Events, ...], tuple[Events, ...], int]:
    """The parts of the passes, the stretches between them, and how often each comes."""
    plan = _alike(plan)
    span = max(plan.checkpoint_every, 1) * plan.layout.pipeline * plan.layout.chunks * plan.checkpointing.one_in
    layers = plan.model.layers
    if layers // span >= DEEP and _uniform(plan.model, plan.adapter, plan.frozen) and not _ends(plan.layout):
        low = layers % span + SHALLOW * span
        found = _grown(plan, low, low + span, index)
        if found is not None:
            return *found, (layers - low) // span
    bones, part = _played(plan, index)
    return (Events.of(bones, part),), (), 0


def _alike(plan: Plan) -> Plan:
    """The plan that stands for all with its passes."""
    layout = plan.layout
    # ZeroRedundancyOptimizer divides updates alone; all its gradients are DDP's.
    strategy = "ddp" if plan.strategy == "zero-1" else plan.strategy
    many = layout.pipeline > 1 and layout.schedule == "1f1b"  # of which no more are played than the first stage has ahead
    return replace(
        plan, strategy=strategy,
        optimizer_kind=plan.optimizer_kind if plan.update.in_backward else plan.optimizer_row.usual_kind(plan.device),
        accumulation=min(plan.accumulation, layout.pipeline + 2) if many else plan.accumulation,
    )  # fmt: skip


def _ends(layout: Layout) -> bool:
    """First or last stages have a number of layers of their own."""
    return bool(layout.first_layers or layout.last_layers)


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
def _grown(plan: Plan, low: int, high: int, index: int) -> Passes | None:
    """The passes of a model of ``low`` layers, and what one of ``high`` has more; None where that is no repetition."""
    try:
        few, more = (replace(plan, model=replace(plan.model, layers=layers)) for layers in (low, high))
    except InputError:  # a family of which layers alone cannot be changed
        return None
    (a, here), (b, there) = _played(few, index), _played(more, index)
    found = stretches(a, b, here, there)
    if found is None:
        return None
    cuts = [here.start, *(here.start + each.before for each in found), here.stop]
    parts = tuple(Events.of(a, slice(*ends)) for ends in pairwise(cuts))
    ends = [(there.start + each.events.start, there.start + each.events.stop) for each in found]
    return parts, tuple(Events.of(b, slice(*each)) for each in ends)


def _played(plan: Plan, index: int) -> tuple[Skeleton, slice]:
    """A step up to the update, and which of its events are those of its passes."""
    with uncollected():
        step = Step(plan, stage(plan, index))
        step.begin()
        start = step.tape.events
        step.passes(few=True)
        return step.tape.skeleton(granularity(plan.device)), slice(start, step.tape.events)
