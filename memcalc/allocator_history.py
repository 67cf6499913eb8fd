"""The history that torch recorded of its own allocator, replayed: does the replay reserve what torch reserved?

    torch.cuda.memory._record_memory_history(context=None)     # before anything is on the GPU
    ...                                                        # the run
    torch.cuda.memory._dump_snapshot("snapshot.pickle")        # or json.dump(torch.cuda.memory._snapshot(), file)

A snapshot lists requests (``alloc``), frees (``free_requested`` by the program, ``free_completed`` once no other stream
uses the block) and what was taken from the driver and given back (``segment_alloc``, ``segment_free``; ``segment_map``
and ``segment_unmap`` for expandable segments). Source: torch/cuda/memory.py, _snapshot; record_trace in
c10/cuda/CUDACachingAllocator.cpp. Reading one: memcalc/snapshot.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from memcalc.allocator import Allocator
from memcalc.allocator_blocks import Block
from memcalc.allocator_options import AllocatorOptions
from memcalc.errors import FileError, InputError
from memcalc.snapshot import RETURNED, TAKEN, Entry, read_entries, read_file, read_settings, sizes

__all__ = ["History", "Replayed", "load_history", "replay_history"]

_HOW = "call torch.cuda.memory._record_memory_history(context=None) before anything is on the GPU"


@dataclass(frozen=True, kw_only=True, slots=True)
class History:
    """One device's allocator from the first request on."""

    entries: tuple[Entry, ...]
    options: AllocatorOptions
    """As the snapshot says that they were."""
    source: str = "the history"
    """What errors call it: its file."""

    @property
    def reserved(self) -> tuple[int, int]:
        """Bytes taken from the driver as recorded: at most, and at the end."""
        held = peak = 0
        for entry in self.entries:
            if entry.action in TAKEN:
                held += entry.size
            elif entry.action in RETURNED:
                held -= entry.size
            peak = max(peak, held)
        return peak, held


@dataclass(frozen=True, kw_only=True, slots=True)
class Replayed:
    """Peaks of a replayed history, and what is held after it; bytes."""

    peak_allocated: int
    peak_active: int
    peak_reserved: int
    reserved: int
    differs_at: int | None
    """The first entry before which the replay held another amount than was recorded; None if there is none."""


def load_history(path: Path, device: int | None = None) -> History:
    """Read the history in a snapshot. Raises FileError; ``device`` is the first with a history."""
    source, data = str(path), read_file(path)
    traces = data.get("device_traces")
    if traces is None:
        raise FileError(f"{source} holds no history; {_HOW}")
    if device is None and isinstance(traces, list):
        device = next((index for index, trace in enumerate(traces) if trace), 0)
    entries = read_entries(data, source, device or 0)
    options = AllocatorOptions.parse(read_settings(data))
    history = History(entries=entries, options=options, source=source)
    if history.reserved[1] != sizes(data, source).get(device or 0, 0):
        raise FileError(f"{source}: its history lacks the beginning; {_HOW}")
    return history


def replay_history(history: History, options: AllocatorOptions | None = None) -> Replayed:
    """Replay requests and frees alone. Raises InputError, naming its file, when it cannot be: a free of what was
    not allocated, an allocation of what is.

    With the history's own options the segments get the addresses they had, and are given back when they were: the
    driver and the program decided that, not the allocator. With other ``options`` they get addresses that ascend, and
    where any was given back the whole cache is.
    """
    own = options is None or options == history.options
    allocator = Allocator(options or history.options)
    blocks: dict[int, Block] = {}
    waiting: dict[int, Block] = {}
    allocated = peak_allocated = peak_active = peak_reserved = recorded = 0
    differs_at, before = None, ""
    for index, entry in enumerate(history.entries):
        action = entry.action
        if action == "alloc" and entry.size:
            block = allocator.allocate(entry.size, entry.stream)
            assert block is not None, "an allocator without an end refuses nothing"
            if entry.address in blocks or entry.address in waiting:
                raise _odd(history, index, "allocates what is allocated already")
            blocks[entry.address] = block
            allocated += block.size
        elif action == "free_requested" and entry.size:
            block = _taken(blocks, history, index)
            waiting[entry.address] = block
            allocated -= block.size
        elif action == "free_completed" and entry.size:
            allocator.free(_taken(waiting, history, index))
        elif action in TAKEN:
            recorded += entry.size
            allocator.next_address = entry.address if own and action == "segment_alloc" else None
        elif action in RETURNED:
            recorded -= entry.size
            if recorded < 0:
                raise _odd(history, index, "gives back more than was taken from the driver")
            if own and action == "segment_free":
                allocator.release(entry.address)
            elif before not in RETURNED:
                allocator.empty_cache()
        if differs_at is None and action == "alloc" and allocator.reserved != recorded:
            differs_at = index
        before = action
        peak_allocated = max(peak_allocated, allocated)
        peak_active = max(peak_active, allocator.allocated)
        peak_reserved = max(peak_reserved, allocator.reserved)
    return Replayed(
        peak_allocated=peak_allocated,
        peak_active=peak_active,
        peak_reserved=peak_reserved,
        reserved=allocator.reserved,
        differs_at=differs_at if own else None,
    )


def _taken(blocks: dict[int, Block], history: History, index: int) -> Block:
    block = blocks.pop(history.entries[index].address, None)
    if block is None:
        raise _odd(history, index, "frees what it has not allocated")
    return block


def _odd(history: History, index: int, what: str) -> InputError:
    return InputError(f"{history.source}: entry {index} of its history {what}; {_HOW}")
