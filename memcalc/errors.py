"""Every error memcalc raises on purpose.

    MemcalcError
    ├── InputError          a value the user gave cannot be used
    │   ├── UnknownNameError    a name that is in no catalog (carries the nearest one)
    │   └── PlanError           values that are fine alone but not together
    ├── FileError           a file cannot be read, written or understood
    └── RunError            a training run was started and failed

The command line shows one as a single line and exits with its ``exit_code``; anything else that
escapes is a bug in memcalc.
"""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["FileError", "InputError", "MemcalcError", "PlanError", "RunError", "UnknownNameError"]


class MemcalcError(Exception):
    """Base of all errors raised on purpose; its text is one line written for the user."""

    exit_code = 2


# So many names are listed whole; of more, so many of the closest.
_ALL_SHOWN, _CLOSE = 20, 8
# How alike, of 1, a name must be to be meant: what difflib takes itself (at 0.5 "deepseek-v3" is "resnet-34"); of a
# name of two or three letters one may be wrong.
_NEAR, _NEAR_SHORT, _SHORT = 0.6, 0.5, 3
LONGEST = 100
"""Characters of a mistaken name that are compared with those known: none is longer, and to compare takes their square."""


class InputError(MemcalcError):
    """A value the user gave cannot be used."""


class UnknownNameError(InputError):
    """A name that is in no catalog.

    >>> str(UnknownNameError("GPU", "a100-80", ["a100-80gb", "t4"]))
    "unknown GPU 'a100-80'; did you mean 'a100-80gb'? known: a100-80gb, t4"

    Names are in the alphabet's order; of more than twenty the closest eight are shown. ``others`` ends the line: what
    is taken besides.
    """

    def __init__(self, kind: str, name: str, known: Iterable[str], others: str = "") -> None:
        self.kind, self.name, self.known = kind, name, sorted(known)
        from difflib import get_close_matches  # only a mistake needs it, and every start would pay for it

        spelled = {known.lower(): known for known in self.known}
        written = name[:LONGEST].lower()
        near = get_close_matches(written, spelled, n=1, cutoff=_NEAR_SHORT if len(written) <= _SHORT else _NEAR)
        self.nearest = spelled[near[0]] if near else None
        hint = f"; did you mean {self.nearest!r}?" if self.nearest else ";"
        shown = self.known
        if len(shown) > _ALL_SHOWN:
            shown = sorted(get_close_matches(written, shown, n=_CLOSE, cutoff=0.0))
        more = f" and {len(self.known) - len(shown)} more" if len(shown) < len(self.known) else ""
        super().__init__(f"unknown {kind} {shorten(name)}{hint} known: {', '.join(shown) or 'none'}{more}{others}")


class PlanError(InputError):
    """Values that are fine alone but cannot stand together in one plan."""


class FileError(MemcalcError):
    """A file cannot be read, written or understood."""


class RunError(MemcalcError):
    """A training run was started and failed; the workers' logs hold their tracebacks."""

    exit_code = 1


def shorten(value: object, limit: int = 60) -> str:
    """``repr(value)`` on one line and of bounded length, for error messages.

    >>> shorten("a" * 100, limit=12)
    "'aaaaaaaa..."
    """
    text = repr(value)
    return text if len(text) <= limit else text[: limit - 3] + "..."
