"""How good a set of estimates is: errors of values, and wrong verdicts of runs of which only the outcome is known."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

__all__ = ["Score", "Summary", "percentile", "summarise", "worst"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Score:
    """One row of a file, estimated; or the reason why not."""

    id: str
    metric: str
    measured_gib: float | None
    estimated_gib: float | None = None
    error_pct: float | None = None
    """Estimate over measurement, less 1; below 0 the estimate is too low."""
    verdict: str | None = None
    moment: str | None = None
    """The moment of the allocated peak."""
    assumptions: tuple[str, ...] = ()
    skipped: str | None = None
    high_gib: float | None = None
    """The high end of what was estimated, of a meter that is known as a range only."""
    allocated_gib: float | None = None
    """The estimated allocated peak of a boundary row."""
    needed_gib: float | None = None
    """What the message says was allocated and tried, of a row that ran out of memory."""
    state_bound: bool | None = None
    """The model states alone exceed the card of a boundary row."""

    @property
    def above(self) -> bool:
        """The reading is above the high end of what was estimated."""
        return self.high_gib is not None and self.measured_gib is not None and self.measured_gib > self.high_gib


@dataclass(frozen=True, kw_only=True, slots=True)
class Summary:
    """Statistics over rows; None where no row carries a value."""

    rows: int
    """Rows estimated."""
    median_abs_error_pct: float | None
    p90_abs_error_pct: float | None
    bias_pct: float | None
    """The median of the signed errors."""
    under_estimates: int
    above: int
    """Readings above the high end of the estimate's range, of the meters that have one."""
    false_fits: int
    """Said ``fits``, but the run went out of memory."""
    false_ooms: int
    """Said ``does-not-fit``, but the run fitted."""
    skipped: int

    def to_dict(self) -> dict[str, Any]:
        """The six numbers by which a bench is judged."""
        names = ("rows", "median_abs_error_pct", "p90_abs_error_pct", "bias_pct", "false_fits", "false_ooms")
        return {name: getattr(self, name) for name in names}


def percentile(values: Iterable[float], share: float) -> float | None:
    """The value below which ``share`` of the values lie, linear between neighbours; None for no values.

    >>> percentile([1, 2, 3, 4], 0.5), percentile([0, 10], 0.9), percentile([], 0.5)
    (2.5, 9.0, None)
    """
    ordered = sorted(values)
    if not ordered:
        return None
    position = share * (len(ordered) - 1)
    below = int(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (position - below) * (ordered[above] - ordered[below])


def summarise(scores: Iterable[Score]) -> Summary:
    """Statistics of some scores; errors are rounded to hundredths of a percent.

    >>> two = [Score(id=name, metric="fits", measured_gib=1.0, error_pct=error) for name, error in (("a", -2.0), ("b", 4.0))]
    >>> summarise(two).median_abs_error_pct, summarise(two).bias_pct, summarise(two).under_estimates
    (3.0, 1.0, 1)
    """
    scores = list(scores)
    estimated = [score for score in scores if score.skipped is None]
    errors = [score.error_pct for score in estimated if score.error_pct is not None]
    outcomes = [(score.metric, score.verdict) for score in estimated]
    return Summary(
        rows=len(estimated),
        median_abs_error_pct=_rounded(percentile(map(abs, errors), 0.5)),
        p90_abs_error_pct=_rounded(percentile(map(abs, errors), 0.9)),
        bias_pct=_rounded(percentile(errors, 0.5)),
        under_estimates=sum(error < 0 for error in errors),
        above=sum(score.above for score in estimated),
        false_fits=outcomes.count(("OOM", "fits")),
        false_ooms=outcomes.count(("fits", "does-not-fit")),
        skipped=len(scores) - len(estimated),
    )


def worst(scores: Iterable[Score], count: int) -> list[Score]:
    """The scores furthest off, largest first; wrong outcomes stand before errors."""
    wrong = {("OOM", "fits"), ("fits", "does-not-fit")}

    def distance(score: Score) -> tuple[bool, float]:
        return (score.metric, score.verdict) in wrong, abs(score.error_pct or 0)

    kept = [score for score in scores if score.skipped is None and distance(score) > (False, 0)]
    return sorted(kept, key=distance, reverse=True)[:count]


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 2)
