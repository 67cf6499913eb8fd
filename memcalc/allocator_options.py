"""Settings of the CUDA caching allocator, as people write them in ``PYTORCH_CUDA_ALLOC_CONF``.

Sources: c10/core/AllocatorConfig.h, c10/core/AllocatorConfig.cpp and c10/cuda/CUDAAllocatorConfig.h.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from memcalc.errors import InputError, UnknownNameError, shorten

__all__ = ["AllocatorOptions"]

MIB = 2**20
BLOCK = 512  # kMinBlockSize
LARGE_SEGMENT = 20 * MIB  # large_segment_size_'s default, once kLargeBuffer
MIN_LARGE_ALLOC = 10 * MIB  # kMinLargeAlloc
INTERVALS = 16  # kRoundUpPowerOfTwoIntervals: 1 MiB to 2 MiB is the first, 32 GiB and more the last
_MOST = 2**40  # MiB: an exbibyte


@dataclass(frozen=True, kw_only=True, slots=True)
class AllocatorOptions:
    """What changes how many bytes the allocator reserves; sizes in bytes. Raises InputError when not sound."""

    expandable_segments: bool = False
    max_split_size: int | None = None
    """Blocks this large are never split, and smaller requests never take them; None for no limit."""
    max_non_split_rounding: int = LARGE_SEGMENT
    """How much larger than a request of ``max_split_size`` or more the block that serves it may be: less than this."""
    large_segment: int = LARGE_SEGMENT
    """A segment for requests of more than 1 MiB and less than 10 MiB; also the page of large expandable segments."""
    roundup_power2_divisions: tuple[int, ...] = (0,) * INTERVALS
    """Sizes between 2**(20 + i) and twice that are rounded up to one of so many steps; 0 and 1 for none."""
    garbage_collection_threshold: float = 0.0
    """Share of the limit from which cached segments are given back before new ones are taken; 0 for never.

    Works only under a limit, as in torch: ``per_process_memory_fraction``.
    """
    per_process_memory_fraction: float | None = None
    """Share of the capacity torch may take; None when not set."""

    def __post_init__(self) -> None:
        if self.large_segment <= MIN_LARGE_ALLOC:
            raise InputError("large_segment_size_mb must be more than 10")
        if self.max_split_size is not None and self.max_split_size < self.large_segment:
            raise InputError(
                f"max_split_size_mb {self.max_split_size // MIB} must be at least "
                f"large_segment_size_mb, {self.large_segment // MIB}"
            )
        if self.max_non_split_rounding < LARGE_SEGMENT:
            raise InputError(f"max_non_split_rounding_mb must be at least {LARGE_SEGMENT // MIB}")
        if not 0 <= self.garbage_collection_threshold < 1:
            raise InputError("garbage_collection_threshold must be between 0 and 1")
        if self.per_process_memory_fraction is not None and not 0 <= self.per_process_memory_fraction <= 1:
            raise InputError("per_process_memory_fraction must be from 0 to 1")
        if len(self.roundup_power2_divisions) != INTERVALS or any(n & (n - 1) for n in self.roundup_power2_divisions):
            raise InputError(f"roundup_power2_divisions must be {INTERVALS} powers of two or zeros")

    @classmethod
    def parse(cls, text: str) -> AllocatorOptions:
        """Options from the text of ``PYTORCH_CUDA_ALLOC_CONF``. Raises InputError with one line.

        >>> AllocatorOptions.parse("expandable_segments:True, max_split_size_mb:128").max_split_size
        134217728
        >>> AllocatorOptions.parse("max_split_size:128")
        Traceback (most recent call last):
        ...
        memcalc.errors.UnknownNameError: unknown allocator option 'max_split_size'; did you mean 'max_split_size_mb'? \
