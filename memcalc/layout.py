"""How ranks are arranged: tensor, sequence, context, pipeline and expert parallel degrees, and replicas."""

from __future__ import annotations

from dataclasses import dataclass

from memcalc.groups import Group

__all__ = ["Layout"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout(Group):
    """How ranks are arranged: tensor, sequence, context, pipeline and expert parallel degrees, and replicas."""
