"""Timeline of one step → the run it stands for → what the caching allocator reserves.

A timeline is one steady step with everything alive at its start. What an allocator holds depends on how it came
to that: a run builds the model, makes the optimizer's states in the first step, when backward has already left its
segments behind, and then repeats the step.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from memcalc.allocator_options import AllocatorOptions
from memcalc.plan import Plan
from memcalc.replay import DEFAULT, Reserved, replay
from memcalc.timeline import CATEGORIES, MOMENTS, Timeline

__all__ = ["STREAMS", "replayed", "run", "streams"]

_INPUTS, _OPTIMIZER = CATEGORIES.index("inputs"), CATEGORIES.index("optimizer")
_STEP = MOMENTS.index("step")

# Streams of their own under fully_shard (torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py): foreach_all_gather
# casts shards and makes the flat buffer on the copy-in stream, foreach_reduce makes the sharded gradients on the
# reduce-scatter stream. The full parameters and the reduce-scatter's input are made on the stream of the computation.
STREAMS = {" cast shard": 1, " gather": 1, " shards gradient": 2}

Event = tuple[int, int]


def replayed(
    plan: Plan,
    timeline: Timeline,
    options: AllocatorOptions = DEFAULT,
    *,
    capacity: int | None = None,
    steps: int = 2,
) -> Reserved:
    """What the allocator reserves from the model's construction through ``steps`` steps.

    >>> from memcalc.ledger import ledger
    >>> from memcalc.models import MODELS
    >>> plan = Plan(model=MODELS["gpt2"], tokens=1024, micro_batch=8, precision="amp-bf16", gpu="a100-80gb")
    >>> found = replayed(plan, ledger(plan))
    >>> found.peak_reserved >= found.peak_allocated >= ledger(plan).peak().bytes
    True
    """
    return replay(run(timeline, steps), options, capacity=capacity, streams=streams(plan, timeline, steps))


def run(timeline: Timeline, steps: int = 2) -> list[Event]:
    """Allocations and frees from construction through ``steps`` steps, as ``(ident, bytes)``.

    In step k the idents of the timeline are ``k * len(names)`` higher; those of the construction are step 0's.
    """
    construction, states, body = _parts(timeline)
    events, size = list(construction), len(timeline.names)
    inherited = _inheritance(timeline, body)
    before = {ident for ident, _ in construction + states}
    made = {index for index, delta in body if delta > 0}
    at = next((i for i, (_, moment) in enumerate(_moments(timeline, len(body))) if moment == _STEP), len(body))
    for step in range(1, steps + 1):
        for index, (ident, delta) in enumerate(body):
            if step == 1 and index == at:
                events += states
            if ident in made:
                events.append((ident + step * size, delta))
            elif ident in inherited:
                if step > 1:
                    events.append((inherited[ident] + (step - 1) * size, delta))
            elif ident in before and step == 1:
                events.append((ident, delta))
        if step == 1 and at == len(body):
            events += states
    return events


def streams(plan: Plan, timeline: Timeline, steps: int = 2) -> dict[int, int]:
    """The stream of every ident of ``run`` that is not on the computation's own."""
    if not plan.strategy_row.gathers:
        return {}
    found = {
        ident: stream
        for ident, name in enumerate(timeline.names)
        for ending, stream in STREAMS.items()
        if name.endswith(ending)
    }
    size = len(timeline.names)
    return {ident + step * size: stream for ident, stream in found.items() for step in range(steps + 1)}


def _events(timeline: Timeline, indices: Iterable[int]) -> list[Event]:
    return [(int(timeline.ident[i]), int(timeline.delta[i])) for i in indices]


def _first_batch(timeline: Timeline) -> list[int]:
    """Indices of the batch the step before left behind: its inputs and its targets."""
    return [i for i, category in enumerate(timeline.category.tolist()) if category == _INPUTS][:2]


def _parts(timeline: Timeline) -> tuple[list[Event], list[Event], list[Event]]:
    """Construction, the optimizer's states, and the step itself."""
    batch = _first_batch(timeline)
    start = batch[0] if batch else 0
    category = timeline.category.tolist()
    construction = _events(timeline, (i for i in range(start) if category[i] != _OPTIMIZER))
    states = _events(timeline, (i for i in range(start) if category[i] == _OPTIMIZER))
    return construction, states, _events(timeline, range(start + len(batch), len(category)))


def _moments(timeline: Timeline, count: int) -> list[tuple[int, int]]:
    """Moments of the last ``count`` events."""
    return list(enumerate(timeline.moment.tolist()[len(timeline.moment) - count :]))


def _inheritance(timeline: Timeline, body: list[Event]) -> dict[int, int]:
    """Which ident of the step before a step frees: the one that takes the place of the one the timeline frees."""
    sizes = {ident: delta for ident, delta in body if delta > 0}
    survivors = defaultdict(list)
    for ident in sizes.keys() - {ident for ident, delta in body if delta < 0}:
        survivors[timeline.names[ident]].append(ident)
    old = [int(timeline.ident[i]) for i in _first_batch(timeline)]
    return {ident: min(survivors[timeline.names[ident]]) for ident in old if survivors[timeline.names[ident]]}
