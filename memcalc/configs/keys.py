"""The keys of a launch file: what each becomes, and how a file is held against the table of its format."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any

from memcalc.errors import LONGEST, FileError, shorten

__all__ = ["AUTO", "SAVES", "Checked", "Key", "Table", "check", "neutral", "plan", "refused", "training"]

AUTO = "auto"
"""The value that transformers and accelerate fill in when they start."""
_LARGEST = 10**18
_WORDS = {"true": True, "yes": True, "1": True, "on": True, "false": False, "no": False, "0": False, "off": False}


@dataclass(frozen=True, kw_only=True, slots=True)
class Key:
    """One key of a format."""

    role: str
    """``plan``, ``training``, ``neutral`` (no matter of memory, nor of memcalc's own runs) or ``refused``."""
    kind: str
    """``flag``, ``whole``, ``number``, ``text``, ``numbers``, ``block`` (keys of its own), ``any``, or the names it may have."""
    says: str = ""
    """The field of Plan or Training it becomes; of others the reason, in words."""
    least: int = 0
    auto: bool = False
    """``"auto"`` may stand here."""
    off: tuple[Any, ...] = ()
    """Values at which a refused key changes nothing."""
    ignored: bool = False
    """The framework itself reads it nowhere, which is worth a warning of its own."""


Table = Mapping[str, Key]
"""Keys by their path in the file, with dots between blocks."""


def plan(says: str, kind: str, *, least: int = 0, auto: bool = False) -> Key:
    """A key that becomes a field of the plan."""
    return Key(role="plan", kind=kind, says=says, least=least, auto=auto)


def training(says: str, kind: str, *, auto: bool = False) -> Key:
    """A key that says how memcalc's own runs train."""
    return Key(role="training", kind=kind, says=says, auto=auto)


SAVES = "says how checkpoints are written or read"
"""Of a key that matters to memory while a run saves, and to nothing else."""


def neutral(why: str, kind: str = "any", *, auto: bool = False, ignored: bool = False) -> Key:
    """A key that changes neither memory nor memcalc's own runs."""
    return Key(role="neutral", kind=kind, says=why, auto=auto, ignored=ignored)


def refused(why: str, *off: Any) -> Key:
    """A key that changes what memcalc cannot count, unless it has one of the values ``off``."""
    return Key(role="refused", kind="any", says=why, off=off)


@dataclass(frozen=True, kw_only=True, slots=True)
class Checked:
    """The values of a file by path, all of them of the right kind, and what must be said of the others."""

    values: dict[str, Any]
    notes: list[str] = field(default_factory=list)

    def get(self, path: str, default: Any = None) -> Any:
        return self.values.get(path, default)

    def on(self, block: str) -> bool:
        """A block of switches that says ``enabled``."""
        return self.values.get(f"{block}.enabled") is True


def check(tree: Any, table: Table, name: str) -> Checked:
    """Hold a parsed file against the table of its format. Raises FileError for the first key that cannot be used."""
    found = Checked(values={})
    idle: list[str] = []
    saved: list[str] = []
    for path, value in _walk(tree, table, name, found.notes, ""):
        key = table[path]
        if key.role == "refused":
            if value not in key.off or isinstance(value, bool) != any(isinstance(off, bool) for off in key.off):
                raise FileError(f"{name}: {path} {shorten(value)}: {key.says}")
            continue
        found.values[path] = _value(value, key, f"{name}: {path}")
        if key.ignored:
            found.notes.append(f"{name}: {path} {key.says}")
        elif key.role == "neutral":
            (saved if key.says == SAVES else idle).append(path)
    if saved:
        found.notes.append(f"{name}: {', '.join(saved)} {SAVES}, which is not counted")
    if idle:
        found.notes.append(f"{name}: no matter of memory, and not used by memcalc's own runs: {', '.join(idle)}")
    return found


def _walk(tree: Any, table: Table, name: str, notes: list[str], prefix: str) -> Iterator[tuple[str, Any]]:
    if not isinstance(tree, dict):
        where = prefix.removesuffix(".")
        raise FileError(f"{name}: {f'{where} is' if where else 'expected keys and values, found'} {shorten(tree)}"
                        f"{', which is not a block of keys' if where else ''}")  # fmt: skip
    for word, value in tree.items():
        if not isinstance(word, str):
            raise FileError(f"{name}: the key {shorten(word)} in {prefix or 'the file'} is not text; put it in quotes")
        path = prefix + word
        if path not in table:
            notes.append(_stranger(path, word, table, name, prefix))
        elif value is not None:
            if table[path].kind == "block":
                yield from _walk(value, table, name, notes, f"{path}.")
            else:
                yield path, value


def _stranger(path: str, word: str, table: Table, name: str, prefix: str) -> str:
    """A note on a key that belongs elsewhere; raises FileError for one that belongs nowhere."""
    homes = [known for known in table if known.rpartition(".")[2] == word]
    if homes:
        return f"{name}: {path} is ignored where it stands; it belongs to {' or '.join(homes)}"
    here = [known.removeprefix(prefix) for known in table if known.startswith(prefix)]
    word = word[:LONGEST]
    near = get_close_matches(word, [known for known in here if "." not in known], n=1, cutoff=0.6)
    near = near or get_close_matches(word, [known.rpartition(".")[2] for known in table], n=1, cutoff=0.6)
    hint = ""
    if near:
        full = prefix + near[0]
        hint = f"; did you mean {full if full in table else next(k for k in table if k.rpartition('.')[2] == near[0])}?"
    raise FileError(f"{name}: unknown key {shorten(path)}{hint}")


def _value(value: Any, key: Key, where: str) -> Any:
    """The value as its kind wants it. Raises FileError."""
    kind = key.kind
    if value == AUTO and key.auto:
        return AUTO
    if kind == "any":
        return value
    if kind == "flag":
        if isinstance(value, str) and value.lower() in _WORDS:
            return _WORDS[value.lower()]
        if not isinstance(value, bool):
            raise FileError(f"{where} {shorten(value)} is not true or false")
        return value
    if kind in ("whole", "number"):
        return _number(value, key, where)
    if kind == "numbers":
        if not isinstance(value, list) or not all(_is_number(item) for item in value):
            raise FileError(f"{where} {shorten(value)} is not a list of numbers")
        return value
    if kind == "text":
        if not isinstance(value, str) or not value or "\0" in value:
            raise FileError(f"{where} {shorten(value)} is not text")
        return value
    names = kind.split("|")
    word = str(value).lower() if isinstance(value, str | int) and not isinstance(value, bool) else None
    chosen = next((known for known in names if known.lower() == word), None)
    if chosen is None:
        raise FileError(f"{where} {shorten(value)} is none of: {', '.join(names)}")
    return chosen


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _number(value: Any, key: Key, where: str) -> Any:
    if not _is_number(value) or abs(value) > _LARGEST:
        unread = isinstance(value, str) and value.replace(".", "").replace("e", "").replace("-", "").isdigit()
        cure = "; it is text: write it without quotes, and in YAML with a dot, like 1.0e-4" if unread else ""
        raise FileError(f"{where} {shorten(value)} is not a number{cure}")
    if key.kind == "whole":
        if value != int(value):
            raise FileError(f"{where} {shorten(value)} is not a whole number")
        value = int(value)
    if value < key.least:
        raise FileError(f"{where} {shorten(value)} must be at least {key.least}")
    return value
