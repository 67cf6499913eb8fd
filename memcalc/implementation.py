"""How the model's code is written where that changes what it keeps: norms, GELU, fused products, grouped heads."""

from __future__ import annotations

from dataclasses import dataclass

from memcalc.groups import Group

__all__ = ["Implementation"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Implementation(Group):
    """How the model's code is written where that changes what it keeps: norms, GELU, fused products, grouped heads."""
