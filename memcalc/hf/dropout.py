"""Dropout that a config.json asks for: what a plan takes over, and what no family counts."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from memcalc.errors import FileError, shorten
from memcalc.hf.keys import Values
from memcalc.models.family import Family

__all__ = ["dropout_of"]

_KEY = re.compile(r"[a-z_]{0,40}(dropout|pdrop)[a-z_]{0,40}")
# Those of classifiers on top work on one vector a sample or token; layerdrop leaves whole layers out, which keeps less.
_ON_TOP = re.compile(r"(classif|seq_classif|summary|qa_)|.*layerdrop")
_INSIDE = re.compile(r"(attn|attention|activation)")


def dropout_of(config: Mapping[str, Any], values: Values, family: Family, source: str) -> tuple[float, tuple[str, ...]]:
    """The largest dropout that the family counts, and a sentence on that which it does not. Raises FileError.

    ``values`` bring the defaults of the class, under names that begin with ``dropout``.
    """
    inside = {name: rate for name, rate in _said(config, source) if _INSIDE.match(name)}
    rates = {name: rate for name, rate in _said(config, source) if name not in inside}
    usual = {name: rate for name, rate in values.items() if name.startswith("dropout")}
    if not family.drops:
        return 0.0, _not_counted({**rates, **inside}, f"the family {family.name} has no dropout")
    if not family.drops_shares:
        found = max([0.0, *rates.values(), *usual.values()])
        return found, _not_counted(inside, f"the family {family.name} has none there")
    return max([0.0, *rates.values(), *inside.values(), *usual.values()]), ()


def _said(config: Mapping[str, Any], source: str) -> Iterator[tuple[str, float]]:
    """Keys of dropout with what they say, if it is anything; MPT has its own in an object."""
    inner = config.get("attn_config")
    for name, value in [*config.items(), *(inner.items() if isinstance(inner, dict) else ())]:
        if not isinstance(name, str) or not _KEY.fullmatch(name) or _ON_TOP.match(name):
            continue
        if isinstance(value, bool) or not isinstance(value, int | float):
            continue
        if not 0 <= value < 1:
            raise FileError(f"{source}: {name} is {shorten(value)}, which is not a number from 0 to below 1")
        if value:
            yield name, float(value)


def _not_counted(rates: Mapping[str, float], why: str) -> tuple[str, ...]:
    if not any(rates.values()):
        return ()
    said = ", ".join(f"{name} {rate:g}" for name, rate in rates.items())
    return (
        f"{said} of the file {'is' if len(rates) == 1 else 'are'} not counted: {why}; each place keeps a mask of a byte for "
        "each element, which attention has heads x tokens x tokens of where it is written out; --dropout 0 says there is none",
    )
