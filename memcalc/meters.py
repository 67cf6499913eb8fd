"""What the meters of one GPU say when read together: what tensors hold, what the cache holds, what is not torch's.

allocated   torch.cuda.max_memory_allocated: blocks handed out to tensors
active      torch.cuda.memory_stats()["active_bytes.all.peak"]: these, and blocks that wait for another stream
reserved    torch.cuda.max_memory_reserved: segments the caching allocator took from the driver
device      nvidia-smi: everything on the card
"""

from __future__ import annotations

from dataclasses import dataclass

from memcalc.errors import InputError
from memcalc.hardware import GPUS, Bounds, Gpu
from memcalc.reserved import RESERVED_OVER_ALLOCATED, SEGMENT
from memcalc.units import format_both

__all__ = ["COUNTERS", "Explained", "Part", "explain"]

COUNTERS = {
    "allocated": "torch.cuda.max_memory_allocated()",
    "active": 'torch.cuda.memory_stats()["active_bytes.all.peak"]',
    "reserved": "torch.cuda.max_memory_reserved()",
    "device": "nvidia-smi",
}
"""The meters from the inside out; no meter shows less than the one before it."""

_PARTS = {
    ("allocated", "active"): ("waiting", "freed by the program, but another stream may still read it (record_stream)"),
    ("allocated", "reserved"): ("cache", "in the allocator's cache or between blocks: torch has it, no tensor uses it"),
    ("active", "reserved"): ("cache", "in the allocator's cache or between blocks: torch has it, no tensor uses it"),
    ("allocated", "device"): ("cache and outside", "the allocator's cache, the CUDA context, NCCL, other processes"),
    ("active", "device"): ("cache and outside", "the allocator's cache, the CUDA context, NCCL, other processes"),
    ("reserved", "device"): ("outside torch", "the CUDA context, NCCL, libraries, other processes on the card"),
}
# nvidia-smi counts memory torch cannot use: 16384 MiB of a T4 without ECC (NVIDIA's data sheet: 16 GB) are 1.10 of the
# catalog's 14.56 GiB, the widest such gap. More than this is not that card.
BEYOND_TORCH = 1.15
COMPARE = "compare an estimate's allocated peak with max_memory_allocated (the peak), not with memory_allocated (now)"


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """One share of the largest meter, in bytes."""

    name: str
    bytes: int
    meaning: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Explained:
    """The largest meter in parts that add up to it, and what is to be said about them."""

    total: str
    """Name of the largest meter."""
    parts: tuple[Part, ...]
    notes: tuple[str, ...]


def explain(
    *,
    allocated: int | None = None,
    active: int | None = None,
    reserved: int | None = None,
    device: int | None = None,
    gpu: Gpu | None = None,
) -> Explained:
    """Take readings apart; bytes, None where a meter was not read. Raises InputError when they cannot be true together.

    >>> gib = 2**30
    >>> found = explain(allocated=10 * gib, reserved=12 * gib, device=13 * gib)
    >>> {part.name: part.bytes // gib for part in found.parts}
    {'tensors': 10, 'cache': 2, 'outside torch': 1}
    """
    read = {"allocated": allocated, "active": active, "reserved": reserved, "device": device}
    known = {name: value for name, value in read.items() if value is not None}
    if len(known) < 2:
        raise InputError("give at least two of --allocated, --active, --reserved and --device")
    _check(known, gpu)
    names = list(known)
    first = names[0]
    parts = [_first(first, known[first])]
    for inner, outer in zip(names, names[1:], strict=False):
        name, meaning = _PARTS[inner, outer]
        parts.append(Part(name=name, bytes=known[outer] - known[inner], meaning=meaning))
    return Explained(total=names[-1], parts=tuple(parts), notes=tuple(_notes(known, gpu)))


def _first(meter: str, size: int) -> Part:
    if meter == "allocated":
        return Part(name="tensors", bytes=size, meaning="blocks handed out to tensors, at their peak")
    if meter == "active":
        return Part(name="tensors and waiting", bytes=size, meaning="blocks of tensors and blocks waiting for a stream")
    return Part(name="torch", bytes=size, meaning="all segments torch took from the driver: tensors and cache")


