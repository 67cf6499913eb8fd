"""Bytes and counts: reading them from people, writing them for people.

Inside memcalc a size is a whole number of bytes. Decimal units (kB, MB, GB = 10**9 B) and binary units
(KiB, MiB, GiB = 2**30 B) are both read and both printed, and are never confused: the label says which.
"""

from __future__ import annotations

import re
from decimal import Context, Decimal, InvalidOperation

from memcalc.errors import InputError, shorten

__all__ = [
    "BINARY",
    "DECIMAL",
    "decimal_unit",
    "format_both",
    "format_bytes",
    "format_count",
    "parse_bytes",
    "parse_count",
    "things",
    "undivided",
]

DECIMAL = {"B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "PB": 10**15}
BINARY = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40, "PiB": 2**50}
_SIZES = {unit.lower(): factor for unit, factor in (DECIMAL | BINARY).items()}
_COUNTS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}
_NUMBER = re.compile(
    r"\s*([+-]?(?:\d+(?:_\d+)*)?(?:\.\d*)?(?:e[+-]?\d+)?)\s*([a-z]*)\s*",
    re.IGNORECASE | re.ASCII,
)
_LARGEST = 10**18  # an exabyte, or a quintillion parameters: past it an input is a slip, not a size
# Digits enough to be exact for any text of _LONGEST characters; what is beyond the exponents becomes 0 or infinity.
_EXACT = Context(prec=80, traps=[InvalidOperation])
_LONGEST = 40


def _read(text: str, units: dict[str, int], what: str, example: str) -> tuple[Decimal, int]:
    """The value and the factor of its unit."""
    match = _NUMBER.fullmatch(text) if len(text) <= _LONGEST else None
    factor = units.get(match[2].lower()) if match else None
    if match is None or factor is None:
        raise InputError(f"{what} {shorten(text)} cannot be read; write it like {example}")
    try:
        value = _EXACT.multiply(_EXACT.create_decimal(match[1].replace("_", "")), Decimal(factor))
    except InvalidOperation:
        raise InputError(f"{what} {shorten(text)} cannot be read; write it like {example}") from None
    if not 0 < value <= _LARGEST:
        raise InputError(f"{what} {shorten(text)} must be more than 0 and at most 1e18")
    return value, factor


def _whole(value: Decimal, text: str, what: str) -> int:
    if value != value.to_integral_value():
        raise InputError(f"{what} {shorten(text)} is not a whole number")
    return int(value)


def parse_bytes(text: str, what: str = "size") -> int:
    """Bytes from text; a bare number is bytes, GB is 10**9 and GiB is 2**30. Raises InputError.

    Larger units give the nearest byte, since 79.15 GiB is how tools print sizes; parts of one byte are refused.

    >>> parse_bytes("64KB"), parse_bytes("80 GiB"), parse_bytes("1.5gb")
    (64000, 85899345920, 1500000000)
    """
    value, factor = _read(text, {**_SIZES, "": 1}, what, "64KB, 1.5GB or 80GiB")
    return round(value) if factor > 1 and value >= 1 else _whole(value, text, what)


def parse_count(text: str, what: str = "count") -> int:
    """A count from text: ``1e9``, ``1_000_000``, ``7b``, ``124M``, ``1.5B``. Raises InputError.

    >>> parse_count("1e9"), parse_count("7b"), parse_count("124M"), parse_count("1_000")
    (1000000000, 7000000000, 124000000, 1000)
    """
    value, _ = _read(text, _COUNTS, what, "1e9, 7b, 124M or 1_000_000")
    return _whole(value, text, what)


def format_bytes(count: int, *, binary: bool = False) -> str:
    """One size in the largest unit that keeps it at 1 or more, with three decimals at most.

    >>> format_bytes(16_000_000_000), format_bytes(16_000_000_000, binary=True), format_bytes(0)
    ('16 GB', '14.901 GiB', '0 B')
    """
    units = BINARY if binary else DECIMAL
    # The unit is chosen after rounding: 999,999,999 B are 1 GB, not 1000 MB.
    unit = next((u for u in reversed(units) if round(abs(count) / units[u], 3) >= 1), "B")
    text = f"{count / units[unit]:.3f}".rstrip("0").rstrip(".")
    return f"{text} {unit}"


def format_both(count: int) -> str:
    """A size in both systems, so that neither is taken for the other.

    >>> format_both(83_000_000_000)
    '83 GB (77.3 GiB)'
    """
    return f"{format_bytes(count)} ({format_bytes(count, binary=True)})"


def things(count: int, thing: str) -> str:
    """A count and what is counted, in the plural unless it is one.

    >>> things(1, "sample"), things(16255, "sample")
    ('1 sample', '16,255 samples')
    """
    return f"{format_count(count)} {thing}{'s' * (count != 1)}"


def undivided(count: int, thing: str) -> str:
    """A count of what does not divide.

    >>> undivided(1, "rank"), undivided(3, "rank")
    ('1 rank does not divide', '3 ranks do not divide')
    """
    return f"{things(count, thing)} {'does' if count == 1 else 'do'} not divide"


def format_count(count: int) -> str:
    """A count with thousands separators.

    >>> format_count(124439808)
    '124,439,808'
    """
    return f"{count:,}"


def decimal_unit(size: int) -> tuple[str, int]:
    """The largest decimal unit that a size has one of, and its bytes.

    >>> decimal_unit(97_068_000), decimal_unit(0)
    (('MB', 1000000), ('B', 1))
    """
    return next(((unit, factor) for unit, factor in reversed(DECIMAL.items()) if size >= factor), ("B", 1))