known: backend, expandable_segments, garbage_collection_threshold, graph_capture_record_stream_reuse, \
large_segment_size_mb, max_non_split_rounding_mb, max_split_size_mb, per_process_memory_fraction, \
pinned_free_catch_all, pinned_max_cached_size_mb, pinned_max_round_threshold_mb, pinned_num_register_threads, \
pinned_reserve_segment_size_mb, pinned_use_background_threads, pinned_use_cuda_host_register, \
release_lock_on_cudamalloc, roundup_power2_divisions, throw_on_cudamalloc_oom
        """
        given: dict[str, Any] = {}
        # A comma inside [...] parts the intervals of one option.
        for part in re.split(r",(?![^\[]*\])", re.sub(r"\s", "", text)):
            if not part:
                continue
            name, colon, value = part.partition(":")
            if name not in _READERS:
                raise UnknownNameError("allocator option", name, _READERS)
            if not colon or not value:
                raise InputError(f"allocator option {name} has no value; write it like {name}:{_EXAMPLES[name]}")
            field, read = _READERS[name]
            read_value = read(name, value)
            if field:
                given[field] = read_value
        return cls(**given)

    def round(self, size: int) -> int:
        """Bytes of the block that is looked for when ``size`` bytes are asked for (``round_size``).

        >>> AllocatorOptions().round(1), AllocatorOptions().round(513)
        (512, 1024)
        >>> AllocatorOptions(roundup_power2_divisions=(4,) * 16).round(1200 * 2**20) // 2**20
        1280
        """
        if size < BLOCK:
            return BLOCK
        interval = min(max(size.bit_length() - 21, 0), INTERVALS - 1)
        divisions = self.roundup_power2_divisions[interval]
        if divisions <= 1 or size <= BLOCK * divisions:
            return -(-size // BLOCK) * BLOCK
        step = (1 << (size.bit_length() - 1)) // divisions
        return -(-size // step) * step


def _mib(name: str, value: str) -> int:
    if not re.fullmatch("[0-9]{1,20}", value) or not 0 < int(value) <= _MOST:
        raise InputError(f"allocator option {name} {shorten(value)} must be a whole number of MiB from 1 to 2**40")
    return int(value) * MIB


def _share(name: str, value: str) -> float:
    if not re.fullmatch(r"[0-9]{0,9}\.?[0-9]{0,30}", value) or not 0 < float(value if value != "." else 0) <= 1:
        raise InputError(f"allocator option {name} {shorten(value)} must be more than 0 and at most 1")
    return float(value)


def _threshold(name: str, value: str) -> float:
    share = _share(name, value)
    if share == 1:
        raise InputError(f"allocator option {name} 1 must be less than 1")
    return share


def _flag(name: str, value: str) -> bool:
    if value not in ("True", "False"):
        raise InputError(f"allocator option {name} {shorten(value)} must be True or False")
    return value == "True"


def _native(name: str, value: str) -> str:
    if value != "native":
        raise InputError(f"allocator option {name} {shorten(value)} cannot be replayed; only native can")
    return value


def _unread(name: str, value: str) -> None:
    """Concerns host memory, locks or messages: no byte on the device."""


def _threads(name: str, value: str) -> int:
    threads = _power(name, value, zero=False)
    if threads > 128:  # CUDAAllocatorConfig.h, pinned_max_register_threads
        raise InputError(f"allocator option {name} {threads} must be at most 128")
    return threads


def _power(name: str, text: str, *, zero: bool) -> int:
    if not re.fullmatch("[0-9]{1,15}", text) or int(text) & (int(text) - 1) or (int(text) == 0 and not zero):
        raise InputError(f"allocator option {name}: {shorten(text)} must be a power of two{' or 0' if zero else ''}")
    return int(text)


def _divisions(name: str, value: str) -> tuple[int, ...]:
    """One number for all sizes, or ``[64:8,256:4,>:1]``: sizes from so many MiB on, and all above the last.

    What is below the first gets its divisions too; what is between two gets none.
    """
    if not value.startswith("["):
        return (_power(name, value, zero=False),) * INTERVALS
    if not re.fullmatch(r"\[([0-9]+|>):[0-9]+(,([0-9]+|>):[0-9]+)*\]", value):
        raise InputError(f"allocator option {name} {shorten(value)} cannot be read; write it like {_EXAMPLES[name]}")
    table, last = [0] * INTERVALS, -1
    for index, pair in enumerate(value[1:-1].split(",")):
        boundary, divisions = pair.split(":")
        count = _power(name, divisions, zero=True)
        if boundary == ">":
            table[last + 1 :] = [count] * (INTERVALS - last - 1)
            continue
        last = min(_power(name, boundary, zero=False).bit_length() - 1, INTERVALS - 1)
        if index == 0:
            table[:last] = [count] * last
        table[last] = count
    return tuple(table)


_READERS: dict[str, tuple[str, Callable[[str, str], Any]]] = {
    "expandable_segments": ("expandable_segments", _flag),
    "max_split_size_mb": ("max_split_size", _mib),
    "max_non_split_rounding_mb": ("max_non_split_rounding", _mib),
    "large_segment_size_mb": ("large_segment", _mib),
    "roundup_power2_divisions": ("roundup_power2_divisions", _divisions),
    "garbage_collection_threshold": ("garbage_collection_threshold", _threshold),
    "per_process_memory_fraction": ("per_process_memory_fraction", _share),
    "backend": ("", _native),
    "graph_capture_record_stream_reuse": ("", _flag),
    "pinned_free_catch_all": ("", _unread),
    "pinned_max_cached_size_mb": ("", _unread),
    "pinned_max_round_threshold_mb": ("", _unread),
    "pinned_num_register_threads": ("", _threads),
    "pinned_reserve_segment_size_mb": ("", _unread),
    "pinned_use_background_threads": ("", _flag),
    "pinned_use_cuda_host_register": ("", _flag),
    "release_lock_on_cudamalloc": ("", _flag),
    "throw_on_cudamalloc_oom": ("", _flag),
}
_EXAMPLES = {
    **dict.fromkeys(_READERS, "True"),
    **{name: "32" for name in _READERS if name.endswith("_mb")},
    "backend": "native",
    "garbage_collection_threshold": "0.8",
    "per_process_memory_fraction": "0.9",
    "pinned_num_register_threads": "8",
    "roundup_power2_divisions": "[64:8,256:4,>:1]",
}
