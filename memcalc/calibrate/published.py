"""Coefficients fitted on published training speeds: the rows of one half of the sources, the other half never seen.

What is made small is a sum of squares, of outliers by Huber's loss: of the logarithm of predicted over measured time where a clock can be compared, of
how far that differs within a group of competing plans, and, weakly, of how far a coefficient is from where it began. Each
source counts as the square root of its rows, so that one of two hundred does not outvote ten of five. The search goes
along one coefficient at a time, in logarithms and within its bounds, by steps that are halved when none helps.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import exp, log

import numpy as np

from memcalc.bench.throughput.places import hardware_for
from memcalc.bench.throughput.plans import Run, run_of
from memcalc.bench.throughput.rows import Timing
from memcalc.coefficients import COEFFICIENTS, Values
from memcalc.errors import InputError
from memcalc.rank_time import Structure, structure
from memcalc.throughput import times_of

__all__ = ["CALIBRATION", "Fit", "Point", "fit", "points", "residuals"]

CALIBRATION = "calibration"
"""The half of the sources that is used (memcalc/bench/throughput/rows.py, half_of)."""
GROUPED = 4.0
"""Weight of differences within a group against the clock's: choosing is what the model is for."""
HUBER = 0.15
"""Residuals beyond this count in proportion and not by their square (Huber 1964): such rows lack something that the model
cannot know."""
PULL = 0.003
"""Weight of the distance from where a coefficient began, in parts of its range."""
ROUNDS = 12
STEPS = (0.5, 0.25, 0.12, 0.06, 0.03)
"""Of the logarithm, tried in turn."""


@dataclass(frozen=True, slots=True)
class Point:
    """One run whose time is compared."""

    run: Run
    known: Structure
    group: str
    """Of plans that compete; blank where it stands alone."""
    units: float
    """Of what the metric counts in a step of all ranks that were measured together; 0 where only the order is known."""
    weight: float

    def residual(self, coefficients: Values) -> float:
        """Logarithm of predicted over measured time."""
        plan, place, row = self.run.plan, self.run.place, self.run.row
        assert plan is not None and place is not None and row.cost is not None
        time = times_of(
            plan,
            self.known,
            [plan.micro_batch],
            [plan.accumulation],
            hardware_for(plan, place, coefficients),
            coefficients,
        )
        samples, kind = plan.global_batch, row.kind
        assert kind is not None
        counted = {"step": 1, "sample": samples, "token": samples * plan.tokens, "data": samples}
        each = plan.ranks if kind.each else 1
        return log(time.total[0] / counted[kind.of] * each / row.cost)


@dataclass(frozen=True, kw_only=True, slots=True)
class Fit:
    """What was found."""

    coefficients: dict[str, float]
    """Those that were fitted, and the range."""
    rows: int
    before: float
    """Root mean square of the residuals that are fitted, with the table's values."""
    after: float


def points(rows: Iterable[Timing], half: str = CALIBRATION) -> list[Point]:
    """The runs of one half that a plan can be made of, tiers A and B, without those where more than the plan differs."""
    kept = []
    for row in rows:
        if row.half != half or row.tier not in ("A", "B") or row.comparison == "partial" or row.cost is None:
            continue
        run = run_of(row)
        if run.plan is not None and run.place is not None and row.kind is not None:
            kept.append(run)
    counts = Counter(run.row.source.split()[0] for run in kept)
    return [
        Point(
            run=run,
            known=structure(run.plan),  # type: ignore[arg-type]
            group=run.row.contest if run.row.comparison != "none" else "",
            units=0.0 if run.row.kind is None or run.row.kind.of == "data" else 1.0,
            weight=counts[run.row.source.split()[0]] ** -0.5,
        )
        for run in kept
    ]


def residuals(found: Sequence[Point], coefficients: Values) -> tuple[np.ndarray, np.ndarray]:
    """(of the clock where it can be compared, of each run against its group's mean), by Huber's loss and weighted."""
    each = np.array([point.residual(coefficients) for point in found])
    weights = np.array([point.weight for point in found])
    clock = np.array([point.units > 0 for point in found])
    within = np.zeros_like(each)
    groups: dict[str, list[int]] = {}
    for index, point in enumerate(found):
        if point.group:
            groups.setdefault(point.group, []).append(index)
    for members in groups.values():
        within[members] = each[members] - each[members].mean()
    return _huber(each[clock]) * np.sqrt(weights[clock]), _huber(within) * np.sqrt(weights)


def _huber(each: np.ndarray) -> np.ndarray:
    """Numbers whose squares are Huber's loss.

    >>> _huber(np.array([0.1, 0.6])).round(3).tolist()
    [0.1, 0.397]
    """
    size = np.abs(each)
    return np.where(size <= HUBER, size, np.sqrt(np.maximum(2 * HUBER * size - HUBER**2, 0.0)))


def fit(
    rows: Iterable[Timing], progress: Callable[[str], None] = lambda said: None, start: Values | None = None
) -> Fit:
    """Fit every coefficient that has bounds. Raises InputError where no row of the half can be used."""
    found = points(rows)
    if not found:
        raise InputError("no row of the calibration half can be said as a plan; nothing to fit")
    first = {name: row.value for name, row in COEFFICIENTS.items()} | dict(start or {})
    free = [row for row in COEFFICIENTS.values() if row.fitted]

    def loss(v: Values) -> float:
        clock, within = residuals(found, v)
        pull = sum((log(v[c.name] / c.value) / log(c.high / c.low)) ** 2 for c in free)
        return float((clock**2).sum() + GROUPED * (within**2).sum()) + PULL * pull

    current, best = dict(first), loss(first)
    before = best
    steps = dict.fromkeys((c.name for c in free), 0)
    for turn in range(ROUNDS):
        moved = False
        for c in free:
            if steps[c.name] >= len(STEPS):
                continue
            for direction in (1, -1):
                value = current[c.name] * exp(direction * STEPS[steps[c.name]])
                tried = current | {c.name: min(max(value, c.low), c.high)}
                if tried[c.name] != current[c.name] and (found_loss := loss(tried)) < best - 1e-9:
                    current, best, moved = tried, found_loss, True
                    break
            else:
                steps[c.name] += 1
        progress(f"round {turn + 1} of {ROUNDS}: {len(found)} rows, {best / before:.3f} of the squares left")
        if not moved and all(step >= len(STEPS) for step in steps.values()):
            break
    clock = np.array([point.residual(current) for point in found if point.units])
    low, high = np.quantile(-clock, [0.1, 0.9])
    fitted = {c.name: float(f"{current[c.name]:.4g}") for c in free}
    spread = {"range-fast": min(exp(low), 1.0), "range-slow": max(exp(high), 1.0)}
    return Fit(
        coefficients=fitted | {name: float(f"{value:.4g}") for name, value in spread.items()},
        rows=len(found),
        before=before,
        after=best,
    )
