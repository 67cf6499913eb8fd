"""Timeline of one step → the run it stands for → what the caching allocator reserves.

A timeline is one steady step with everything alive at its start. What an allocator holds depends on how it came
to that: a run builds the model, makes the optimizer's states in the first step, when backward has already left its
segments behind, and then repeats the step.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass

from memcalc.allocator_options import AllocatorOptions
from memcalc.collector import uncollected
from memcalc.plan import Plan
from memcalc.replay import Reserved, replay
from memcalc.streams import delayed, stream_of
from memcalc.timeline import CATEGORIES, MOMENTS, Timeline

__all__ = [
    "RESERVED_OVER_ALLOCATED",
    "SEGMENT",
    "UNSEEN_PCT",
    "Range",
    "highest",
    "most_reserved",
    "replayed",
    "reserved_range",
    "run",
]

_INPUTS, _OPTIMIZER, _GRADIENTS = (CATEGORIES.index(name) for name in ("inputs", "optimizer", "gradients"))
_START, _STEP = MOMENTS.index("start"), MOMENTS.index("step")

# Reserved over allocated in published runs: up to 1.17 on one GPU (logs of KellerJordan/modded-nanogpt), up to 1.36
# under FSDP, whose streams have pools of their own (pytorch/torchtitan pull request 165; 1.35 in meta-llama/
# llama-cookbook pull request 41). One 20 MiB segment may be begun on top (c10/core/AllocatorConfig.h, kLargeBuffer).
# Some runs go beyond, to 1.40 (foundation-model-stack/fms-acceleration scripts/benchmarks/refs/a100_80gb_granite.csv, PowerLM
# 3B on one GPU): so do their replays, which are the high end then.
RESERVED_OVER_ALLOCATED = {False: 1.17, True: 1.36}
SEGMENT = 20 * 2**20
# What neither the replay nor these shares see of published runs, of both: 3.9 % at most (pytorch/torchtitan pull request 165,
# FSDP 1: 32.14 GiB reserved where the replay has 30.94). Which of two free blocks is used follows from addresses and from the
# order of frees within an operation, which no replay knows: where a large buffer finds its block taken by others, the difference
# is that buffer. Readings above the range are counted in docs/validation/published.md.
UNSEEN_PCT = 4

Event = tuple[int, int]


@dataclass(frozen=True, kw_only=True, slots=True)
class Range:
    """Bytes that are known only between two bounds, and the likeliest."""

    low: int
    point: int
    high: int

    def __post_init__(self) -> None:
        assert self.low <= self.point <= self.high


def most_reserved(plan: Plan, allocated: int) -> int:
    """The most that published runs reserved of an allocated peak; needs no replay, so it serves a search.

    Expandable segments leave no holes between segments, whichever stream they are on, so that the smaller share stands.
    """
    scattered = plan.strategy_row.gathers and not plan.allocator_options.expandable_segments
    return _with_unseen(int(allocated * RESERVED_OVER_ALLOCATED[scattered]) + SEGMENT)


def highest(plan: Plan, allocated: int, replay: int) -> int:
    """The high end of reserved, by the allocated peak and what the replay on a card without an end reserved."""
    return max(_with_unseen(replay), most_reserved(plan, allocated))


def _with_unseen(size: int) -> int:
    return -(-size * (100 + UNSEEN_PCT) // 100)


def reserved_range(
    plan: Plan, timeline: Timeline, *, capacity: int | None = None, free: Reserved | None = None
) -> Range:
    """What the caching allocator holds at most; on a CPU there is no such allocator.

    ``capacity`` is what torch can have of the card, ``free`` the replay on a card without an end, where it is known.

    low    the allocated peak: on a full card every segment without a tensor is given back
    point  the replay on a card of ``capacity``; without an end where even that is not enough
    high   the replay on a card without an end, or what published runs reserved of so much, if that is more; and what
           neither sees (UNSEEN_PCT)
    """
    allocated = timeline.peak().bytes
    if plan.device == "cpu":
        return Range(low=allocated, point=allocated, high=allocated)
    free = free or replayed(plan, timeline)
    point = free.peak_reserved
    if capacity is not None and allocated <= capacity < point:  # what cannot hold the tensors would refuse one
        full = replayed(plan, timeline, capacity=capacity)
        point = point if full.refused else full.peak_reserved
    # A published share says nothing below what the replay needs for certain.
    return Range(low=allocated, point=point, high=highest(plan, allocated, free.peak_reserved))


def replayed(
    plan: Plan,
    timeline: Timeline,
    options: AllocatorOptions | None = None,
    *,
    capacity: int | None = None,
    enough: int | None = None,
    steps: int = 2,
) -> Reserved:
    """What the allocator reserves from the model's construction through ``steps`` steps; ``options`` other than the plan's;
    ``enough``: no further once more is reserved.

    >>> from memcalc.ledger import ledger
    >>> from memcalc.models import MODELS
    >>> plan = Plan(model=MODELS["gpt2"], tokens=1024, micro_batch=8, precision="amp-bf16", gpu="a100-80gb")
    >>> found = replayed(plan, ledger(plan))
    >>> found.peak_reserved >= found.peak_allocated >= ledger(plan).peak().bytes
    True
    """
    size, of_step = len(timeline.names), stream_of(plan, timeline.names)
    streams = {ident + step * size: stream for ident, stream in of_step.items() for step in range(steps + 1)}
    with uncollected():
        return replay(
            run(plan, timeline, steps),
            options or plan.allocator_options,
            capacity=capacity,
            enough=enough,
            streams=streams,
        )


def run(plan: Plan, timeline: Timeline, steps: int = 2) -> list[Event]:
    """Allocations and frees from construction through ``steps`` steps, as ``(ident, bytes)``.

    The first backward makes the gradients that are kept, and the optimizer makes its states in the first step, unless
    they are there before it: because they were loaded, or because they go with master copies, as in DeepSpeed
    (initialize_optimizer_states) and Megatron.

    In step k the idents of the timeline are ``k * len(names)`` higher; those of the construction are as they are.
    What the timeline's step frees of the step before (a batch, under NO_SHARD gradients) the first has not got.
    What it frees for good is of the construction, and the last step frees it.
    """
    lazy = plan.startup.resume == "none" and not plan.strategy_row.masters
    events, states, body = _parts(timeline, lazy)
    size = len(timeline.names)
    made = {ident for ident, delta in body if delta > 0}
    inherited, first_gradients = _inheritance(timeline, body), _first_gradients(timeline, events, body)
    replaced = _replaced(timeline, body, set(inherited.values()))
    kept = set(first_gradients.values())
    gone = {ident for ident, delta in body if delta < 0} - made - inherited.keys()
    events = [event for event in events if event[0] not in kept and event[0] not in inherited]
    moments = timeline.moment.tolist()[len(timeline.moment) - len(body) :]
    update = moments.index(_STEP) if _STEP in moments else len(body)
    before, after = delayed(plan, timeline.names, body[:update]), body[update:]

    def first(part: list[Event]) -> list[Event]:
        return [
            (first_gradients.get(ident, ident + size), delta)
            for ident, delta in part
            if ident not in inherited and ident not in gone and (delta > 0 or ident not in first_gradients)
        ]

    events += [*first(before), *states, *first(after)]
    for start in range(size, size * steps, size):
        # What the step before has left, and what takes the place of it, is of idents a step lower.
        for part in (before, after):
            if replaced:
                part = [each for event in part for each in _with_replaced(event, replaced, size)]
            last = start == size * (steps - 1)
            events += [
                (ident if ident in gone else inherited.get(ident, ident + size) + start, delta)
                for ident, delta in part
                if last or ident not in gone
            ]
    return events


def _with_replaced(event: Event, replaced: dict[int, int], size: int) -> list[Event]:
    """An event, and the free of what is replaced by what it makes: of the step before, and so ``size`` idents lower."""
    ident, delta = event
    return [event, (replaced[ident] - size, -delta)] if delta > 0 and ident in replaced else [event]


def _parts(timeline: Timeline, lazy: bool) -> tuple[list[Event], list[Event], list[Event]]:
    """Construction, the optimizer's states, and the step, which begins after the batch the step before has left."""
    category, events = (
        timeline.category.tolist(),
        list(zip(timeline.ident.tolist(), timeline.delta.tolist(), strict=True)),
    )
    counts = Counter(timeline.ident.tolist())
    # A batch is freed, too; what a real run holds beside it is not.
    inputs = [i for i, kind in enumerate(category) if kind == _INPUTS and counts[events[i][0]] > 1][:2]
    start = inputs[-1] + 1 if inputs else 0
    # A rehearsal tells of what was left in the order in which it was made: gradients after their batch.
    while inputs and start < len(events) and category[start] == _GRADIENTS and timeline.moment[start] == _START:
        start += 1
    body = events[start:]
    before = list(zip(events[:start], category, strict=False))
    if not lazy:
        return [event for event, _ in before], [], body
    construction = [event for event, kind in before if kind != _OPTIMIZER]
    return construction, [event for event, kind in before if kind == _OPTIMIZER], body


