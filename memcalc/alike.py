"""The peak of a deep model from two shallow ones: layers that are all alike need not be played one by one.

Played with a layer more, a step shows where a layer puts its events: a stretch like the one before it, forward and backward.
A model of any depth has that stretch once more for each further layer. Along its copies what is held grows or falls evenly,
so that the fullest point is in the first of them or in the last: the peak is exact, where a line through two peaks is a bound.

What lives between steps and what the update takes go by other rules (buckets of DDP, whole tensors that
ZeroRedundancyOptimizer hands out). They are taken from the deep model itself, which is quick.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from memcalc.errors import PlanError
from memcalc.timeline import CATEGORIES, LARGEST, MOMENTS, TOO_LARGE, Skeleton

__all__ = ["Events", "Fullest", "Outline", "Stretch", "aligned", "stretches"]


@dataclass(frozen=True, slots=True, eq=False)
class Events:
    """Some of a skeleton's events in their order, with the size of each by the micro batch."""

    fixed: NDArray[np.int64]
    per_sample: NDArray[np.int64]
    times: NDArray[np.int64]
    sign: NDArray[np.int8]
    moment: NDArray[np.int8]
    category: NDArray[np.int8]
    block: int

    @classmethod
    def of(cls, bones: Skeleton, part: slice) -> Events:
        """Those of a skeleton that lie in ``part``."""
        ident = bones.ident[part]
        return cls(
            bones.fixed[ident], bones.per_sample[ident], bones.times[ident], bones.sign[part], bones.moment[part],
            bones.categories[ident], bones.block,
        )  # fmt: skip

    def deltas(self, micro_batch: int) -> NDArray[np.int64]:
        """Bytes that each event adds, in whole blocks."""
        size = self.fixed + micro_batch * self.per_sample
        return self.sign * (-(-size // self.block) * self.block * self.times)

    def allocated(self, micro_batch: int) -> float:
        """Bytes of all allocations, before they are rounded."""
        each = (self.fixed.astype(float) + micro_batch * self.per_sample.astype(float)) * self.times
        return float(each[self.sign > 0].sum())

    def by_category(self, deltas: NDArray[np.int64], count: int | None = None) -> NDArray[np.int64]:
        """What the first ``count`` events, or all, add to each category."""
        found = np.zeros(len(CATEGORIES), np.int64)
        np.add.at(found, self.category[:count], deltas[:count])
        return found


@dataclass(frozen=True, slots=True)
class Stretch:
    """What a layer more puts in before one event of the shallower model: the same once more."""

    before: int
    events: slice
    """Of the deeper model's."""


class Fullest(NamedTuple):
    """The fullest point of a step, the first of equals."""

    bytes: int
    moment: str
    by_category: dict[str, int]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Outline:
    """A step of one stage, in which a stretch of events that repeats itself stands once."""

    passes: tuple[Events, ...]
    """Forward and backward, cut where stretches come in."""
    more: tuple[Events, ...] = ()
    """The stretches, one between each two of these parts."""
    copies: int = 0
    """How often each stretch comes."""
    before: Events | None = None
    """All until the first forward pass."""
    after: Events | None = None
    """The update."""

    @classmethod
    def whole(cls, bones: Skeleton) -> Outline:
        """Of a step in which nothing is left out."""
        return cls(passes=(Events.of(bones, slice(None)),))

    def peak(self, micro_batch: int) -> int:
        """Peak bytes. Raises PlanError past 4 EiB."""
        return self.rise(micro_batch)[0]

    def rise(self, micro_batch: int) -> tuple[int, int]:
        """``(the most, what is left at the end)`` in bytes. Raises PlanError past 4 EiB."""
        self._check(micro_batch)
        most = level = 0
        for events, times in self._order():
            live = np.cumsum(events.deltas(micro_batch))
            if len(live):
                total = int(live[-1])
                most = max(most, level + int(live.max()) + max(0, (times - 1) * total))
                level += times * total
        return most, level

    def fullest(self, micro_batch: int) -> Fullest:
        """The peak with what it is made of. Raises PlanError past 4 EiB."""
        self._check(micro_batch)
        held = np.zeros(len(CATEGORIES), np.int64)
        found = Fullest(0, "start", dict.fromkeys(CATEGORIES, 0))
        for events, times in self._order():
            deltas = events.deltas(micro_batch)
            live = np.cumsum(deltas)
            if not len(live):
                continue
            top, sums = int(np.argmax(live)), events.by_category(deltas)
            for copy in dict.fromkeys((0, times - 1)):
                alive = held + copy * sums + events.by_category(deltas, top + 1)
                if (size := int(alive.sum())) > found.bytes:
                    categories = dict(zip(CATEGORIES, alive.tolist(), strict=True))
                    found = Fullest(size, MOMENTS[int(events.moment[top])], categories)
            held += times * sums
        return found

    def _order(self) -> Iterator[tuple[Events, int]]:
        """The parts of the step, and how often each comes in a row."""
        if self.before is not None:
            yield self.before, 1
        for part, more in zip(self.passes, self.more, strict=False):
            yield part, 1
            yield more, self.copies
        yield self.passes[-1], 1
        if self.after is not None:
            yield self.after, 1

    def _check(self, micro_batch: int) -> None:
        if sum(times * events.allocated(micro_batch) for events, times in self._order()) > LARGEST:
            raise PlanError(TOO_LARGE)


def stretches(low: Skeleton, high: Skeleton, a: slice, b: slice) -> list[Stretch] | None:
    """Where the deeper of two has more events than the other, of those in ``a`` and ``b``; None where they do not repeat
    what stands before them."""
    codes: dict[tuple[object, ...], int] = {}
    return aligned(_coded(low, codes)[a], _coded(high, codes)[b])


def aligned(low: NDArray[np.int64], high: NDArray[np.int64]) -> list[Stretch] | None:
    """The same of two sequences of numbers.

    >>> aligned(np.array([0, 1, 2, 1, 2, 5, 6, 6, 7]), np.array([0, 1, 2, 1, 2, 1, 2, 5, 6, 6, 6, 7]))
    [Stretch(before=5, events=slice(5, 7, None)), Stretch(before=8, events=slice(10, 11, None))]
    >>> aligned(np.array([0, 1, 2]), np.array([0, 1, 3, 2])) is None
    True
    """
    found: list[Stretch] = []
    i = j = 0
    while True:
        same = _equal(low[i:], high[j:])
        i, j = i + same, j + same
        if i == len(low) and j == len(high):
            return found
        length = _repeated(low, high, i, j)
        if length is None:
            return None
        found.append(Stretch(i, slice(j, j + length)))
        j += length


def _equal(a: NDArray[np.int64], b: NDArray[np.int64]) -> int:
    """How many are equal from the start on."""
    size = min(len(a), len(b))
    differ = np.flatnonzero(a[:size] != b[:size])
    return int(differ[0]) if len(differ) else size


def _repeated(low: NDArray[np.int64], high: NDArray[np.int64], i: int, j: int) -> int | None:
    """The length of the shortest stretch that repeats what is before it, and after which both go on alike."""
    most = min(j, (len(high) - j) - (len(low) - i))
    lengths = [most] if i == len(low) else (1 + np.flatnonzero(high[j + 1 : j + 1 + most] == low[i])).tolist()
    for length in lengths:
        if 0 < length <= most and np.array_equal(high[j : j + length], high[j - length : j]):
            return int(length)
    return None


def _coded(bones: Skeleton, codes: dict[tuple[object, ...], int]) -> NDArray[np.int64]:
    """A number for each event, equal where its name but for numbers in it, its category, size, moment and sign are."""
    each = [
        codes.setdefault(part, len(codes))
        for part in zip(
            map(_unnumbered, bones.names), bones.categories.tolist(), bones.fixed.tolist(), bones.per_sample.tolist(),
            bones.times.tolist(), strict=True,
        )
    ]  # fmt: skip
    return np.array(each, dtype=np.int64)[bones.ident] * 32 + bones.moment.astype(np.int64) * 2 + (bones.sign > 0)


@lru_cache(maxsize=4096)
def _unnumbered(name: str) -> str:
    return re.sub(r"\d+", "#", name)
