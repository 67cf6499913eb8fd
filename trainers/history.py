"""Raw allocator events to the bytes in use, by moment and as a Timeline.

Both allocators tell the same story: at this time, this many bytes began or ceased to be in use at this
address. An instrument only has to deliver that, and the times at which the loop entered each moment.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from memcalc.timeline import CATEGORIES, MOMENTS, Timeline

__all__ = ["Boundary", "Event", "History"]

_COMMUNICATION = ("FSDP::", "c10d::", "gloo:", "nccl:")


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


class History:
    """Events with each free paired to its allocation; frees of what was allocated earlier are dropped."""

    def __init__(self, events: Sequence[Event], boundaries: Sequence[Boundary]) -> None:
        self.boundaries = list(boundaries)
        self.names: list[str] = []
        rows: list[tuple[int, int, int, int]] = []  # time, ident, bytes, address
        open_: dict[int, tuple[int, int]] = {}
        for event in sorted(events, key=lambda event: event.time):
            held = open_.pop(event.address, None)
            if held is not None:
                # An address that is allocated again was freed, even where a thread did not report it.
                rows.append((event.time, held[0], -held[1], event.address))
            if event.bytes > 0:
                open_[event.address] = (len(self.names), event.bytes)
                rows.append((event.time, len(self.names), event.bytes, event.address))
                self.names.append(event.name)
        table = np.array(rows, dtype=np.int64).reshape(-1, 4)
        self.time, self.ident, self.bytes, self.address = table.T
        self.live = np.cumsum(self.bytes)
        self.starts = np.searchsorted(self.time, [boundary.time for boundary in self.boundaries])

    def windows(self) -> list[tuple[Boundary, int, int, int]]:
        """Each boundary with the range of its events and the most bytes in use within it."""
        ends = [*self.starts[1:], len(self.time)]
        found = []
        for boundary, first, end in zip(self.boundaries, self.starts, ends, strict=True):
            before = int(self.live[first - 1]) if first else 0
            found.append((boundary, int(first), int(end), max(before, int(self.live[first:end].max(initial=0)))))
        return found

    def alive(self, row: int) -> dict[int, int]:
        """What is in use before a row: ident to the row of its allocation."""
        found: dict[int, int] = {}
        for index in range(row):
            if self.bytes[index] > 0:
                found[int(self.ident[index])] = index
            else:
                found.pop(int(self.ident[index]), None)
        return found

    def identify(self, time: int, addresses: Mapping[int, str]) -> dict[int, str]:
        """Categories of the idents that are in use at these addresses at a time."""
        alive = self.alive(int(np.searchsorted(self.time, time)))
        return {ident: addresses[int(self.address[row])] for ident, row in alive.items() if int(self.address[row]) in addresses}

    def timeline(self, step: int, known: Mapping[int, str]) -> Timeline:
        """One step. ``known`` tells the category of idents; the others go by the moment of their allocation."""
        windows = [window for window in self.windows() if window[0].step == step]
        rows = [(row, "start") for row in self.alive(windows[0][1]).values()]
        rows += [(row, boundary.moment) for boundary, begin, end, _ in windows for row in range(begin, end)]
        born = {int(self.ident[row]): moment for row, moment in reversed(rows) if self.bytes[row] > 0}
        order = {ident: index for index, ident in enumerate(sorted(born))}
        category = {ident: known.get(ident) or self._category(ident, moment) for ident, moment in born.items()}
        idents = [int(self.ident[row]) for row, _ in rows]
        return Timeline(
            names=tuple(self.names[ident] for ident in order),
            ident=np.array([order[ident] for ident in idents], dtype=np.int64),
            category=np.array([CATEGORIES.index(category[ident]) for ident in idents], dtype=np.int8),
            moment=np.array([MOMENTS.index(moment) for _, moment in rows], dtype=np.int8),
            delta=self.bytes[[row for row, _ in rows]],
        )

    def _category(self, ident: int, moment: str) -> str:
        if any(mark in self.names[ident] for mark in _COMMUNICATION):
            return "communication"
        return {"start": "inputs", "forward": "activations", "loss": "activations"}.get(moment, "temporary")
