"""Of plans that do not fit the closest ones, with most of the others known by a bound alone."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from heapq import heapify, heappop, heappush

from memcalc.climb import climb
from memcalc.errors import PlanError
from memcalc.fitting import needed_bytes, state_bound
from memcalc.peaks import outline, stages_of
from memcalc.plan import Plan

__all__ = ["closest"]


def closest(plans: Iterable[tuple[Hashable, Plan, int, bool]]) -> Iterator[tuple[int, int]]:
    """``(bytes missing, place)`` of the plan of each key that misses least, the closest key first.

    A plan comes as its key, itself, the bytes it may take, and whether its states alone are too much, which then are all
    that is asked. Of the others stage after stage is looked at, and none further while another plan may be closer.
    """
    asked = list(plans)
    stages = [[] if by_states else stages_of(plan) for _, plan, _, by_states in asked]
    heap = [
        (needed_bytes(plan, state_bound(plan)) - limit, place, 0) for place, (_, plan, limit, _) in enumerate(asked)
    ]
    heapify(heap)
    told: set[Hashable] = set()
    while heap:
        missing, place, looked = heappop(heap)
        key, plan, limit, _ = asked[place]
        if key in told:
            continue
        if looked == len(stages[place]) + bool(stages[place]):
            told.add(key)
            yield missing, place
            continue
        try:
            needed = needed_bytes(plan, _least(plan, stages[place], looked))
        except PlanError:  # past 4 EiB
            continue
        heappush(heap, (max(missing, needed - limit), place, looked + 1))


def _least(plan: Plan, stages: list[int], looked: int) -> int:
    """Bytes that the peak is at the least: at first by forward passes alone, then by one stage after the other."""
    if looked:
        return outline(plan, stages[looked - 1]).peak(plan.micro_batch)
    bound = climb(plan)
    return 0 if bound is None else bound.least(plan.micro_batch)
