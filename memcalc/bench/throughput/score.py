"""How good the time model is at choosing: pairs in the right order, what the chosen plan costs, and how far off it is."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations

from memcalc.bench.score import percentile
from memcalc.bench.throughput.knobs import knobs_of
from memcalc.bench.throughput.places import hardware_for
from memcalc.bench.throughput.plans import Run
from memcalc.coefficients import Values, published
from memcalc.throughput import step_time

__all__ = ["TIE", "Contest", "Pair", "Scored", "Summary", "contests", "score", "summarise"]

TIE = 0.05
"""Two runs whose measured times differ by less are a tie: one layout measured twice differs by 2.8 % (bigscience, 181B)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Scored:
    """One row with what the time model says of it."""

    run: Run
    measured: float | None
    """Lower is faster, within one metric (``Timing.cost``); None where the run went out of memory."""
    predicted: float | None
    """Seconds of a step, or of a sample where the metric counts those; None where the row cannot be said."""
    error: float | None
    """The predicted rate over the measured one, less 1; None where the metric is no absolute one."""
    inside: bool | None = None
    """The measured time lies in the range of the predicted one; None as the error."""

    @property
    def id(self) -> str:
        return self.run.row.id

    @property
    def compares(self) -> bool:
        return self.measured is not None and self.predicted is not None


@dataclass(frozen=True, slots=True)
class Pair:
    """Two runs of a contest that differ by TIE or more."""

    faster: Scored
    slower: Scored

    @property
    def right(self) -> bool:
        """The time model says the same order; saying that they are equal is wrong."""
        return (self.faster.predicted or 0.0) < (self.slower.predicted or 0.0)

    @property
    def knobs(self) -> tuple[str, ...]:
        """What differs between the two plans."""
        return knobs_of(self.faster.run.plan, self.slower.run.plan)


@dataclass(frozen=True, kw_only=True, slots=True)
class Contest:
    """The rows of one group."""

    name: str
    rows: tuple[Scored, ...]

    @property
    def half(self) -> str:
        return self.rows[0].run.row.half

    @property
    def source(self) -> str:
        return self.rows[0].run.row.source

    @property
    def said(self) -> list[Scored]:
        return [row for row in self.rows if row.compares]

    @property
    def pairs(self) -> list[Pair]:
        """Of rows that can be said."""
        ordered = sorted(self.said, key=lambda row: row.measured or 0.0)
        found = [Pair(one, other) for one, other in combinations(ordered, 2)]
        return [pair for pair in found if (pair.slower.measured or 0) >= (1 + TIE) * (pair.faster.measured or 0)]

    @property
    def chosen(self) -> Scored | None:
        """The row with the least predicted time; of several equal ones the slowest, so that luck is no merit."""
        if len(self.said) < 2:
            return None
        return min(self.said, key=lambda row: (row.predicted or 0.0, -(row.measured or 0.0)))

    @property
    def regret(self) -> float | None:
        """Measured time of the chosen plan over the best of all that ran, less 1; None with fewer than two to choose."""
        if self.chosen is None:
            return None
        best = min(row.measured for row in self.rows if row.measured is not None)
        return (self.chosen.measured or 0.0) / best - 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Summary:
    """Statistics of some contests and of rows that stand alone; None where there is nothing to count."""

    groups: int
    """With at least two rows that can be said."""
    pairs: int
    pairs_right: int
    median_regret_pct: float | None
    p90_regret_pct: float | None
    mfu_median_error_pct: float | None

    @property
    def pairs_right_pct(self) -> float | None:
        return round(100 * self.pairs_right / self.pairs, 2) if self.pairs else None

    def to_dict(self) -> dict[str, float | int | None]:
        """The six numbers by which the choice is judged."""
        names = ("groups", "pairs", "pairs_right_pct", "median_regret_pct", "p90_regret_pct", "mfu_median_error_pct")
        return {name: getattr(self, name) for name in names}


def score(run: Run, coefficients: Values | None = None) -> Scored:
    """A row's predicted time, in what its metric counts; by other coefficients than those that were published if given."""
    row, kind = run.row, run.row.kind
    if run.plan is None:
        return Scored(run=run, measured=row.cost, predicted=None, error=None)
    # Never what was measured on the machine this runs on: a judgement is the same everywhere.
    v, hardware = published(), run.hardware
    if coefficients is not None and run.place is not None:
        v, hardware = coefficients, hardware_for(run.plan, run.place, coefficients)
    time = step_time(run.plan, hardware, v)
    if kind is None or row.cost is None:
        return Scored(run=run, measured=None, predicted=time.seconds_per_sample, error=None)
    predicted = time.total if kind.of == "step" else time.seconds_per_sample
    units = {"step": 1.0, "sample": 1.0, "token": max(run.plan.tokens, 1)}.get(kind.of)
    error = None
    if units is not None:
        each = run.plan.ranks if kind.each else 1
        error = row.cost / (predicted / units * each) - 1
    inside = None if error is None else time.low <= (1 + error) * time.total <= time.high
    return Scored(run=run, measured=row.cost, predicted=predicted, error=error, inside=inside)


def contests(rows: Iterable[Scored]) -> list[Contest]:
    """The groups, in the file's order; rows that stand alone are in none."""
    groups: dict[str, list[Scored]] = {}
    for row in rows:
        if row.run.row.contest:
            groups.setdefault(row.run.row.contest, []).append(row)
    return [Contest(name=name, rows=tuple(members)) for name, members in groups.items()]


def summarise(groups: Sequence[Contest], alone: Iterable[Scored] = ()) -> Summary:
    """Statistics of contests, and of the clock over rows that stand alone; percentages rounded to hundredths."""
    pairs = [pair for group in groups for pair in group.pairs]
    regrets = [100 * group.regret for group in groups if group.regret is not None]
    errors = [100 * abs(row.error) for row in alone if row.error is not None]
    return Summary(
        groups=len(regrets),
        pairs=len(pairs),
        pairs_right=sum(pair.right for pair in pairs),
        median_regret_pct=_rounded(percentile(regrets, 0.5)),
        p90_regret_pct=_rounded(percentile(regrets, 0.9)),
        mfu_median_error_pct=_rounded(percentile(errors, 0.5)),
    )


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 2)
