"""A table of published training speeds: reading the CSV, and one clear line for each way it can be broken."""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from memcalc.bench.cells import number
from memcalc.bench.rows import Row, read_table
from memcalc.errors import FileError, InputError, UnknownNameError

__all__ = ["COLUMNS", "COMPARISONS", "METRICS", "Metric", "Timing", "read_timings", "select"]

COLUMNS = (
    "id", "source", "group", "model", "n_params", "layers", "hidden", "heads", "kv_heads", "ffn", "vocab", "seq_len",
    "micro_batch_per_gpu", "grad_accum", "global_batch", "n_gpus", "gpus_per_node", "gpu_type", "interconnect",
    "strategy", "precision", "activation_checkpointing", "compile", "optimizer", "offload", "metric", "value", "notes",
)  # fmt: skip
"""What a file must have; others may stand beside them."""

COMPARISONS = ("strict", "per_token", "partial", "none")
"""``strict``: only the plan differs within a group; ``per_token``: the micro batch changes the global batch too;
``partial``: precision, code or date change as well; ``none``: the row stands alone."""


@dataclass(frozen=True, slots=True)
class Metric:
    """What a value of the column ``metric`` is."""

    of: str
    """``step``, ``sample`` or ``token``: what takes the time or is counted by the rate; ``data`` for a fixed amount of it."""
    seconds: float = 0.0
    """Seconds of one unit of a time; 0 for a rate a second."""
    each: bool = False
    """A rate of one GPU, not of all together."""


METRICS = {
    "step_s": Metric("step", 1.0),
    "step_ms": Metric("step", 1e-3),
    "it_per_s": Metric("step"),
    "samples_per_s": Metric("sample"),
    "tokens_per_s": Metric("token"),
    "tokens_per_s_per_gpu": Metric("token", each=True),
    "epoch_s": Metric("data", 1.0),
    "epoch_min": Metric("data", 60.0),
    "epoch_h": Metric("data", 3600.0),
}
OOM = "OOM"
"""The metric of a run that went out of memory, which has no value."""

_COMPARED = re.compile(r"cmp=([a-z_]+)")


@dataclass(frozen=True, kw_only=True, slots=True)
class Timing(Row):
    """One published speed; ``measured`` is the number in the unit of its metric, None where the run went out of memory."""

    @property
    def contest(self) -> str:
        """The group of rows among which it can be compared; blank where it stands alone."""
        return self.cells["group"]

    @property
    def comparison(self) -> str:
        """One of COMPARISONS, from the notes; ``none`` where they do not say."""
        found = _COMPARED.search(self.cells["notes"])
        return found[1] if found and found[1] in COMPARISONS else "none"

    @property
    def kind(self) -> Metric | None:
        """How its number is read; None for a run that went out of memory."""
        return METRICS.get(self.metric)

    @property
    def cost(self) -> float | None:
        """A number that is lower the faster the run was; seconds of a step, or the inverse of a rate.

        >>> row = Timing(id="a", source="b", metric="step_ms", measured=20.0, cells={})
        >>> row.cost
        0.02
        """
        if self.measured is None or self.kind is None:
            return None
        return self.measured * self.kind.seconds if self.kind.seconds else 1 / self.measured

    @property
    def half(self) -> str:
        """``calibration`` or ``never used``: by the source alone, so that no coefficient sees rows of the other half."""
        return half_of(self.source)


def half_of(source: str) -> str:
    """Sources whose project and file have an even CRC-32 may be used to calibrate the time model, others never.

    What stands after the file (a heading, a date, words in brackets) is no part of it: tables of one page stay together.

    >>> half_of("InternEvo doc/en/train_performance.md"), half_of("InternEvo doc/en/train_performance.md, table 2")
    ('never used', 'never used')
    """
    page = " ".join(source.split()[:2]).rstrip(":,;")
    return "never used" if zlib.crc32(page.encode()) % 2 else "calibration"


def read_timings(path: Path) -> list[Timing]:
    """The rows of a CSV file with at least COLUMNS. Raises FileError with file and line."""
    return read_table(path, COLUMNS, _timing)


def _timing(where: str, cells: dict[str, str]) -> Timing:
    metric = cells["metric"]
    if metric not in METRICS and metric != OOM:
        raise FileError(f"{where}: {UnknownNameError('metric', metric, [*METRICS, OOM])}")
    measured = None if metric == OOM else number(where, "value", cells["value"])
    return Timing(id=cells["id"], source=cells["source"], metric=metric, measured=measured, cells=cells)


def select(rows: Iterable[Timing], *, tier: str = "", source: str = "", comparison: str = "") -> list[Timing]:
    """Rows of one tier, one kind of comparison and with a text in their source. Raises InputError when none is left."""
    rows = list(rows)
    kept = [
        row
        for row in rows
        if (not tier or row.tier == tier)
        and (not comparison or row.comparison == comparison)
        and source.lower() in row.source.lower()
    ]
    if not kept:
        chosen = (("tier", tier), ("cmp", comparison), ("source", source))
        said = " ".join(f"--{name} {value}" for name, value in chosen if value)
        raise InputError(f"none of the {len(rows)} rows is left with {said}")
    return kept
