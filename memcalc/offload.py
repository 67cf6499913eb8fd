"""What lives in the host's memory or on its disks instead of on the GPU."""

from __future__ import annotations

from dataclasses import dataclass

from memcalc.groups import Group

__all__ = ["Offload"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Offload(Group):
    """What lives in the host's memory or on its disks instead of on the GPU."""
