"""How the words after an option are read: names, counts, sizes, shapes. Each refuses in one line."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from math import ceil, isfinite, prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from memcalc.catalog import Catalog
from memcalc.errors import InputError, UnknownNameError, shorten
from memcalc.hf.paths import config_path
from memcalc.units import parse_bytes, parse_count

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

__all__ = [
    "Bytes", "Checkpointing", "Count", "File", "Free", "ModelName", "Name", "Names", "Number", "Shape", "Share", "Whole",
]  # fmt: skip

_DIGITS = 32
_MOST = 10**12  # of samples, tokens, ranks ...: past it a number is a slip


class Kind(click.ParamType):  # type: ignore[type-arg]
    """Base: ``read(text, option)`` gives the value or raises an error of memcalc."""

    name = "text"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not isinstance(value, str):
            return value
        option = param.opts[0] if param is not None and param.opts else "value"
        return self.read(value, option if option.startswith("-") else option.upper())

    def read(self, text: str, option: str) -> Any:
        raise NotImplementedError

    def words(self) -> Iterable[str]:
        """What a shell may complete it to, where that is a list of words."""
        return ()

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        """Words that begin alike; where there is none and it may be a path, the shell's own files."""
        from click.shell_completion import CompletionItem  # only a shell's tab key needs it

        found = [CompletionItem(word) for word in self.words() if word.startswith(incomplete.lower())]
        return found or [CompletionItem(incomplete, type="file")] * self.path

    path = False
    """It may be the path of a file."""


class Name(Kind):
    """A name from a catalog, or from a short list of choices."""

    def __init__(self, what: str, known: Collection[str]) -> None:
        self.what, self.known = what, known

    def read(self, text: str, option: str) -> str:
        if isinstance(self.known, Catalog):
            return str(self.known[text].name)
        if text.lower() not in self.known:
            raise UnknownNameError(self.what, text, self.known)
        return text.lower()

    def words(self) -> Iterable[str]:
        return self.known


class ModelName(Name):
    """A name from the catalog of models, or the path of a config.json or of a folder that has one."""

    path = True

    def read(self, text: str, option: str) -> str | Path:  # type: ignore[override]
        path = None if text in self.known else config_path(text)
        return super().read(text, option) if path is None else path


class Whole(Kind):
    """A whole number from ``least`` to ``most``."""

    def __init__(self, least: int = 1, most: int = _MOST) -> None:
        self.least, self.most = least, most

    def read(self, text: str, option: str) -> int:
        word = text.strip()
        if not re.fullmatch(r"[+-]?[0-9]+(_[0-9]+)*", word, re.ASCII):
            raise InputError(f"{option} {shorten(text)} is not a whole number")
        value = int(
            word.replace("_", "")[:_DIGITS]
        )  # so many are too many in any case, and thousands Python does not read
        if not self.least <= value <= self.most:
            limit = f"at least {self.least}" if value < self.least else f"at most {self.most:,}"
            raise InputError(f"{option} {value if len(word) < _DIGITS else shorten(word)} must be {limit}")
        return value


class Names(Kind):
    """Names with commas between them; the catalog they are of looks them up."""

    def read(self, text: str, option: str) -> tuple[str, ...]:
        words = tuple(word.strip().lower() for word in text.split(",") if word.strip())
        if not words:
            raise InputError(f"{option} {shorten(text)} names nothing; write it like ddp,zero-1")
        return words


@dataclass(frozen=True, slots=True)
class Free:
    """Memory to keep free: a part of what there is, or bytes."""

    share: float = 0.0
    bytes: int = 0

    def of(self, capacity: int) -> int:
        """Bytes of a capacity; a part is rounded up."""
        return self.bytes or ceil(self.share * capacity)


class Share(Kind):
    """A part such as 10%, or a size such as 4GiB."""

    def read(self, text: str, option: str) -> Free:
        word = text.strip()
        if re.fullmatch(r"[+-]?0+(\.0*)?\s*([kmgtp]?i?b)?", word, re.IGNORECASE | re.ASCII):
            return Free()
        if part := re.fullmatch(r"([+-]?[0-9]{1,9}(?:\.[0-9]{0,9})?(?:e[+-]?[0-9]{1,2})?)\s*%", word, re.IGNORECASE):
            if not 0 <= float(part[1]) < 100:
                raise InputError(f"{option} {shorten(text)} must be a part of 0% or more and below 100%, or a size")
            return Free(share=abs(float(part[1])) / 100)
        try:
            return Free(bytes=parse_bytes(word, option))
        except InputError:
            raise InputError(
                f"{option} {shorten(text)} is no memory to keep free; write a part, like 10%, or a size, like 4GiB"
            ) from None


class Number(click.types.FloatParamType):
    """A number that is one: not nan, and not infinite."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        found = super().convert(value, param, ctx)
        if not isfinite(found):
            raise InputError(f"{param.opts[0] if param is not None else 'value'} {found} is not a finite number")
        return found


class Count(Kind):
    """A count such as 1e9, 7b or 124M."""

    def read(self, text: str, option: str) -> int:
        return parse_count(text, option)


class Bytes(Kind):
    """A size such as 64KB or 80GiB."""

    def read(self, text: str, option: str) -> int:
        return parse_bytes(text, option)


class Shape(Kind):
    """A shape: ``224x224x3``."""

    def read(self, text: str, option: str) -> tuple[int, ...]:
        words = re.split("[x×*,]", text.strip().lower())
        if not all(re.fullmatch(r"[0-9]{1,30}", word.strip()) for word in words):
            raise InputError(f"{option} {shorten(text)} cannot be read; write it like 224x224x3 or 1024")
        parts = [Whole().read(word, option) for word in words]
        if prod(parts) > _MOST:
            raise InputError(f"{option} {shorten(text)} has more than 10**12 elements")
        return tuple(parts)


class Checkpointing(Kind):
    """``none``, ``full`` or ``every-N``: blocks per activation checkpoint, 0 for none."""

    def read(self, text: str, option: str) -> int:
        word = text.strip().lower()
        if word in ("none", "full"):
            return int(word == "full")
        if re.fullmatch(r"every-[1-9][0-9]{0,9}", word):
            return int(word.removeprefix("every-"))
        if word.startswith("every"):
            raise InputError(f"{option} {shorten(text)} cannot be read; write it like every-2")
        if word == "selective":
            raise InputError(f"{option} selective is said by two: {option} full --checkpoint-policy matrix-products")
        raise UnknownNameError("checkpointing", text, ("none", "full", "every-N"))

    def words(self) -> Iterable[str]:
        return ("none", "full", "every-2")


class File(Kind):
    """A path; whether it can be read or written is found out by doing it."""

    path = True

    def read(self, text: str, option: str) -> Path:
        if not text or "\0" in text:
            raise InputError(f"{option} {shorten(text)} is not a path")
        return Path(text)
