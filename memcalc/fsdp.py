"""How FullyShardedDataParallel is set up where that changes what it holds."""

from __future__ import annotations

from dataclasses import dataclass

from memcalc.groups import Group

__all__ = ["Fsdp"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Fsdp(Group):
    """How FullyShardedDataParallel is set up where that changes what it holds."""
