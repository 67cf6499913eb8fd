"""A table of published measurements: reading the CSV, and one clear line for each way it can be broken."""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

from memcalc.bench.cells import check_numbers, number
from memcalc.errors import FileError, InputError, UnknownNameError, shorten
from memcalc.files import read_text

__all__ = ["COLUMNS", "MESSAGE", "METERS", "Row", "read_rows", "read_table", "select"]

COLUMNS = (
    "id", "source", "model", "n_params", "hidden", "layers", "heads", "kv_heads", "ffn", "vocab", "seq_len",
    "micro_batch_per_gpu", "grad_accum", "n_gpus", "gpu_type", "gpu_gib", "strategy", "param_dtype", "compute_dtype",
    "reduce_dtype", "grad_dtype", "optimizer", "optimizer_state_dtype", "activation_checkpointing", "attention",
    "compile", "offload", "lora_rank", "metric", "value_gib", "notes",
)  # fmt: skip
"""What a file must have; ``use`` and others may stand beside them."""

MESSAGE = ("tried_gib", "allocated_gib", "reserved_gib", "capacity_gib")
"""What a file of out-of-memory reports may have besides: the numbers of torch's message."""

METERS = {
    "max_memory_allocated": "allocated",
    "max_memory_reserved": "reserved",
    "nvidia-smi": "device",
    "fits": "boundary",
    "OOM": "boundary",
}
"""What each word of the column ``metric`` measures; a boundary is a run of which only the outcome is known."""


class _HasId(Protocol):
    @property
    def id(self) -> str: ...


R = TypeVar("R", bound=_HasId)

_TIER = re.compile(r"\s*tier ([ABC])\b")
_WHOLE = re.compile(r"[0-9]{1,15}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One published run. ``cells`` are the texts of all columns; a blank one was not stated."""

    id: str
    source: str
    metric: str
    measured: float | None
    """GiB; None for a boundary row."""
    cells: Mapping[str, str]

    def __getitem__(self, column: str) -> str:
        return self.cells[column]

    def whole(self, column: str) -> int | None:
        """A cell that is one whole number; None for a blank, for words, for a cap such as ``<=512``."""
        text = self.cells[column]
        return int(text) if _WHOLE.fullmatch(text) else None

    def gib(self, column: str) -> float | None:
        """One of the columns MESSAGE, which a file need not have; None for a blank."""
        text = self.cells.get(column, "")
        return float(text) if text else None

    @property
    def meter(self) -> str:
        return METERS[self.metric]

    @property
    def tier(self) -> str:
        """How well the inputs are known, ``A`` to ``C``: the first words of the notes, ``tier A``; or blank."""
        found = _TIER.match(self.cells["notes"])
        return found[1] if found else ""

    @property
    def group(self) -> str:
        """The project that published the row: the first word of its source."""
        return self.source.split()[0]


def read_rows(path: Path) -> list[Row]:
    """The rows of a CSV file with at least COLUMNS. Raises FileError with file and line."""
    return read_table(path, COLUMNS, _row)


def read_table(path: Path, columns: Sequence[str], make: Callable[[str, dict[str, str]], R]) -> list[R]:
    """What ``make`` makes of each line of a CSV file that has at least these columns, ``id`` among them; it is given
    where the line is, for its errors, and the cells. Raises FileError with file and line."""
    text = read_text(path)
    if "\0" in text:
        raise FileError(f"{path} is not a CSV file: it holds NUL bytes")
    if not text.strip():
        raise FileError(f"{path} is empty; expected a CSV file with the columns {', '.join(columns[:3])} ...")
    reader = csv.reader(text.splitlines(keepends=True), strict=True)
    rows: dict[str, R] = {}
    try:
        header = [name.strip() for name in next(reader)]
        _check_header(path, header, columns)
        for cells in reader:
            where = f"{path} line {reader.line_num}"
            if not any(cells):
                continue
            row = make(where, _cells(where, header, cells))
            if row.id in rows:
                raise FileError(f"{where}: the id {shorten(row.id)} stands twice")
            rows[row.id] = row
    except csv.Error as error:
        raise FileError(f"{path} line {reader.line_num} is not valid CSV: {error}") from None
    if not rows:
        raise FileError(f"{path} has columns but no rows")
    return list(rows.values())


def _check_header(path: Path, header: list[str], columns: Sequence[str]) -> None:
    missing = [name for name in columns if name not in header]
    if missing:
        more = f" and {len(missing) - 5} more" if len(missing) > 5 else ""
        raise FileError(f"{path} has no column {', '.join(missing[:5])}{more}; its first line must name the columns")
    twice = [name for name in columns if header.count(name) > 1]
    if twice:
        raise FileError(f"{path} has the column {twice[0]} twice")


def _cells(where: str, header: list[str], values: list[str]) -> dict[str, str]:
    if len(values) != len(header):
        raise FileError(f"{where} has {len(values)} cells, but there are {len(header)} columns")
    cells = {name: value.strip() for name, value in zip(header, values, strict=True)}
    for name in ("id", "source"):
        if not cells[name]:
            raise FileError(f"{where}: {name} is blank")
    check_numbers(where, cells)
    return cells


def _row(where: str, cells: dict[str, str]) -> Row:
    metric = cells["metric"]
    if metric not in METERS:
        raise FileError(f"{where}: {UnknownNameError('metric', metric, METERS)}")
    measured = None if METERS[metric] == "boundary" else number(where, "value_gib", cells["value_gib"])
    for name in MESSAGE:
        if cells.get(name):
            number(where, name, cells[name])
    return Row(id=cells["id"], source=cells["source"], metric=metric, measured=measured, cells=cells)


def select(rows: list[Row], *, tier: str | None = None, use: str | None = None, source: str | None = None) -> list[Row]:
    """The rows of one tier, of one word in the column ``use``, and with a text in their source.

    Raises InputError when none is left, or when the file has no column ``use`` to choose by.
    """
    if use and "use" not in rows[0].cells:
        raise InputError(f"--use {use}: the file has no column 'use'; choose by --tier")
    kept = [
        row
        for row in rows
        if (not tier or row.tier == tier)
        and (not use or row.cells["use"] == use)
        and (not source or source.lower() in row.source.lower())
    ]
    if not kept:
        chosen = [f"--{name} {value}" for name, value in (("tier", tier), ("use", use), ("source", source)) if value]
        raise InputError(f"none of the {len(rows)} rows is left with {' '.join(chosen)}")
    return kept
