"""The column ``seq_len`` where it holds more than a number: caps, sums, and remarks."""

from __future__ import annotations

import dataclasses
import re

from memcalc.bench.reading import Reading

__all__ = ["settle_length"]

_CAP = re.compile(r"<=\s*(\d{1,15})")
_SUM = re.compile(r"(\d{1,9})\s*\+\s*(\d{1,9})")
_REMARKED = re.compile(r"(\d{1,15})\s*\(([^)]*)\)")


def settle_length(reading: Reading) -> None:
    """Put a number in the place of the text where one follows from it.

    ``64+64`` are a prompt and its answer. A cap such as ``<=512`` is the length only for a boundary row: whether a
    whole run fits is decided by its fullest step, and a batch is padded to its longest sample, which truncation
    cuts at the cap. A reading of one moment may have been taken at a shorter batch.
    """
    row = reading.row
    text = row["seq_len"]
    if (found := _CAP.fullmatch(text)) and row.meter == "boundary":
        tokens = int(found[1])
        reading.assume(f"length {tokens}: a run's fullest batch is as long as its cap")
    elif found := _SUM.fullmatch(text):
        tokens = int(found[1]) + int(found[2])
        reading.assume(f"length {tokens}: {text}, a prompt and its answer")
    elif found := _REMARKED.fullmatch(text):
        tokens = int(found[1])
        reading.assume(f"length {tokens}: {found[2]}")
    elif not text and (default := reading.default("seq_len")):
        tokens = int(default)
    else:
        return
    reading.row = dataclasses.replace(row, cells={**row.cells, "seq_len": str(tokens)})
