"""What a snapshot's numbers mean: what is alive at the peak and of what, and what reserved memory is used for."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np

from memcalc.allocator_history import History, Replayed, replay_history
from memcalc.allocator_options import AllocatorOptions
from memcalc.errors import InputError
from memcalc.snapshot import ACTIVE, Segment, Snapshot
from memcalc.snapshot_timeline import Recorded
from memcalc.timeline import CATEGORIES, Peak
from memcalc.units import format_both

__all__ = ["Group", "Pool", "Summary", "Torn", "at_peak", "pools", "summarise", "torn"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """Blocks of one size from one place, alive at the peak; bytes."""

    bytes: int
    """Of all of them."""
    count: int
    each: int
    category: str
    place: str
    """The innermost line of the user's own in the stack that asked for it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Pool:
    """Segments of one pool and stream; bytes."""

    name: str
    stream: int
    segments: int
    reserved: int
    allocated: int
    """In blocks that tensors use."""
    waiting: int
    """In blocks that were freed while another stream may still use them."""
    free: int
    """In segments of which nothing is in use: ``torch.cuda.empty_cache()`` gives them back."""
    split: int
    """Free between blocks in use (``inactive_split_bytes``): usable for requests that fit, never given back."""
    largest_free: int
    """The largest request that is served without a new segment, about."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Torn:
    """A segment with free memory between blocks in use; bytes."""

    address: int
    pool: str
    stream: int
    size: int
    held: int
    """In use or waiting: what keeps the segment from being given back."""
    blocks: int
    """How many blocks hold it."""
    largest_free: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Summary:
    """One device; bytes."""

    device: int
    allocated: int
    """Blocks in use when the snapshot was made."""
    requested: int
    """What was asked for them; the rest is rounding."""
    waiting: int
    reserved: int
    peak: Peak
    """The fullest point since the history began."""
    peak_blocks: int | None
    """The same in whole blocks, which keep what is too small to split off: ``torch.cuda.max_memory_allocated``. Known where
    a whole history was replayed to the byte."""
    peak_reserved: int
    by_category: dict[str, int]
    """At the peak, ``unknown`` where no stack tells."""
    largest: tuple[Group, ...]
    pools: tuple[Pool, ...]
    torn: tuple[Torn, ...]
    """The segments with the most free memory that cannot be given back."""
    notes: tuple[str, ...]

    @property
    def split(self) -> int:
        """Fragmented: free, but between blocks in use."""
        return sum(pool.split for pool in self.pools)


def summarise(snapshot: Snapshot, history: Recorded, count: int = 10) -> Summary:
    """The whole of it, with ``count`` groups of blocks at the peak, and as many torn segments."""
    blocks = [block for segment in snapshot.segments for block in segment.blocks]
    used = [block for block in blocks if block.state == ACTIVE]
    peak = history.timeline.peak()
    known = {name: size for name, size in peak.by_category.items() if size}
    unknown = peak.bytes - sum(known.values())
    replayed = _replay(snapshot, history)
    same = replayed is not None and replayed.differs_at is None and replayed.peak_reserved == history.reserved[1]
    return Summary(
        device=snapshot.device,
        allocated=sum(block.size for block in used),
        requested=sum(block.requested for block in used),
        waiting=sum(block.size for block in blocks if block.state == "waiting"),
        reserved=snapshot.reserved,
        peak=peak,
        peak_blocks=replayed.peak_allocated if replayed is not None and same else None,
        peak_reserved=history.reserved[1],
        by_category={**known, **({"unknown": unknown} if unknown else {})},
        largest=tuple(at_peak(history)[:count]),
        pools=tuple(pools(snapshot.segments)),
        torn=tuple(torn(snapshot.segments)[:count]),
        notes=tuple(_notes(snapshot, history, replayed)),
    )


def at_peak(history: Recorded) -> list[Group]:
    """What is alive at the first of the fullest points, equal blocks of one place together, largest first."""
    step = history.timeline
    live = step.live()
    if not len(live):
        return []
    upto = int(np.argmax(live)) + 1
    balance = np.bincount(step.ident[:upto], weights=np.sign(step.delta[:upto]), minlength=len(step.names))
    alive = np.flatnonzero(balance > 0)
    size, category = np.zeros(len(step.names), np.int64), np.zeros(len(step.names), np.int64)
    births = step.delta > 0
    size[step.ident[births]], category[step.ident[births]] = step.delta[births], step.category[births]
    names = (*CATEGORIES, "unknown")
    groups = Counter((int(size[i]), names[category[i]], step.names[i]) for i in alive)
    found = [
        Group(bytes=each * count, count=count, each=each, category=kind, place=place)
        for (each, kind, place), count in groups.items()
    ]
    return sorted(found, key=lambda group: (-group.bytes, group.place, group.each))


def pools(segments: tuple[Segment, ...]) -> list[Pool]:
    """Reserved memory by pool and stream, largest first."""
    groups: dict[tuple[str, int], list[Segment]] = {}
    for segment in segments:
        groups.setdefault((_pool(segment), segment.stream), []).append(segment)
    found = []
    for (name, stream), members in groups.items():
        idle = [segment for segment in members if segment.held("inactive") == segment.size]
        inactive = [block.size for segment in members for block in segment.blocks if block.state == "inactive"]
        free = sum(segment.size for segment in idle)
        found.append(
            Pool(
                name=name,
                stream=stream,
                segments=len(members),
                reserved=sum(segment.size for segment in members),
                allocated=sum(segment.held(ACTIVE) for segment in members),
                waiting=sum(segment.held("waiting") for segment in members),
                free=free,
                split=sum(inactive) - free,
                largest_free=max(inactive, default=0),
            )
        )
    return sorted(found, key=lambda pool: (-pool.reserved, pool.name, pool.stream))


def torn(segments: tuple[Segment, ...]) -> list[Torn]:
    """Fragmented segments, the most free memory first."""
    found = []
    for segment in segments:
        inactive = [block.size for block in segment.blocks if block.state == "inactive"]
        if inactive and sum(inactive) < segment.size:
            found.append(
                Torn(
                    address=segment.address,
                    pool=_pool(segment),
                    stream=segment.stream,
                    size=segment.size,
                    held=segment.size - sum(inactive),
                    blocks=len(segment.blocks) - len(inactive),
                    largest_free=max(inactive),
                )
            )
    return sorted(found, key=lambda each: (each.held - each.size, each.address))


def _pool(segment: Segment) -> str:
    private = "" if segment.pool == (0, 0) else f", private {segment.pool[0]}:{segment.pool[1]}"
    return f"{segment.kind}{' expandable' if segment.expandable else ''}{private}"


def _notes(snapshot: Snapshot, history: Recorded, replayed: Replayed | None) -> list[str]:
    said = []
    others = [str(device) for device in snapshot.devices if device != snapshot.device]
    if others:
        said.append(f"the file also has device{'s' * (len(others) > 1)} {', '.join(others)}; choose with --device")
    for entry, allocated, reserved in history.refused[-1:]:  # the last one ended the run
        times = f", the last of {len(history.refused):,} times" * (len(history.refused) > 1)
        said.append(
            f"out of memory{times}: {format_both(entry.size)} asked for with {format_both(allocated)} allocated, "
            f"{format_both(reserved)} reserved and {format_both(entry.address)} free on the device"
        )
    if not snapshot.entries:
        return [*said, "no history was recorded: the peak is what was in use when the snapshot was made"]
    if history.before or history.reserved[0] > 0:
        said.append(
            f"the history ({len(snapshot.entries):,} entries) lacks the beginning: it was switched on late, or its ring of "
            f"max_entries has lost it; {history.before:,} blocks alive before it and {format_both(max(history.reserved[0], 0))} "
            "reserved before it follow from the segments, and an earlier peak is not known"
        )
    if history.missed or history.reserved[0] < 0:
        said.append(
            f"the history has gaps, as if recording had been switched off in between: {history.missed:,} blocks were freed unseen"
        )
    if not history.stacks:
        said.append("no stacks were recorded, so nothing tells categories and moments; record with context='all'")
    else:
        said.append(
            "categories follow from the stacks; what backward allocates is a gradient if it outlives backward, and a "
            "request without any Python stack is taken for autograd's thread"
        )
    if replayed is not None:
        same = replayed.differs_at is None and replayed.peak_reserved == history.reserved[1]
        what = "the recorded bytes at every request" if same else format_both(replayed.peak_reserved)
        said.append(
            f"replayed through memcalc's allocator, the history reserves {what}"
            + ("" if same else f", recorded are {format_both(history.reserved[1])}")
        )
    return said


def _replay(snapshot: Snapshot, history: Recorded) -> Replayed | None:
    """A whole history of torch's own pools, through memcalc's allocator: is it torch's?"""
    private = any(segment.pool != (0, 0) for segment in snapshot.segments)
    if private or history.before or history.missed or history.reserved[0] or not snapshot.entries:
        return None
    try:
        options = AllocatorOptions.parse(snapshot.settings)
        return replay_history(History(entries=snapshot.entries, options=options, source=snapshot.source))
    except InputError:
        return None
