"""The history that torch recorded of its own allocator, replayed: does the replay reserve what torch reserved?

    torch.cuda.memory._record_memory_history(context=None)     # before anything is on the GPU
    ...                                                        # the run
    json.dump(torch.cuda.memory._snapshot(), open("history.json", "w"))

A snapshot lists requests (``alloc``), frees (``free_requested`` by the program, ``free_completed`` once no other stream
uses the block) and what was taken from the driver and given back (``segment_alloc``, ``segment_free``; ``segment_map``
and ``segment_unmap`` for expandable segments). Source: torch/cuda/memory.py, _snapshot; record_trace in
c10/cuda/CUDACachingAllocator.cpp. A pickled snapshot is not read: unpickling runs what is in it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from memcalc.allocator import Allocator
from memcalc.allocator_blocks import Block
from memcalc.allocator_options import AllocatorOptions
from memcalc.errors import FileError, InputError
from memcalc.files import read_json

__all__ = ["Entry", "History", "Replayed", "load_history", "replay_history"]

_TAKEN, _RETURNED = ("segment_alloc", "segment_map"), ("segment_free", "segment_unmap")
_HOW = "call torch.cuda.memory._record_memory_history(context=None) before anything is on the GPU"


class Entry(NamedTuple):
    """One thing the allocator did; ``size`` in bytes: of a request what was asked for, of a segment all of it."""

    action: str
    address: int
    size: int
    stream: int


@dataclass(frozen=True, kw_only=True, slots=True)
class History:
    """One device's allocator from the first request on."""

    entries: tuple[Entry, ...]
    options: AllocatorOptions
    """As the snapshot says that they were."""

    @property
    def reserved(self) -> tuple[int, int]:
        """Bytes taken from the driver as recorded: at most, and at the end."""
        held = peak = 0
        for entry in self.entries:
            if entry.action in _TAKEN:
                held += entry.size
            elif entry.action in _RETURNED:
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
    """Read a snapshot that was written as JSON. Raises FileError; ``device`` is the first with a history."""
    data = read_json(path, str(path))
    try:
        traces = data["device_traces"]
        index = next((i for i, trace in enumerate(traces) if trace), 0) if device is None else device
        entries = tuple(map(_entry, traces[index]))
        settings = data.get("allocator_settings") or {}
        text = str(settings.get("PYTORCH_CUDA_ALLOC_CONF") or "")
        held = sum(int(segment["total_size"]) for segment in data["segments"] if segment["device"] == index)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError):
        raise FileError(f"{path} is not a snapshot of torch.cuda.memory._snapshot() written by json.dump") from None
    history = History(entries=entries, options=AllocatorOptions.parse(text))
    if history.reserved[1] != held:
        raise FileError(f"{path}: its history lacks the beginning; {_HOW}")
    return history


def _entry(data: Any) -> Entry:
    return Entry(str(data["action"]), int(data["addr"]), int(data["size"]), int(data["stream"]))


def replay_history(history: History, options: AllocatorOptions | None = None) -> Replayed:
    """Replay requests and frees alone. Raises InputError when the history frees what it did not allocate.

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
            blocks[entry.address] = block
            allocated += block.size
        elif action == "free_requested" and entry.size:
            block = _taken(blocks, entry, index)
            waiting[entry.address] = block
            allocated -= block.size
        elif action == "free_completed" and entry.size:
            allocator.free(_taken(waiting, entry, index))
        elif action in _TAKEN:
            recorded += entry.size
            allocator.next_address = entry.address if own and action == "segment_alloc" else None
        elif action in _RETURNED:
            recorded -= entry.size
            if own and action == "segment_free":
                allocator.release(entry.address)
            elif before not in _RETURNED:
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


def _taken(blocks: dict[int, Block], entry: Entry, index: int) -> Block:
    block = blocks.pop(entry.address, None)
    if block is None:
        raise InputError(f"entry {index} of the history frees what it has not allocated; {_HOW}")
    return block
