"""A timeline cut into as many columns as a figure has room for, without losing its peak.

A step has no clock in memcalc: its x axis is the order of its events, spread by what they do. Each phase (a run of events of one moment) gets a
width by the logarithm of how many it has, so that the four events of a loss are seen beside the thousands of a backward
pass, and so that two timelines of one step lie on one axis, phase by phase.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from memcalc.timeline import BEFORE, CATEGORIES, MOMENTS, Timeline

__all__ = ["Layers", "Phase", "curve", "layers", "phases"]

LEVEL = "start"
"""The moment that is drawn level, at its fullest: what is alive in it was there before, and not filled up in the step."""

LEVEL_WIDTH = 2.0
"""Its width, as large as that of three events: level ground needs little room."""

BY_COUNT = 0.25
"""An event's place in its phase follows for this part from its number, and else from the bytes that phase has allocated for
good or freed of what was there, unless it is replaced by its like. By number alone two sources of one step drift apart, since kernels differ in their scratch;
by bytes alone scratch would have no width."""

SLIP = 0.1
"""Share of its phase by which another source's fullest point may lie beside ours and still be the same point: kernels differ
in their scratch, and a peak of one event would be drawn twice, and read beside what is not it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Phase:
    """A run of events of one moment: where it lies among the events, and on the axis from 0 to 1."""

    moment: str
    first: int
    stop: int
    left: float
    right: float


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Layers:
    """A timeline in n columns of equal width; each shows its fullest event, or where it has none the state before it."""

    phases: tuple[Phase, ...]
    event: NDArray[np.int64]
    """Shape (n,): the event that a column shows."""
    held: NDArray[np.int64]
    """Shape (categories, n): bytes in use after that event, in the order of CATEGORIES."""
    names: tuple[str, ...]
    """What that event allocates or frees."""
    moments: tuple[str, ...]
    peak: int
    """The column of the timeline's peak."""

    @property
    def total(self) -> NDArray[np.int64]:
        """Bytes in use, column by column."""
        total: NDArray[np.int64] = self.held.sum(axis=0)
        return total


def phases(timeline: Timeline) -> tuple[Phase, ...]:
    """Runs of events of one moment, in order, with their places on the axis.

    >>> step = Timeline(names=("w", "a"), ident=np.array([0, 1, 1]), category=np.array([0, 3, 3], np.int8),
    ...                 moment=np.array([1, 2, 4], np.int8), delta=np.array([100, 50, -50]))
    >>> [(phase.moment, round(phase.left, 2), round(phase.right, 2)) for phase in phases(step)]
    [('start', 0.0, 0.5), ('forward', 0.5, 0.75), ('backward', 0.75, 1.0)]
    """
    count = len(timeline.moment)
    if not count:
        return ()
    starts = np.concatenate([[0], np.flatnonzero(np.diff(timeline.moment)) + 1])
    stops = np.append(starts[1:], count)
    level = timeline.moment[starts] == MOMENTS.index(LEVEL)
    edges = np.concatenate([[0.0], np.cumsum(np.where(level, LEVEL_WIDTH, np.log2(1.0 + stops - starts)))])
    edges /= edges[-1]
    return tuple(
        Phase(moment=MOMENTS[int(timeline.moment[first])], first=int(first), stop=int(stop), left=float(a), right=float(b))
        for first, stop, a, b in zip(starts, stops, edges, edges[1:], strict=False)
    )  # fmt: skip


def layers(timeline: Timeline, columns: int) -> Layers:
    """The timeline in ``columns`` columns. Its peak is the largest of their totals, to the byte."""
    found = phases(timeline)
    events = _fullest(timeline, found, found, columns)
    held = np.stack([
        np.cumsum(np.where(timeline.category == index, timeline.delta, 0))[events] for index in range(len(CATEGORIES))
    ])  # fmt: skip
    return Layers(
        phases=found,
        event=events,
        held=held,
        names=tuple(timeline.names[int(timeline.ident[event])] for event in events),
        moments=tuple(MOMENTS[int(timeline.moment[event])] for event in events),
        peak=int(np.argmax(held.sum(axis=0))) if len(events) else 0,
    )