def _first_gradients(timeline: Timeline, construction: list[Event], body: list[Event]) -> dict[int, int]:
    """Gradients that are zeroed and not freed: what the first backward makes becomes the one that is kept.

    The ident of a gradient that later steps add to the kept one and free, and the ident of that one. Where it lies
    in memory was decided in the first backward, among activations, and all later ones have to do with it.
    """
    gradients = set(timeline.ident[timeline.category == CATEGORIES.index("gradients")].tolist())
    freed = {ident for ident, size in body if size < 0}
    kept = {
        timeline.names[ident]: (ident, size)
        for ident, size in construction
        if ident in gradients and ident not in freed  # of NO_SHARD and FSDP 1 the step before has left them for a while
    }
    if not kept:
        return {}
    found = {}
    for ident, size in body:
        name = timeline.names[ident]
        if ident in gradients and size > 0 and ident in freed and kept.get(name, (0, 0))[1] == size:
            found[ident] = kept.pop(name)[0]
    return found


def _inheritance(timeline: Timeline, body: list[Event]) -> dict[int, int]:
    """What a step frees without having made it: the ident, and that of its like which the step before has left.

    Its like has its name, and its size where several have; or, where DDP rebuilds its buckets, comes of the same
    operation elsewhere. In a ledger there always is one; what a real step frees for good, like the empty gradients of
    before, has none.
    """
    made = {ident: delta for ident, delta in body if delta > 0}
    freed = {ident: -delta for ident, delta in body if delta < 0}
    operations = [name.rpartition(" > ")[2] for name in timeline.names]
    found: dict[int, int] = {}
    for kinds in (timeline.names, operations):
        left = defaultdict(list)
        for ident in sorted(made.keys() - freed.keys() - set(found.values())):
            left[kinds[ident]].append(ident)
        for ident in sorted(freed.keys() - made.keys() - found.keys()):
            if like := left[kinds[ident]]:
                found[ident] = next((each for each in like if made[each] == freed[ident]), like[0])
                like.remove(found[ident])
    return found


def _replaced(timeline: Timeline, body: list[Event], inherited: set[int]) -> dict[int, int]:
    """What a step leaves for the next to put something else in its place: the ident that does, and the one that goes.

    As outputs in the buffers of a pipeline's engine: the first of the next step takes the place of the first left.
    """
    freed = {ident for ident, delta in body if delta < 0}
    left = defaultdict(list)
    for ident, delta in body:
        if delta > 0 and ident not in freed and ident not in inherited:
            left[timeline.names[ident]].append(ident)
    if not left:
        return {}
    found: dict[int, int] = {}
    taken = {name: iter(idents) for name, idents in left.items()}
    for ident, delta in body:
        if delta > 0 and (name := timeline.names[ident]) in taken and (one := next(taken[name], None)) is not None:
            found[ident] = one
    return found
