"""Frozen and quantised weights, and the adapters trained in their place."""

from __future__ import annotations

from dataclasses import dataclass

from memcalc.groups import Group

__all__ = ["Adapter"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Adapter(Group):
    """Frozen and quantised weights, and the adapters trained in their place."""
