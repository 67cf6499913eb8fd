"""What ``torch.cuda.memory._dump_snapshot`` writes: every segment and block of the caching allocator, and what it did.

    torch.cuda.memory._record_memory_history()                 # the history, with stacks; optional
    ...                                                        # the run
    torch.cuda.memory._dump_snapshot("snapshot.pickle")

A snapshot is a pickle of plain containers (memcalc/plain_pickle.py); the same written by ``json.dump`` is read too. Every
value is checked here once: a file is someone else's. What older versions of torch left out has a default.

Sources: torch/cuda/memory.py, ``_snapshot``; torch/csrc/cuda/Module.cpp, ``THCPModule_memorySnapshot``;
c10/core/CachingDeviceAllocator.h, ``TraceEntry``; torch/cuda/_memory_viz.py, ``_block_extra_legacy`` for torch 2.0.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from memcalc.errors import FileError
from memcalc.files import read_bytes, read_json
from memcalc.plain_pickle import LARGEST_FILE, is_pickle, read_plain
from memcalc.snapshot_fields import ADDRESS, WHAT, Fields, Frames, Stacks, a_list

__all__ = [
    "ACTIVE",
    "RETURNED",
    "TAKEN",
    "Block",
    "Entry",
    "Segment",
    "Snapshot",
    "load_snapshot",
    "read_entries",
    "read_file",
    "read_segments",
    "read_settings",
    "sizes",
]

TAKEN, RETURNED = ("segment_alloc", "segment_map"), ("segment_free", "segment_unmap")
_ACTIONS = ("alloc", "free_requested", "free_completed", *TAKEN, *RETURNED, "snapshot", "oom", "user_defined")
ACTIVE = "active_allocated"
# memory.py's docstring says active_awaiting_free, Module.cpp writes active_pending_free.
_STATES = {ACTIVE: ACTIVE, "active_pending_free": "waiting", "active_awaiting_free": "waiting", "inactive": "inactive"}
_KINDS = ("small", "large")
_MOST_BLOCKS = 4_000_000


class Entry(NamedTuple):
    """One thing the allocator did; ``size`` in bytes: of a request what was asked for, of a segment all of it."""

    action: str
    address: int
    """For ``oom`` what the driver said was free."""
    size: int
    stream: int
    frames: Frames = ()


class Block(NamedTuple):
    """A piece of a segment; bytes."""

    address: int
    size: int
    requested: int
    state: str
    """``active_allocated``, ``waiting`` (freed, but another stream may still use it) or ``inactive``."""
    frames: Frames


@dataclass(frozen=True, kw_only=True, slots=True)
class Segment:
    """Memory taken from the driver in one piece; of an expandable segment, a mapped stretch of it."""

    device: int
    address: int
    size: int
    stream: int
    kind: str
    """``small`` for requests up to 1 MiB, or ``large``."""
    pool: tuple[int, int]
    """(0, 0), or the private pool of a CUDA graph or a ``torch.cuda.MemPool``."""
    expandable: bool
    blocks: tuple[Block, ...]

    def held(self, *states: str) -> int:
        """Bytes of its blocks in these states."""
        return sum(block.size for block in self.blocks if block.state in states)


@dataclass(frozen=True, kw_only=True, slots=True)
class Snapshot:
    """One device of a snapshot."""

    source: str
    device: int
    devices: tuple[int, ...]
    """All that hold anything in the file."""
    segments: tuple[Segment, ...]
    entries: tuple[Entry, ...]
    """The history, or its end: torch keeps the last ``max_entries``."""
    settings: str
    """PYTORCH_CUDA_ALLOC_CONF as the snapshot says it; empty when it does not."""

    @property
    def reserved(self) -> int:
        """Bytes taken from the driver when the snapshot was made."""
        return sum(segment.size for segment in self.segments)


def load_snapshot(path: Path, device: int | None = None) -> Snapshot:
    """Read one device of a snapshot; without a number the one that reserves the most. Raises FileError in one line."""
    source = str(path)
    data = read_file(path)
    segments = read_segments(data, source)
    traces = _traces(data, source)
    held: Counter[int] = Counter({index: 0 for index, trace in enumerate(traces) if trace})
    for segment in segments:
        held[segment.device] += segment.size
    devices = tuple(sorted(held))
    if not devices:
        raise FileError(f"{source} is empty: no device held memory, and no history was recorded")
    if device is None:
        device = max(devices, key=lambda index: (held[index], -index))
    if device not in devices:
        raise FileError(f"{source} has nothing of device {device}; it has {', '.join(map(str, devices))}")
    return Snapshot(
        source=source,
        device=device,
        devices=devices,
        segments=tuple(segment for segment in segments if segment.device == device),
        entries=read_entries(data, source, device),
        settings=read_settings(data),
    )


def read_file(path: Path) -> dict[str, Any]:
    """The snapshot's dict, from a pickle or from JSON. Raises FileError."""
    raw = read_bytes(path, LARGEST_FILE)
    if is_pickle(raw):
        data = read_plain(raw, str(path))
    else:
        try:
            text = raw.decode("utf-8-sig")
        except UnicodeDecodeError:
            text = "?"
        if text.strip() and text.lstrip()[0] not in "{[":
            raise FileError(f"{path} is not {WHAT}: it is neither a pickle of plain values nor JSON")
        data = read_json(text, str(path))
    if isinstance(data, list):  # torch.cuda.memory_snapshot() is the segments alone
        data = {"segments": data}
    if not isinstance(data, dict) or "segments" not in data:
        raise FileError(f"{path} is not {WHAT}: it has no key 'segments'")
    return data


