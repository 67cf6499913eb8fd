"""Untrusted values become records or are refused by name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from memcalc.errors import FileError, PlanError
from memcalc.records import build, check_types


@dataclass(frozen=True, kw_only=True)
class Crate:
    count: int
    weight: float = 1.0
    label: str | None = None
    sizes: tuple[int, ...] = ()
    parts: dict[str, int] | None = None


@pytest.mark.parametrize("fields", [{"count": 1}, {"count": 0, "weight": 2, "label": "x", "parts": {"a": 1}}])
def test_sound_values_are_taken(fields: dict[str, Any]) -> None:
    record = build(Crate, fields, "crate")
    check_types(record)
    assert record == Crate(**fields)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"count": True}, "crate: count is True, which is not a whole number"),
        ({"count": 1.5}, "crate: count is 1.5, which is not a whole number"),
        ({"count": 10**40}, "which is more than 1e18"),
        ({"count": 1, "weight": float("inf")}, "which is not a finite number"),
        ({"count": 1, "label": 3}, "label is 3, which is not str or None"),
        ({"count": 1, "sizes": (1, "b")}, "sizes is"),
        ({"count": 1, "parts": {"a": "b"}}, "parts is"),
        ({"count": 1, "wieght": 2}, "did you mean 'weight'"),
        ({}, "count"),
        ([], r"expected an object, found \[\]"),
    ],
)
def test_others_are_refused_by_name(fields: Any, message: str) -> None:
    with pytest.raises(FileError, match=message):
        build(Crate, fields, "crate")


def test_a_record_made_in_code_is_held_to_the_same_types() -> None:
    with pytest.raises(PlanError, match="weight is nan, which is not a finite number"):
        check_types(Crate(count=1, weight=float("nan")))