def curve(timeline: Timeline, onto: Timeline, columns: int) -> NDArray[np.int64] | None:
    """Bytes in use of a timeline in the columns of another of the same step, ``onto``; None where that has other phases.

    What comes before the step is the other's alone: columns in it hold -1. The fullest point near the other's peak is in its
    column.
    """
    mine, places = phases(timeline), [phase for phase in phases(onto) if phase.moment not in BEFORE]
    if not mine or [phase.moment for phase in mine] != [phase.moment for phase in places]:
        return None
    live = timeline.live()[_fullest(timeline, mine, places, columns, _meeting(timeline, mine, onto, places))]
    return np.where((np.arange(columns) + 1) / columns <= places[0].left, -1, live)


def _meeting(
    timeline: Timeline, mine: Sequence[Phase], onto: Timeline, places: Sequence[Phase]
) -> tuple[int, float, float] | None:
    """The phase, by number, that has the other's peak; where the point that is the same lies in this one's phase and in that."""
    live, other = timeline.live(), onto.live()
    number = int(np.argmax([other[place.first : place.stop].max() for place in places]))
    place, phase = places[number], mine[number]
    there = float(_progress(onto, place)[int(np.argmax(other[place.first : place.stop]))])
    shares = _progress(timeline, phase)
    near = np.where(np.abs(shares - there) <= SLIP, live[phase.first : phase.stop], -1)
    top = int(np.argmax(near))
    return (number, float(shares[top]), there) if near[top] >= 0 else None


def _progress(timeline: Timeline, phase: Phase) -> NDArray[np.float64]:
    """Where the events of a phase lie in it, from 0 to 1."""
    events = slice(phase.first, phase.stop)
    ident, delta = timeline.ident[events], timeline.delta[events]
    count = (np.arange(len(delta)) + 0.5) / len(delta)
    lasting = np.bincount(ident, weights=delta)[ident] != 0  # of what comes and goes within the phase nothing is left
    moved = np.where(lasting & ~_replaced(timeline.category[events], delta, lasting), np.abs(delta), 0).astype(
        np.float64
    )
    if not moved.any():
        return count
    bytes_moved = (np.cumsum(moved) - moved / 2) / moved.sum()
    return BY_COUNT * count + (1 - BY_COUNT) * bytes_moved


def _replaced(category: NDArray[np.int8], delta: NDArray[np.int64], lasting: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Events that free or allocate what is there before and after all the same, such as a bucket that is made anew."""
    kinds, kind = np.unique(np.stack([category.astype(np.int64), np.abs(delta)]), axis=1, return_inverse=True)
    count = kinds.shape[1]
    made, freed = (np.bincount(kind[lasting & way], minlength=count) > 0 for way in (delta > 0, delta < 0))
    replaced: NDArray[np.bool_] = (made & freed)[kind]
    return replaced


def _fullest(
    timeline: Timeline, mine: Sequence[Phase], places: Sequence[Phase], columns: int,
    meeting: tuple[int, float, float] | None = None,
) -> NDArray[np.int64]:  # fmt: skip
    """Of each column the event after which most is in use; where there is none, the last one before it. What lies in a phase
    where ``meeting`` says is moved to where it says, and the rest of the phase with it."""
    if not mine:
        return np.zeros(0, dtype=np.int64)
    live = timeline.live()
    column = np.empty(len(live), dtype=np.int64)
    for number, (phase, place) in enumerate(zip(mine, places, strict=True)):
        share = _progress(timeline, phase)
        if meeting is not None and meeting[0] == number:
            share = np.interp(share, [0.0, meeting[1], 1.0], [0.0, meeting[2], 1.0])
        column[phase.first : phase.stop] = (place.left + share * (place.right - place.left)) * columns
    column = np.minimum(column, columns - 1)
    events = np.full(columns, -1, dtype=np.int64)
    order = np.lexsort((-np.arange(len(live)), live))  # the fullest last, of equals the first one
    events[column[order]] = order
    last = np.full(columns, -1, dtype=np.int64)
    last[column] = np.arange(len(live))
    before = np.maximum.accumulate(last)
    events = np.where(events < 0, before, events)
    events = np.maximum(np.where(events < 0, before, events), 0)
    for phase, place in zip(mine, places, strict=True):
        if phase.moment == LEVEL:
            inside = slice(*(int(np.ceil(edge * columns - 0.5)) for edge in (place.left, place.right)))
            fullest = phase.first + int(np.argmax(live[phase.first : phase.stop]))
            # At an edge a column may show more, of the moment next to it.
            events[inside] = np.where(live[events[inside]] > live[fullest], events[inside], fullest)
    return events
