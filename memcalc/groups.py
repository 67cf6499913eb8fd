"""Groups of a plan's fields: one frozen dataclass a subject, whose fields say their own command-line option."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from functools import cache
from typing import TYPE_CHECKING, Any

from memcalc.errors import PlanError, UnknownNameError
from memcalc.records import check_types

if TYPE_CHECKING:
    from memcalc.plan import Plan

__all__ = ["Group", "knob"]


class Group:
    """What all groups offer; a group of defaults changes nothing."""

    __slots__ = ()

    def __post_init__(self) -> None:
        check_types(self)
        for name, choices, least in _rules(type(self)):  # type: ignore[arg-type]  # mypy: no class is hashable
            value = getattr(self, name)
            if choices and value not in choices:
                raise UnknownNameError(name.replace("_", " "), value, choices)
            if type(value) is int and value < least:
                raise PlanError(f"{name.replace('_', ' ')} {value} must be at least {least}")

    def check(self, plan: Plan) -> None:
        """Raises PlanError when the fields clash with each other or with the rest of the plan."""

    def idle(self, plan: Plan) -> dict[str, str]:
        """Fields that change nothing about this plan, each with the reason in words that follow the option's name."""
        return {}

    def untrained(self, plan: Plan) -> str:
        """What ``trainers/`` cannot do of it, in words that follow "cannot train"; blank when it can."""
        return ""


@cache
def _rules(kind: type) -> tuple[tuple[str, Collection[str], int], ...]:
    """Name, choices and least number of each field of a group."""
    fields = dataclasses.fields(kind)
    return tuple((each.name, each.metadata["choices"], each.metadata["least"]) for each in fields)


def knob(
    default: Any, option: str, help: str, *, choices: Collection[str] = (), least: int = 0, unsaid: str = ""
) -> Any:
    """A field of a group: its default, its option on the command line, and the names or least number it may have.

    A boolean is a flag; where the default is True, the option says the opposite: ``--no-...``. ``unsaid`` is what the
    command line takes where the option is not given, in words, if that hangs on other options.

    >>> from dataclasses import dataclass, fields
    >>> @dataclass(frozen=True, kw_only=True, slots=True)
    ... class Speed(Group):
    ...     gears: int = knob(1, "--gears", "How many.")
    >>> Speed().gears, fields(Speed)[0].metadata["option"]
    (1, '--gears')
    """
    return dataclasses.field(
        default=default,
        metadata={"option": option, "help": help, "choices": choices, "least": least, "unsaid": unsaid},
    )
