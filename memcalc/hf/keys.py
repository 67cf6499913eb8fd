"""What a key of a config.json may hold, what its absence means, and what null means; each class of transformers has its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from memcalc.errors import FileError, shorten

__all__ = [
    "NEEDED", "TRANSFORMERS", "Derived", "Key", "Values", "chance", "count", "flag", "number", "read_keys", "share", "text",
    "wholes",
]  # fmt: skip

TRANSFORMERS = "5.24"
"""The version whose configuration classes the defaults are of."""

_RANGES: Mapping[str, tuple[str, Callable[[float], bool]]] = {
    "share": ("above 0 and up to 1", lambda value: 0 < value <= 1),
    "number": ("above 0", lambda value: value > 0),
    "chance": ("from 0 to below 1", lambda value: 0 <= value < 1),
}

Values = Mapping[str, Any]
"""What was read, by the names that a row gives its keys."""


class _Needed:
    """Stands where a class has no default that means anything, or makes nothing of null."""


NEEDED = _Needed()


@dataclass(frozen=True, kw_only=True, slots=True)
class Derived:
    """A number that follows from others: how it is said, and how it is made of what was read before it."""

    said: str
    of: Callable[[Values], Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Key:
    """One number or word of a config, under the names it may have; a dotted name stands inside an object."""

    names: tuple[str, ...]
    kind: str
    default: Any
    """What the configuration class takes when the key is absent; None is the same as null."""
    null: Any = NEEDED
    """What the class makes of null."""
    least: int = 1
    most: int = 10**9


def count(names: str, default: Any = NEEDED, null: Any = NEEDED, *, least: int = 1, most: int = 10**9) -> Key:
    """A whole number; ``names`` are separated by blanks, the class's own first."""
    return Key(names=tuple(names.split()), kind="count", default=default, null=null, least=least, most=most)


def flag(names: str, default: bool, null: Any = NEEDED) -> Key:
    return Key(names=tuple(names.split()), kind="flag", default=default, null=null)


def share(names: str, default: Any, null: Any = NEEDED) -> Key:
    """A number above 0 and up to 1."""
    return Key(names=tuple(names.split()), kind="share", default=default, null=null)


def number(names: str, default: Any, null: Any = NEEDED) -> Key:
    """A number above 0."""
    return Key(names=tuple(names.split()), kind="number", default=default, null=null)


def chance(names: str, default: float, null: Any = NEEDED) -> Key:
    """A number from 0 to below 1."""
    return Key(names=tuple(names.split()), kind="chance", default=default, null=null)


def text(names: str, default: Any, null: Any = NEEDED) -> Key:
    return Key(names=tuple(names.split()), kind="text", default=default, null=null)


def wholes(names: str, default: Any, null: Any = NEEDED) -> Key:
    """A list of whole numbers from 0 on."""
    return Key(names=tuple(names.split()), kind="wholes", default=default, null=null)


def read_keys(
    keys: Mapping[str, Key], config: Mapping[str, Any], source: str, owner: str
) -> tuple[dict[str, Any], list[str]]:
    """The values of a config by the row's names, and notes on what was absent or null.

    ``derived`` in the values are the names of those that follow from others. ``owner`` is the configuration class, for messages. Raises FileError that names the key.

    >>> keys = {"heads": count("num_attention_heads", 32), "kv_heads": count("num_key_value_heads", None, Derived(
    ...     said="num_attention_heads", of=lambda values: values["heads"]))}
    >>> read_keys(keys, {"num_attention_heads": 8}, "config.json", "LlamaConfig")
    ({'heads': 8, 'kv_heads': 8, 'derived': ('kv_heads',)}, ['not in the file, so as LlamaConfig of transformers 5.24 has it: num_key_value_heads 8 (num_attention_heads)'])
    """
    values: dict[str, Any] = {}
    absent: list[str] = []
    nulls: list[str] = []
    derived: list[str] = []
    for name, key in keys.items():
        found = _found(key, config, source)
        spelled, value = found or (key.names[0], key.default)
        if found is None and value is not None:
            if isinstance(value, _Needed):
                raise FileError(
                    f"{source}: {spelled} is missing, and {owner} has no default that could be taken for it"
                )
            values[name], said = _derived(value, values)
            derived += [name] * isinstance(value, Derived)
            absent.append(f"{spelled} {said}")
        elif value is None:
            if isinstance(key.null, _Needed):
                raise FileError(f"{source}: {spelled} is null, which {owner} cannot make a number of; write the number")
            values[name], said = _derived(key.null, values)
            derived += [name] * isinstance(key.null, Derived)
            (nulls if found else absent).append(f"{spelled} {said}")
        else:
            values[name] = _checked(value, key, f"{source}: {spelled}")
    values["derived"] = tuple(derived)
    where = f"so as {owner} of transformers {TRANSFORMERS} has it"
    notes = [f"not in the file, {where}: {', '.join(absent)}"] if absent else []
    return values, notes + ([f"null in the file, {where}: {', '.join(nulls)}"] if nulls else [])


def _found(key: Key, config: Mapping[str, Any], source: str) -> tuple[str, Any] | None:
    """The first of the key's names that the file has, with its value; all that it has must agree."""
    there = [(name, value) for name in key.names for value in _at(config, name.split("."))]
    for name, value in there[1:]:
        if value != there[0][1] or type(value) is not type(there[0][1]):
            first = f"{there[0][0]} {shorten(there[0][1])}"
            raise FileError(
                f"{source}: {first} and {name} {shorten(value)} are the same key, and contradict each other"
            )
    return there[0] if there else None


def _at(config: Any, path: Sequence[str]) -> list[Any]:
    """The value at a path of keys, or nothing."""
    for part in path:
        if not isinstance(config, dict) or part not in config:
            return []
        config = config[part]
    return [config]


def _derived(value: Any, values: Values) -> tuple[Any, str]:
    if not isinstance(value, Derived):
        return value, _said(value)
    made = value.of(values)
    return made, f"{_said(made)} ({value.said})"


def _said(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return "none" if value is None else "empty" if value == () else str(value)


def _checked(value: Any, key: Key, where: str) -> Any:
    if key.kind == "flag":
        if not isinstance(value, bool):
            raise FileError(f"{where} is {shorten(value)}, which is not true or false")
    elif key.kind == "text":
        if not isinstance(value, str):
            raise FileError(f"{where} is {shorten(value)}, which is not text")
    elif key.kind in _RANGES:
        said, within = _RANGES[key.kind]
        if isinstance(value, bool) or not isinstance(value, int | float) or not within(value):
            raise FileError(f"{where} is {shorten(value)}, which is not a number {said}")
    elif key.kind == "wholes":
        if not isinstance(value, list) or not all(type(item) is int and item >= 0 for item in value):
            raise FileError(f"{where} is {shorten(value)}, which is not a list of whole numbers from 0 on")
        return tuple(value)
    else:
        if type(value) is not int:
            raise FileError(f"{where} is {shorten(value)}, which is not a whole number")
        if not key.least <= value <= key.most:
            limit = f"at least {key.least}" if value < key.least else f"at most {key.most}"
            raise FileError(f"{where} {shorten(value)} must be {limit}")
    return value
