"""Snapshot → Timeline: what was alive when, as far as the history goes back.

The history is a ring of the last ``max_entries`` and starts when somebody switched it on. What was alive before it is found
by going back from the segments: a block that is in use at the end and was not requested in the history was there before
it, and so was what the history frees without having allocated it. What lived and died before it is gone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from memcalc.allocator_options import AllocatorOptions
from memcalc.errors import InputError
from memcalc.snapshot import ACTIVE, RETURNED, TAKEN, Entry, Snapshot
from memcalc.snapshot_fields import Frames
from memcalc.snapshot_origin import Origin, origin
from memcalc.timeline import CATEGORIES, MOMENTS, Timeline

__all__ = ["UNKNOWN", "Recorded", "recorded"]

UNKNOWN = len(CATEGORIES)
"""The category, in a recorded Timeline, of what no stack tells: one past the last, so that it counts in the peak alone."""

_NOTHING = Origin(None, None, None, "(no stack)")
_BEFORE = Origin(None, None, None, "(alive before the history, no stack)")
_OF_ENGINE = Origin("backward", "gradients", "temporary", "backward (autograd's thread, no Python stack)")


@dataclass(frozen=True, kw_only=True, slots=True)
class Recorded:
    """What the history of one device tells; bytes."""

    timeline: Timeline
    """Blocks of requests, rounded as the allocator rounds; what was there before the history comes first, as ``init``."""
    reserved: tuple[int, int, int]
    """Taken from the driver before the history, at most in it, and after it; below 0 where it was interrupted."""
    before: int
    """Blocks that were alive before the history."""
    missed: int
    """Allocations at the address of something alive: the free between was not recorded."""
    refused: tuple[tuple[Entry, int, int], ...]
    """Requests that ended out of memory, with what was allocated and reserved then."""
    stacks: bool
    """Whether any request has a stack."""


@dataclass(slots=True)
class _Trace:
    """The growing arrays of the timeline."""

    names: list[str] = field(default_factory=list)
    origins: list[Origin] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    born: list[int] = field(default_factory=list)
    died: list[int] = field(default_factory=list)
    events: list[tuple[int, int, int]] = field(default_factory=list)
    """Ident, sign, moment."""
    moment: str = "start"
    runs: int = 0
    """How often the moment has changed: blocks that are freed in another run outlive theirs."""
    live: dict[int, int] = field(default_factory=dict)
    allocated: int = 0
    known: dict[int, Origin] = field(default_factory=dict)
    """By the identity of a stack, which is one object wherever it stands: a hash would read it all again."""

    def source(self, frames: Frames, *, stacks: bool) -> Origin:
        if not frames:
            return _OF_ENGINE if stacks else _NOTHING
        if id(frames) not in self.known:
            self.known[id(frames)] = origin(frames)
        return self.known[id(frames)]

    def enter(self, moment: str | None) -> None:
        if moment is not None and moment != self.moment:
            self.moment, self.runs = moment, self.runs + 1

    def allocate(self, address: int, size: int, source: Origin) -> None:
        ident = len(self.names)
        self.names.append(source.place)
        self.origins.append(source)
        self.sizes.append(size)
        self.born.append(self.runs)
        self.died.append(-1)
        self.events.append((ident, 1, MOMENTS.index(self.moment)))
        self.live[address] = ident
        self.allocated += size

    def free(self, address: int) -> None:
        ident = self.live.pop(address)
        self.allocated -= self.sizes[ident]
        self.died[ident] = self.runs
        self.events.append((ident, -1, MOMENTS.index(self.moment)))

    def category(self, ident: int) -> int:
        source = self.origins[ident]
        passing = self.died[ident] == self.born[ident]
        name = source.passing if passing else source.lasting
        return UNKNOWN if name is None else CATEGORIES.index(name)


def recorded(snapshot: Snapshot) -> Recorded:
    """The timeline of a snapshot's device. Raises nothing: what cannot be is counted as missed."""
    round_up = _rounding(snapshot)
    stacks = any(entry.frames for entry in snapshot.entries if entry.action == "alloc")
    trace = _Trace(moment="init")
    final = {b.address: b for segment in snapshot.segments for b in segment.blocks if b.state == ACTIVE}
    for entry, frames in _older(snapshot, set(final)):
        source = trace.source(frames, stacks=False) if frames or not snapshot.entries else _BEFORE
        trace.allocate(entry.address, round_up(entry.size), source)
    before, missed = len(trace.names), 0
    trace.enter("start")
    held = snapshot.reserved - sum(_taken(entry) for entry in snapshot.entries)
    start = most = held
    refused = []
    stack_of: dict[int, Frames] = {}
    for entry in snapshot.entries:
        held += _taken(entry)
        most = max(most, held)
        if entry.action == "alloc" and entry.size:
            if entry.address in trace.live:
                missed += 1
                trace.free(entry.address)
            source = trace.source(entry.frames, stacks=stacks)
            trace.enter(source.moment)
            trace.allocate(entry.address, round_up(entry.size), source)
            stack_of[entry.address] = entry.frames
        elif entry.action == "free_requested" and entry.address in trace.live:
            # Where only requests have stacks, torch writes the request's again (CUDACachingAllocator.cpp, free).
            if entry.frames is not stack_of.pop(entry.address, entry.frames):
                trace.enter(trace.source(entry.frames, stacks=stacks).moment)
            trace.free(entry.address)
        elif entry.action == "oom":
            refused.append((entry, trace.allocated, held))
    missed += len(trace.live.keys() - final.keys())
    return Recorded(
        timeline=_timeline(trace),
        reserved=(start, most, held),
        before=before,
        missed=missed,
        refused=tuple(refused),
        stacks=stacks,
    )


def _older(snapshot: Snapshot, in_use: set[int]) -> list[tuple[Entry, Frames]]:
    """Requests from before the history that were alive when it began, as entries of their own."""
    seen: set[int] = set()
    found: list[tuple[Entry, Frames]] = []
    for entry in snapshot.entries:
        if entry.action == "free_requested" and entry.size and entry.address not in seen:
            found.append((entry._replace(action="alloc"), ()))
        if entry.action in ("alloc", "free_requested", "free_completed"):
            seen.add(entry.address)
    for segment in snapshot.segments:
        for block in segment.blocks:
            if block.address in in_use and block.address not in seen:
                size = block.requested or block.size
                found.append((Entry("alloc", block.address, size, segment.stream), block.frames))
    return found


def _taken(entry: Entry) -> int:
    return entry.size if entry.action in TAKEN else -entry.size if entry.action in RETURNED else 0


def _rounding(snapshot: Snapshot) -> Callable[[int], int]:
    try:
        return AllocatorOptions.parse(snapshot.settings).round
    except InputError:  # a backend or an option that memcalc does not replay
        return AllocatorOptions().round


def _timeline(trace: _Trace) -> Timeline:
    ident = np.array([event[0] for event in trace.events], np.int64)
    sign = np.array([event[1] for event in trace.events], np.int64)
    sizes = np.array(trace.sizes, np.int64)
    categories = np.array([trace.category(index) for index in range(len(trace.names))], np.int8)
    return Timeline(
        names=tuple(trace.names),
        ident=ident,
        category=categories[ident] if len(ident) else np.zeros(0, np.int8),
        moment=np.array([event[2] for event in trace.events], np.int8),
        delta=sign * sizes[ident] if len(ident) else np.zeros(0, np.int64),
    )
