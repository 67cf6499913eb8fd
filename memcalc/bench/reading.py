"""A row being read: cells and defaults asked for one by one, what had to be assumed, and what memcalc has no term for."""

from __future__ import annotations

from dataclasses import dataclass, field

from memcalc.bench.defaults import framework_of
from memcalc.bench.rows import Row

__all__ = ["Lack", "Reading"]


@dataclass(frozen=True, slots=True)
class Lack:
    """Why a row cannot be said as a plan."""

    reason: str
    only_less: bool = False
    """What is missing only takes memory away, and none of it in the optimizer's step: where the estimate without
    it has its peak in the step, the peak is the same with it."""


@dataclass(slots=True)
class Reading:
    """Collects assumptions and lacks, so that a skipped row names all that it would need."""

    row: Row
    assumptions: list[str] = field(default_factory=list)
    lacks: list[Lack] = field(default_factory=list)

    def said(self, column: str) -> str:
        """The cell, else the framework's default, which is noted; blank where neither says anything."""
        return self.row.cells.get(column, "") or self.default(column)

    def default(self, key: str) -> str:
        """The framework's default for a key, noted; blank where there is none."""
        framework = framework_of(f"{self.row.source} {self.row['gpu_type']}")
        default = framework.default(key)
        if default is None:
            return ""
        if default.value:
            self.assume(f"{key} {default.value}: {default.source}")
        return default.value

    def assume(self, sentence: str) -> None:
        if sentence not in self.assumptions:
            self.assumptions.append(sentence)

    def lack(self, reason: str, *, only_less: bool = False) -> None:
        found = Lack(reason.replace(";", ","), only_less)  # "; " stands between reasons
        if found not in self.lacks:
            self.lacks.append(found)

    def number(self, column: str) -> int:
        """A whole number, the framework's where the cell is blank; a lack and 0 where neither holds one."""
        value = self.row.whole(column)
        if value is None and not self.row[column] and self.default(column):
            value = int(self.default(column))
        if value is None:
            text = self.row[column]
            name = column.replace("_", " ")
            self.lack(f"{name} is {text!r}, not a number" if text else f"{name} is not stated")
        return value or 0