def _check(known: dict[str, int], gpu: Gpu | None) -> None:
    names = list(known)
    for name, size in known.items():
        if 0 < size < 1000:
            raise InputError(f"{name} {size} B is less than any allocation; write its unit, such as {size}GiB")
    for inner, outer in zip(names, names[1:], strict=False):
        if known[outer] < known[inner]:
            raise InputError(
                f"{outer} {format_both(known[outer])} is less than {inner} {format_both(known[inner])}, which it "
                f"contains; read {COUNTERS[inner]} and {COUNTERS[outer]} of the same GPU in the same run, at its peak"
            )
    if gpu is not None and "reserved" in known and known["reserved"] > gpu.usable_bytes:
        raise InputError(
            f"reserved {format_both(known['reserved'])} is more than torch can use of {gpu.name}, "
            f"{format_both(gpu.usable_bytes)}; is it another card?"
        )
    if gpu is not None and "device" in known and known["device"] > BEYOND_TORCH * gpu.usable_bytes:
        raise InputError(
            f"device {format_both(known['device'])} is more than there is on {gpu.name}, of which torch can use "
            f"{format_both(gpu.usable_bytes)}; is it another card, or the sum of several?"
        )


def _notes(known: dict[str, int], gpu: Gpu | None) -> list[str]:
    notes = [COMPARE + (" nor with nvidia-smi" if "device" in known else "")]
    allocated, active, reserved = known.get("allocated"), known.get("active"), known.get("reserved")
    if allocated and active and active > 1.1 * allocated:
        notes.append(
            f"active is {active / allocated:.2f} times allocated: buffers of collectives wait for their stream; "
            "TORCH_NCCL_AVOID_RECORD_STREAMS=1 frees them at once"
        )
    most = RESERVED_OVER_ALLOCATED[True]
    if allocated is not None and reserved is not None and reserved > most * (active or allocated) + SEGMENT:
        notes.append(
            f"reserved is {reserved / allocated:.2f} times allocated, more than the {most:.2f} seen in training: is "
            "allocated the peak, or memory_allocated() now? If the peak, try expandable_segments:True"
        )
    if reserved is None and "device" in known:
        notes.append(
            f"read {COUNTERS['reserved']} as well: it parts the cache from what is not torch's; {_ranges(gpu)}"
        )
    if reserved is not None and "device" in known:
        notes.append(_outside(known["device"] - reserved, gpu))
    return notes


def _context_and_nccl(gpu: Gpu | None) -> tuple[Bounds, Bounds]:
    """Of one card, or the widest of the catalog."""
    cards = [gpu] if gpu else list(GPUS.values())
    return (
        Bounds(min(card.context.low for card in cards), max(card.context.high for card in cards)),
        Bounds(min(card.nccl.low for card in cards), max(card.nccl.high for card in cards)),
    )


def _ranges(gpu: Gpu | None) -> str:
    context, nccl = _context_and_nccl(gpu)
    where = gpu.name if gpu else "the cards known"
    return f"a CUDA context takes {_between(context)}, an NCCL communicator {_between(nccl)} on {where}"


def _outside(size: int, gpu: Gpu | None) -> str:
    """What the bytes outside torch can be."""
    context, nccl = _context_and_nccl(gpu)
    ranges = _ranges(gpu)
    if size < context.low:
        return f"outside torch is less than one context: device was read when torch held less than its peak; {ranges}"
    if size <= context.high:
        return f"outside torch is what a CUDA context takes; {ranges}"
    if size <= context.high + nccl.high:
        return (
            "outside torch is what a CUDA context and one NCCL communicator take; without NCCL it is other libraries "
            f"or processes, or a CUDA before 11.7, whose contexts took up to 1 GiB; {ranges}"
        )
    return (
        "outside torch is more than a CUDA context and one NCCL communicator take: more communicators, "
        f"other libraries, or other processes on the card; {ranges}"
    )


def _between(bounds: Bounds) -> str:
    return f"{bounds.low / 2**30:.2f} to {bounds.high / 2**30:.2f} GiB"
