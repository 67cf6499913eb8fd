"""Values of someone else's file, asked for by name and kind; each refusal is one line that names the file and the place."""

from __future__ import annotations

from typing import Any, NamedTuple

from memcalc.errors import FileError, shorten

__all__ = ["ADDRESS", "WHAT", "Fields", "Frame", "Frames", "Stacks", "a_list"]

_LARGEST = 2**42  # bytes of one block or segment: fifteen of today's largest cards; sums of all stay within 64 bits
ADDRESS = 2**64
WHAT = "a snapshot of torch.cuda.memory._dump_snapshot"


class Frame(NamedTuple):
    """One line of a stack, of Python or of C++."""

    file: str
    line: int
    function: str


Frames = tuple[Frame, ...]
"""A stack, the innermost call first, as torch writes it."""


class Stacks:
    """Stacks read once: torch writes one object for equal frames, and a pickle keeps that."""

    def __init__(self, source: str) -> None:
        self.source = source
        self._frames: dict[int, Frame] = {}
        self._lists: dict[int, Frames] = {}
        self._stacks: dict[Frames, Frames] = {}

    def read(self, data: Any, where: str) -> Frames:
        if not data:
            return ()
        known = self._lists.get(id(data))
        if known is None:
            frames = a_list(data, f"frames of {where}", self.source)
            stack = tuple(self._frame(frame, where) for frame in frames)
            # Equal stacks become one object, so that nobody has to compare or hash long ones again.
            known = self._lists[id(data)] = self._stacks.setdefault(stack, stack)
        return known

    def _frame(self, data: Any, where: str) -> Frame:
        known = self._frames.get(id(data))
        if known is None:
            fields = Fields(data, f"a frame of {where}", self.source)
            line = fields.whole("line", default=0, least=-ADDRESS, most=ADDRESS)
            known = self._frames[id(data)] = Frame(fields.text("filename"), line, fields.text("name"))
        return known


class Fields:
    """A dict of the file, whose values are asked for by name and kind."""

    def __init__(self, data: Any, where: str, source: str) -> None:
        if not isinstance(data, dict):
            raise FileError(f"{source}: {where} is {_said(data)}, not a dict")
        self.data, self.where, self.source = data, where, source

    def whole(self, key: str, default: int | None = None, least: int = 0, most: int = _LARGEST) -> int:
        value = self.data.get(key, default)
        if type(value) is not int or not least <= value < most:
            limit = f"2**{most.bit_length() - 1}"
            raise self.odd(key, f"a whole number from {'-' * (least < 0)}{limit if least < 0 else least} up to {limit}")
        return value

    def text(self, key: str) -> str:
        value = self.data.get(key)
        if not isinstance(value, str):
            raise self.odd(key, "text")
        return value

    def one_of(self, key: str, known: tuple[str, ...]) -> str:
        value = self.data.get(key)
        if not isinstance(value, str) or value not in known:
            raise self.odd(key, f"one of {', '.join(known)}")
        return value

    def odd(self, key: str, expected: str) -> FileError:
        found = f"is {_said(self.data[key])}" if key in self.data else "is missing"
        return FileError(f"{self.source}: {key} of {self.where} {found}; expected {expected}")


def a_list(value: Any, what: str, source: str) -> list[Any]:
    if not isinstance(value, list):
        raise FileError(f"{source} is not {WHAT}: {what} is {_said(value)}, not a list")
    return value


def _said(value: object) -> str:
    """A value from the file for a message; never what is in a container, which may contain itself."""
    return f"a {type(value).__name__}" if isinstance(value, dict | list | tuple) else shorten(value)
