"""Raw allocator events to the bytes in use, by moment and as a Timeline.

Both allocators tell the same story: at this time, this many bytes began or ceased to be in use at this
address. An instrument only has to deliver that, and the times at which the loop entered each moment.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from memcalc.timeline import CATEGORIES, MOMENTS, Timeline

__all__ = ["Boundary", "Event", "History"]

_COMMUNICATION = ("FSDP::", "c10d::", "gloo:", "nccl:")
_NEVER = np.iinfo(np.int64).max


@dataclass(frozen=True, slots=True)
class Event:
    """``bytes`` allocated (positive) or freed (negative) at an address; times are in nanoseconds."""

    time: int
    address: int
    bytes: int
    name: str = ""


@dataclass(frozen=True, slots=True)
class Boundary:
    """From this time on, the loop was in this moment of this step; step -1 is outside of all steps."""

    time: int
    step: int
    moment: str


@dataclass(frozen=True, slots=True)
class Window:
    """The stretch from one boundary to the next: its rows, and the most bytes in use within it."""

    step: int
    moment: str
    first: int
    end: int
    peak: int


class History:
    """Allocations and their frees in order of time, as arrays with one row per event.

    Frees of what was allocated before the first event are dropped. Where an instrument misses frees, ``kept`` has
    to hold the addresses of what is known to be alive at the end; the missing ones are then inferred.
    """

    def __init__(
        self, events: Sequence[Event], boundaries: Sequence[Boundary], kept: Collection[int] | None = None
    ) -> None:
        self.boundaries = sorted(boundaries, key=lambda boundary: boundary.time)
        born: list[Event] = []
        died: list[int] = []
        unseen: list[int] = []
        open_: dict[int, int] = {}
        for event in sorted(events, key=lambda event: event.time):
            held = open_.pop(event.address, None)
            if held is not None:
                died[held] = event.time
                if event.bytes > 0:  # an address that is used again was freed, though nobody said so
                    unseen.append(held)
            if event.bytes > 0:
                open_[event.address] = len(born)
                born.append(event)
                died.append(_NEVER)
        self.names = [event.name for event in born]
        self.address = np.array([event.address for event in born], dtype=np.int64)
        self.size = np.array([event.bytes for event in born], dtype=np.int64)
        self.born = np.array([event.time for event in born], dtype=np.int64)
        self.died = np.array(died, dtype=np.int64)
        if kept is not None:
            self._infer_unseen({*unseen, *(ident for address, ident in open_.items() if address not in kept)})
        self._order()

    def _infer_unseen(self, unseen: set[int]) -> None:
        """Give an allocation whose free was not seen the life of its like, in this step or another one.

        A gloo thread may be the last to let go of a buffer, microseconds after the collective, and torch.profiler
        does not see what that thread frees. Lives are counted in ticks, one for each allocation and each boundary
        within a step. What has no like that was seen to be freed lives on.
        """
        begins = [boundary.time for boundary in self.boundaries]
        place = np.searchsorted(begins, self.born, side="right") - 1
        steps = np.array([-1, *(boundary.step for boundary in self.boundaries)])[place + 1]
        inside = steps >= 0
        marks = [boundary.time for boundary in self.boundaries if boundary.step >= 0]
        clock = np.sort(np.concatenate([self.born[inside], np.array(marks, dtype=np.int64)]))
        life = np.searchsorted(clock, self.died) - np.searchsorted(clock, self.born)
        seen: dict[Hashable, list[int]] = {}
        turn: Counter[Hashable] = Counter()
        kinds: dict[int, tuple[Hashable, ...]] = {}
        for ident in np.flatnonzero(inside).tolist():
            size, name, step = int(self.size[ident]), self.names[ident], int(steps[ident])
            turn[step, size, name] += 1
            kinds[ident] = ((size, name, turn[step, size, name]), (size, name), (size, re.sub(r"\d+", "", name)))
            if ident not in unseen:
                for kind in kinds[ident]:
                    seen.setdefault(kind, []).append(int(life[ident]))
        for ident in unseen & kinds.keys():
            like = next((seen[kind] for kind in kinds[ident] if kind in seen), None)
            if like is not None:
                tick = int(np.searchsorted(clock, self.born[ident])) + min(like)
                self.died[ident] = min(self.died[ident], int(clock[tick]) - 1 if tick < len(clock) else _NEVER)

    def _order(self) -> None:
        freed = np.flatnonzero(self.died != _NEVER)
        times = np.concatenate([self.born, self.died[freed]])
        idents = np.concatenate([np.arange(len(self.born)), freed])
        delta = np.concatenate([self.size, -self.size[freed]])
        order = np.lexsort((delta > 0, times))  # at the same time a free comes first
        self.time, self.ident, self.delta = times[order], idents[order], delta[order]
        self.live = np.cumsum(self.delta)

    def windows(self) -> list[Window]:
        """One for each boundary."""
        starts = np.searchsorted(self.time, [boundary.time for boundary in self.boundaries])
        found = []
        for boundary, first, end in zip(self.boundaries, starts, [*starts[1:], len(self.time)], strict=True):
            before = int(self.live[first - 1]) if first else 0
            peak = max(before, int(self.live[first:end].max(initial=0)))
            found.append(Window(boundary.step, boundary.moment, int(first), int(end), peak))
        return found

    def identify(self, time: int, addresses: Mapping[int, str]) -> dict[int, str]:
        """Categories of the allocations that are in use at these addresses at a time."""
        alive = np.flatnonzero((self.born < time) & (self.died >= time))
        return {int(i): addresses[int(self.address[i])] for i in alive if int(self.address[i]) in addresses}

    def timeline(self, step: int, known: Mapping[int, str]) -> Timeline:
        """One step, with what was alive when it began first: what it does not free, and then what it does.

        ``known`` tells the category of allocations; the others go by the moment they were made in.
        """
        windows = [window for window in self.windows() if window.step == step]
        begin = next(boundary.time for boundary in self.boundaries if boundary.step == step)
        alive = np.flatnonzero((self.born < begin) & (self.died >= begin))
        end = max(window.end for window in windows)
        freed = np.isin(alive, self.ident[min(window.first for window in windows) : end])
        alive = np.concatenate([alive[~freed], alive[freed]])
        rows = np.concatenate([np.arange(window.first, window.end) for window in windows])
        moments = [window.moment for window in windows for _ in range(window.first, window.end)]
        idents = np.concatenate([alive, self.ident[rows]])
        moments = ["start"] * len(alive) + moments
        made = dict(zip(idents[::-1].tolist(), moments[::-1], strict=True))
        order = {ident: index for index, ident in enumerate(sorted(made))}
        category = {ident: known.get(ident) or self._category(ident, moment) for ident, moment in made.items()}
        return Timeline(
            names=tuple(self.names[ident] for ident in order),
            ident=np.array([order[ident] for ident in idents.tolist()], dtype=np.int64),
            category=np.array([CATEGORIES.index(category[ident]) for ident in idents.tolist()], dtype=np.int8),
            moment=np.array([MOMENTS.index(moment) for moment in moments], dtype=np.int8),
            delta=np.concatenate([self.size[alive], self.delta[rows]]),
        )

    def _category(self, ident: int, moment: str) -> str:
        if any(mark in self.names[ident] for mark in _COMMUNICATION):
            return "communication"
        if moment == "start" and self.names[ident].endswith(
            " shards gradient"
        ):  # what FSDP 1 keeps until it begins anew
            return "gradients"
        return {"start": "inputs", "forward": "activations", "loss": "activations"}.get(moment, "temporary")
