"""What tests of the caching allocator share: sizes, settings, and events in MiB."""

from __future__ import annotations

from memcalc.allocator_options import AllocatorOptions
from memcalc.replay import replay

__all__ = ["DEFAULT", "EXPANDABLE", "KIB", "MIB", "reserved_mib"]

MIB = 2**20
KIB = 2**10
DEFAULT = AllocatorOptions()
EXPANDABLE = AllocatorOptions(expandable_segments=True)


def reserved_mib(*events: tuple[int, int], options: AllocatorOptions = DEFAULT, capacity: int | None = None) -> float:
    """Peak of reserved, in MiB, for events in MiB."""
    scaled = [(ident, int(size * MIB)) for ident, size in events]
    return replay(scaled, options, capacity=None if capacity is None else capacity * MIB).peak_reserved / MIB
