"""The one thing every source makes and every report reads: the timeline of a training step.

A timeline is a list of allocations and frees in program order. Its running sum is the memory in use;
the largest value of that sum is the ``allocated`` peak. The ledger, a rehearsal and a real run all give
one, so "estimated against measured" compares like with like.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from memcalc.errors import PlanError

__all__ = ["BEFORE", "CATEGORIES", "LARGEST", "MOMENTS", "TOO_LARGE", "Peak", "Skeleton", "Timeline"]

# ``resume`` stands last, although it comes before the first step: files of runs hold the places of the others.
MOMENTS = ("init", "start", "forward", "loss", "backward", "step", "resume")
BEFORE = ("init", "resume")
"""Moments before the first step; what is allocated in them is freed before it, or lives on through all steps."""
# ``workspaces`` are what libraries keep for the whole run, such as cuBLAS. A new one stands last: files of runs hold places.
CATEGORIES = (
    "parameters", "gradients", "optimizer", "activations", "inputs", "communication", "temporary", "buffers",
    "workspaces",
)  # fmt: skip

# All tensors of a step together; half of what int64 holds, so that no running sum can wrap around.
LARGEST = 2**62
TOO_LARGE = "the tensors of this plan come to more than 4 EiB; one of its numbers must be a slip"


@dataclass(frozen=True, kw_only=True, slots=True)
class Peak:
    """The fullest point of a timeline: how much, when, and of what."""

    bytes: int
    moment: str
    by_category: dict[str, int]
    by_moment: dict[str, int]
    """The fullest point within each moment; what stays alive through a moment counts in it."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Timeline:
    """Events of one steady-state step on the fullest rank, and of what comes before all steps, as parallel arrays of length n.

    ``delta`` is in bytes, positive for an allocation and negative for the free that carries the same
    ``ident``; ``names[ident]`` says what it is. ``category`` and ``moment`` index CATEGORIES and MOMENTS.
    """

    names: tuple[str, ...]
    ident: NDArray[np.int64]
    category: NDArray[np.int8]
    moment: NDArray[np.int8]
    delta: NDArray[np.int64]

    def live(self) -> NDArray[np.int64]:
        """Bytes in use after each event."""
        return np.cumsum(self.delta)

    def peak(self) -> Peak:
        """The largest running sum; the first of equals.

        >>> step = Timeline(names=("w", "a"), ident=np.array([0, 1, 1]), category=np.array([0, 3, 3], np.int8),
        ...                 moment=np.array([1, 2, 4], np.int8), delta=np.array([100, 50, -50]))
        >>> step.peak().bytes, step.peak().moment, step.peak().by_moment["backward"]
        (150, 'forward', 150)
        """
        return self._peak(np.ones(len(self.moment), dtype=bool))

    def steady(self) -> Peak:
        """The same, of the step alone: without the moments before the first."""
        return self._peak(~np.isin(self.moment, [MOMENTS.index(name) for name in BEFORE]))

    def fullest_in(self, moment: str) -> Peak | None:
        """The fullest point within one moment; None where nothing is allocated or freed in it."""
        counted = self.moment == (MOMENTS.index(moment) if moment in MOMENTS else -1)
        return self._peak(counted) if counted.any() else None

    def _peak(self, counted: NDArray[np.bool_]) -> Peak:
        live = self.live()
        if not counted.any():
            return Peak(bytes=0, moment="start", by_category=dict.fromkeys(CATEGORIES, 0), by_moment={})
        top = int(np.argmax(np.where(counted, live, -1)))
        sums = np.bincount(self.category[: top + 1], weights=self.delta[: top + 1], minlength=len(CATEGORIES))
        before = np.concatenate(([0], live[:-1]))
        by_moment = {}
        for index, name in enumerate(MOMENTS):
            here = (self.moment == index) & counted
            if here.any():
                by_moment[name] = int(max(live[here].max(), before[here][0]))
        return Peak(
            bytes=int(live[top]),
            moment=MOMENTS[int(self.moment[top])],
            by_category={name: int(sums[i]) for i, name in enumerate(CATEGORIES)},
            by_moment=by_moment,
        )

    def at_moment(self, moment: str, category: str) -> int:
        """Most bytes of one category alive at any point of one moment, its first instant included."""
        of_category = np.where(self.category == CATEGORIES.index(category), self.delta, 0)
        here = np.flatnonzero(self.moment == MOMENTS.index(moment))
        if not len(here):
            return 0
        live = np.cumsum(of_category)
        return int(max(live[here].max(), live[here[0]] - of_category[here[0]]))


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Skeleton:
    """A timeline before the micro batch is chosen: every size is ``fixed + micro_batch * per_sample`` bytes.

    All tensors of a training step either have one batch dimension or none, so one skeleton serves every
    micro batch. ``block`` is the allocator's granularity: each size is rounded up to a multiple of it.
    """

    names: tuple[str, ...]
    shapes: tuple[tuple[tuple[int, ...], int, bool], ...]
    """How each size comes about: elements per sample, bytes per element, and whether a batch multiplies it."""
    categories: NDArray[np.int8]
    fixed: NDArray[np.int64]
    per_sample: NDArray[np.int64]
    times: NDArray[np.int64]
    """How many equal allocations an entry stands for: micro batches that wait for their backward alike.
    The six above have one entry per allocation; the three below one per event."""
    ident: NDArray[np.int64]
    moment: NDArray[np.int8]
    sign: NDArray[np.int8]
    block: int

    def sizes(self, micro_batch: int) -> NDArray[np.int64]:
        """Bytes of each allocation at one micro batch, rounded up to whole blocks. Raises PlanError past 4 EiB."""
        each = (self.fixed.astype(float) + micro_batch * self.per_sample.astype(float)) * self.times
        if each.sum() > LARGEST:
            raise PlanError(TOO_LARGE)
        size = self.fixed + micro_batch * self.per_sample
        return -(-size // self.block) * self.block * self.times

    def at(self, micro_batch: int) -> Timeline:
        """The timeline at one micro batch."""
        return Timeline(
            names=self.names,
            ident=self.ident,
            category=self.categories[self.ident],
            moment=self.moment,
            delta=self.sign * self.sizes(micro_batch)[self.ident],
        )

    def peaks(self, micro_batches: list[int]) -> list[int]:
        """Peak bytes at each micro batch, without building the timelines."""
        return [int(np.cumsum(self.sign * self.sizes(b)[self.ident]).max(initial=0)) for b in micro_batches]
