"""A list of allocations and frees, replayed through the caching allocator: the ``reserved`` meter."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from memcalc.allocator import Allocator
from memcalc.allocator_blocks import Block
from memcalc.allocator_options import AllocatorOptions
from memcalc.errors import InputError
from memcalc.timeline import Timeline

__all__ = ["Refusal", "Reserved", "replay"]

DEFAULT = AllocatorOptions()


@dataclass(frozen=True, kw_only=True, slots=True)
class Refusal:
    """An allocation that could not be had; the three sizes are those of torch's out-of-memory message, in bytes."""

    event: int
    """Index of the event that asked for it."""
    tried: int
    """"Tried to allocate": the segment, not the tensor."""
    allocated: int
    reserved: int
    """What is left after every segment that could be released was."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Reserved:
    """What the allocator held; sizes in bytes."""

    peak_reserved: int
    """``torch.cuda.max_memory_reserved``."""
    peak_allocated: int
    """``torch.cuda.max_memory_allocated``: blocks, which may be up to 1 MiB larger than what was asked for."""
    segments: int
    """Segments held when the peak was reached."""
    by_stream: dict[int, int]
    """Reserved bytes by stream when the peak was reached."""
    reserved: int
    """Still held after the last event."""
    allocated: int
    refused: Refusal | None = None
    """Why the replay ended early, if it did."""

    @property
    def fragmentation(self) -> float:
        """Share of the reserved peak that the allocated peak does not fill; 0 when nothing was reserved."""
        return 1 - self.peak_allocated / self.peak_reserved if self.peak_reserved else 0.0


def replay(
    events: Timeline | Iterable[tuple[int, int]],
    options: AllocatorOptions = DEFAULT,
    *,
    capacity: int | None = None,
    enough: int | None = None,
    streams: Mapping[int, int] | None = None,
) -> Reserved:
    """Replay ``(ident, bytes)`` in program order: positive to allocate, negative to free what carries the ident.

    ``capacity`` is what the driver can give torch; without it there is no end. What comes after more than ``enough`` bytes are
    reserved is left out. ``streams`` names the stream
    an ident is allocated on, 0 where it says nothing. A free of 0 bytes ahead of its own is the program's: the bytes
    count as allocated no more, while the block still waits for another stream (c10/cuda/CUDACachingAllocator.cpp, ``free``
    and ``insert_events``). Raises InputError when a free meets nothing to free,
    or an ident is allocated twice without a free between.

    >>> found = replay([(0, 3 * 2**20), (1, 100), (0, -3 * 2**20), (2, 4 * 2**20)])
    >>> found.peak_reserved // 2**20, found.peak_allocated, found.segments
    (22, 4194816, 2)
    """
    if isinstance(events, Timeline):
        events = zip(events.ident.tolist(), events.delta.tolist(), strict=True)
    allocator = Allocator(options, capacity)
    streams = streams or {}
    live: dict[int, Block] = {}
    peak_reserved = peak_allocated = segments = 0
    by_stream: dict[int, int] = {}
    refused = None
    let_go: dict[int, int] = {}
    waiting = 0
    for index, (ident, size) in enumerate(events):
        if size < 0:
            block = live.pop(ident, None)
            if block is None:
                raise InputError(f"event {index} frees {ident}, which is not allocated")
            allocator.free(block)
            if let_go:
                waiting -= let_go.pop(ident, 0)
            continue
        if size == 0:  # torch hands out no block for an empty tensor
            if ident in live:
                let_go[ident] = live[ident].size
                waiting += live[ident].size
            continue
        if ident in live:
            raise InputError(f"event {index} allocates {ident}, which is allocated already")
        block = allocator.allocate(size, streams.get(ident, 0))
        if block is None:
            tried = allocator.segment_size(options.round(size))
            refused = Refusal(
                event=index, tried=tried, allocated=allocator.allocated - waiting, reserved=allocator.reserved
            )
            break
        live[ident] = block
        if allocator.allocated - waiting > peak_allocated:
            peak_allocated = allocator.allocated - waiting
        if allocator.reserved > peak_reserved:
            peak_reserved, segments = allocator.reserved, allocator.segments
            by_stream = dict(allocator.by_stream)
            if enough is not None and peak_reserved > enough:
                break
    return Reserved(
        peak_reserved=peak_reserved,
        peak_allocated=peak_allocated,
        segments=segments,
        by_stream=by_stream,
        reserved=allocator.reserved,
        allocated=allocator.allocated - waiting,
        refused=refused,
    )
