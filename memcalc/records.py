"""Frozen dataclasses from untrusted values: types are checked once, and every refusal names the field."""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from functools import cache
from typing import Any

from memcalc.errors import FileError, InputError, PlanError, UnknownNameError, shorten

__all__ = ["build", "check_types"]

_LARGEST = 10**18
_BOUNDED = (int, float)
"""Types of which not every value will do."""
_NAMES = {int: "a whole number", float: "a finite number", str: "text", bool: "true or false"}


def check_types(record: Any) -> None:
    """Every field has the type it is annotated with; True is no number. Raises PlanError."""
    for name, kind in _hints(type(record)).items():  # type: ignore[arg-type]  # mypy: no class is hashable
        value = getattr(record, name)
        if type(value) is kind and kind not in _BOUNDED:  # nearly all, of every plan of a search
            continue
        if not _is_a(value, kind):
            raise PlanError(f"{name.replace('_', ' ')} is {_refusal(value, kind)}")


def build(cls: type, fields: Any, source: str) -> Any:
    """``cls(**fields)``, with unknown keys, missing keys and wrong types refused by name.

    Raises FileError, and PlanError where the values make no sense together; both name the source.
    """
    if not isinstance(fields, dict):
        raise FileError(f"{source}: expected an object, found {shorten(fields)}")
    known = {field.name: field for field in dataclasses.fields(cls)}
    for key in fields:
        if key not in known:
            raise FileError(f"{source}: {UnknownNameError('key', key, known)}")
    # JSON has lists where a frozen record has tuples.
    tuples = {name for name, kind in _hints(cls).items() if typing.get_origin(kind) is tuple}
    fields = {
        key: tuple(value) if key in tuples and isinstance(value, list) else value for key, value in fields.items()
    }
    for name in tuples & set(fields):
        item = typing.get_args(_hints(cls)[name])[0]
        if dataclasses.is_dataclass(item) and isinstance(fields[name], tuple):
            fields[name] = tuple(
                each if isinstance(each, item) else build(item, each, f"{source}: {name} {i}")  # type: ignore[arg-type]
                for i, each in enumerate(fields[name])
            )
    for name, kind in _hints(cls).items():
        inner = _record(kind)
        if name in fields and inner and not _is_a(fields[name], kind):
            fields[name] = build(inner, fields[name], f"{source}: {name}")
        if name in fields and not _is_a(fields[name], kind):
            raise FileError(f"{source}: {name} is {_refusal(fields[name], kind)}")
    try:
        return cls(**fields)
    except TypeError as error:
        raise FileError(f"{source}: {str(error).split('__init__() ')[-1]}") from None
    except InputError as error:
        raise PlanError(f"{source}: {error}") from None


@cache
def _hints(cls: type) -> dict[str, Any]:
    return typing.get_type_hints(cls)


def _record(kind: Any) -> Any:
    """The dataclass that a field holds, or may hold beside None; None where there is none."""
    return next((part for part in (kind, *typing.get_args(kind)) if dataclasses.is_dataclass(part)), None)


@cache
def _parts(kind: Any) -> tuple[Any, tuple[Any, ...]]:
    """What a type is of, and what stands in its brackets: asked for every field of every plan of a search."""
    return typing.get_origin(kind) or kind, typing.get_args(kind)


def _is_a(value: Any, kind: Any) -> bool:
    base, parts = _parts(kind)
    if base in (typing.Union, types.UnionType):
        return any(_is_a(value, part) for part in parts)
    if base is dict:
        return isinstance(value, dict) and all(_is_a(k, parts[0]) and _is_a(v, parts[1]) for k, v in value.items())
    if base in (list, tuple):
        return isinstance(value, base) and all(_is_a(item, parts[0]) for item in value)
    if base is float:
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if base is int:
        return isinstance(value, int) and not isinstance(value, bool) and abs(value) <= _LARGEST
    return isinstance(value, base)


def _refusal(value: Any, kind: Any) -> str:
    if kind is int and isinstance(value, int) and not isinstance(value, bool):
        return f"{shorten(value)}, which is more than 1e18"
    if typing.get_origin(kind) is tuple:
        item = typing.get_args(kind)[0]
        return f"{shorten(value)}, which is not a list, each of it {_NAMES.get(item, item.__name__)}"
    name = _NAMES.get(kind) or getattr(kind, "__name__", str(kind)).replace("|", "or")
    return f"{shorten(value)}, which is not {name}"
