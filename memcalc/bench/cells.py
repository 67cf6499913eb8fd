"""Cells of a table of published runs that hold a number: what one may be, and one clear line for what none can be."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

from memcalc.errors import FileError, shorten

__all__ = ["NUMBERS", "Number", "check_numbers", "number"]


class Number(NamedTuple):
    """What a column's numbers may be: from 0 (itself only where ``zero``) to below ``high``."""

    what: str
    whole: bool
    zero: bool
    high: float

    def holds(self, text: str) -> bool:
        """Whether a text is such a number, in plain ASCII digits."""
        if not (_WHOLE if self.whole else _DECIMAL).fullmatch(text):
            return False
        value = float(text)
        return value < self.high and (value > 0 or (self.zero and value == 0))

    def __str__(self) -> str:
        kind = "a whole number" if self.whole else "a number"
        return f"{kind}{self.what} {'from 0 on' if self.zero else 'above 0'} and below {self.high:g}, in plain digits"


_SHAPE = Number("", whole=True, zero=True, high=1e15)  # 0 where a model has none, such as heads of a perceptron
_COUNT = Number("", whole=True, zero=False, high=1e15)
_GIB = Number(" of GiB", whole=False, zero=False, high=1e6)

NUMBERS: Mapping[str, Number] = {
    **dict.fromkeys(("hidden", "layers", "heads", "kv_heads", "ffn", "vocab", "seq_len", "lora_rank"), _SHAPE),
    **dict.fromkeys(("n_params", "micro_batch_per_gpu", "grad_accum", "global_batch", "n_gpus", "gpus_per_node", "image"), _COUNT),
    **dict.fromkeys(("gpu_gib", "value_gib", "tried_gib", "allocated_gib", "reserved_gib", "capacity_gib"), _GIB),
    "value": Number("", whole=False, zero=False, high=1e12),
}  # fmt: skip
"""Every column that holds a number, of tables of memory and of speed. A source that states none leaves a blank or words,
``<=512`` or ``12 enc + 12 dec``, which are read where they are needed."""

_WHOLE = re.compile(r"[0-9]{1,15}")
_DECIMAL = re.compile(r"[0-9]{1,15}(\.[0-9]{0,17})?([eE][-+]?[0-9]{1,2})?")
# What somebody meant as one number: a sign, separators, exponents, other bases, and what float() reads besides.
_MEANT = re.compile(r"[-+−]?\s*(0[xob][0-9a-f_]+|[\d_,.'\s]+(e[-+]?\d*)?|nan|inf(inity)?)%?", re.IGNORECASE)


def check_numbers(where: str, cells: Mapping[str, str]) -> None:
    """Raises FileError for the first cell of a numeric column that is meant as a number and is none that it can be."""
    for name, kind in NUMBERS.items():
        text = cells.get(name, "")
        if text and not kind.holds(text) and (_MEANT.fullmatch(text) or _foreign(text)):
            raise FileError(f"{where}: {name} {shorten(text)} must be {kind}")


def number(where: str, name: str, text: str) -> float:
    """A cell that must hold a number. Raises FileError."""
    if not NUMBERS[name].holds(text):
        raise FileError(f"{where}: {name} {shorten(text)} must be {NUMBERS[name]}")
    return float(text)


def _foreign(text: str) -> bool:
    """Digits of other scripts, which int() reads and people do not see."""
    return any(each.isdecimal() and not each.isascii() for each in text)
