"""How DeepSpeed's ZeRO is set up where that changes what it holds."""

from __future__ import annotations

from dataclasses import dataclass

from memcalc.groups import Group

__all__ = ["DeepSpeed"]


@dataclass(frozen=True, kw_only=True, slots=True)
class DeepSpeed(Group):
    """How DeepSpeed's ZeRO is set up where that changes what it holds."""