def read_settings(data: dict[str, Any]) -> str:
    settings = data.get("allocator_settings")
    text = settings.get("PYTORCH_CUDA_ALLOC_CONF") if isinstance(settings, dict) else None
    return text if isinstance(text, str) else ""


def _traces(data: dict[str, Any], source: str) -> list[Any]:
    traces = a_list(data.get("device_traces", []), "device_traces", source)
    for index, trace in enumerate(traces):
        a_list(trace, f"history of device {index}", source)
    return traces


def read_entries(data: dict[str, Any], source: str, device: int) -> tuple[Entry, ...]:
    """The history of one device. Raises FileError that names the file and the first odd entry."""
    traces = _traces(data, source)
    if device >= len(traces):
        return ()
    stacks = Stacks(source)
    return tuple(_entry(each, f"entry {index} of its history", stacks) for index, each in enumerate(traces[device]))


def _entry(data: Any, where: str, stacks: Stacks) -> Entry:
    fields = Fields(data, where, stacks.source)
    action = fields.one_of("action", _ACTIONS)
    return Entry(
        action,
        fields.whole(
            "device_free" if action == "oom" else "addr", default=0 if action == "snapshot" else None, most=ADDRESS
        ),
        fields.whole("size", default=0 if action in ("snapshot", "user_defined") else None),
        fields.whole("stream", default=0, least=-ADDRESS, most=ADDRESS),
        stacks.read(data.get("frames"), where),
    )


def read_segments(data: dict[str, Any], source: str) -> list[Segment]:
    """All segments with their blocks, which fill them. Raises FileError that names what is odd."""
    stacks = Stacks(source)
    raw = a_list(data["segments"], "segments", source)
    if sum(len(each["blocks"]) for each in raw if isinstance(each, dict) and isinstance(each.get("blocks"), list)) > (
        _MOST_BLOCKS
    ):
        raise FileError(f"{source}: its segments have more than {_MOST_BLOCKS:,} blocks")
    return [_segment(each, f"segment {index}", stacks) for index, each in enumerate(raw)]


def sizes(data: dict[str, Any], source: str) -> dict[int, int]:
    """Bytes reserved of each device, of the segments alone."""
    found: Counter[int] = Counter()
    for index, each in enumerate(a_list(data["segments"], "segments", source)):
        fields = Fields(each, f"segment {index}", source)
        found[fields.whole("device", default=0)] += fields.whole("total_size")
    return found


def _segment(data: Any, where: str, stacks: Stacks) -> Segment:
    fields = Fields(data, where, stacks.source)
    address, size = fields.whole("address", most=ADDRESS), fields.whole("total_size")
    pool = data.get("segment_pool_id", (0, 0))  # since torch 2.1
    if not (isinstance(pool, list | tuple) and len(pool) == 2 and all(type(part) is int for part in pool)):
        raise fields.odd("segment_pool_id", "two whole numbers")
    blocks = tuple(_blocks(a_list(data.get("blocks"), f"blocks of {where}", stacks.source), where, address, stacks))
    filled = sum(block.size for block in blocks)
    if filled != size:
        raise FileError(f"{stacks.source}: the blocks of {where} come to {filled:,} B, its total_size is {size:,} B")
    return Segment(
        device=fields.whole("device", default=0),
        address=address,
        size=size,
        stream=fields.whole("stream", default=0, least=-ADDRESS, most=ADDRESS),
        kind=fields.one_of("segment_type", _KINDS),
        pool=(pool[0], pool[1]),
        expandable=data.get("is_expandable") is True,  # since torch 2.1
        blocks=blocks,
    )


def _blocks(raw: list[Any], where: str, address: int, stacks: Stacks) -> Iterator[Block]:
    for index, each in enumerate(raw):
        here = f"block {index} of {where}"
        fields = Fields(each, here, stacks.source)
        size = fields.whole("size", least=1)
        requested, frames = fields.whole("requested_size", default=size), each.get("frames")
        history = each.get("history")
        if frames is None and isinstance(history, list) and history:  # torch 2.0
            past = Fields(history[0], f"history of {here}", stacks.source)
            requested, frames = past.whole("real_size", default=requested), history[0].get("frames")
        state = _STATES[fields.one_of("state", tuple(_STATES))]
        yield Block(
            fields.whole("address", default=address, most=ADDRESS), size, requested, state, stacks.read(frames, here)
        )
        address += size
