"""Coefficients fitted on published training speeds: the rows of one half of the sources, the other half never seen.

What is made small is a sum of squares, of outliers by Huber's loss: of the logarithm of predicted over measured time where
a clock can be compared, of how far that differs within a group of competing plans, and of how far a coefficient is from
where it began, of which its bounds are two standard deviations. Each source counts as the square root of its rows, so that
one of two hundred does not outvote ten of five. The search is Gauss and Newton's on logarithms, within the bounds, with
steps shortened by Levenberg and Marquardt's damping until they help (Nocedal and Wright 2006, Numerical Optimization,
section 10.3).
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from math import exp, log

import numpy as np

from memcalc.bench.throughput.places import hardware_for
from memcalc.bench.throughput.plans import Run, run_of
from memcalc.bench.throughput.rows import Timing
from memcalc.bench.throughput.run import Coverage
from memcalc.coefficient_table import COEFFICIENTS
from memcalc.coefficients import Values
from memcalc.errors import InputError
from memcalc.rank_time import Structure, structure
from memcalc.throughput import times_of

__all__ = ["CALIBRATION", "Fit", "Point", "fit", "loss", "points", "quantiles", "residuals", "spread", "text", "trust"]

CALIBRATION = "calibration"
"""The half of the sources that is used (memcalc/bench/throughput/rows.py, half_of)."""
GROUPED = 4.0
"""Weight of differences within a group against the clock's: choosing is what the model is for."""
HUBER = 1.5
"""Residuals beyond so many standard deviations count in proportion and not by their square (Huber 1964): such rows lack something that the model
cannot know."""
NOISE = 0.1
"""Standard deviation of a residual beside a coefficient's: published numbers of one layout differ by 3 to 10 %."""
ROUNDS = 12
SMALL = 0.05
"""Step of the logarithm for a derivative: across the kinks where one of two times becomes the longer one."""
DAMPINGS = (0.0, 1.0, 3.0, 10.0, 30.0)


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
    """The sum of squares with the table's values."""
    after: float


def points(rows: Iterable[Timing], half: str = CALIBRATION) -> list[Point]:
    """The runs of one half whose seconds may be compared (``Run.comparable``)."""
    kept = [run for run in (run_of(row) for row in rows if row.half == half) if run.comparable]
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


def residuals(found: Sequence[Point], each: np.ndarray) -> np.ndarray:
    """What is squared: the points' residuals ``each`` where a clock can be compared, then all of them against their
    groups' means, both weighted; in standard deviations."""
    weights = np.sqrt([point.weight for point in found])
    clock = np.array([point.units > 0 for point in found])
    within = np.zeros_like(each)
    groups: dict[str, list[int]] = {}
    for index, point in enumerate(found):
        if point.group:
            groups.setdefault(point.group, []).append(index)
    for members in groups.values():
        within[members] = each[members] - each[members].mean(axis=0)
    scale = weights if each.ndim == 1 else weights[:, None]
    return np.concatenate([(each * scale)[clock], np.sqrt(GROUPED) * within * scale]) / NOISE


def trust(size: np.ndarray) -> np.ndarray:
    """Weight of a residual's square by Huber's loss.

    >>> trust(np.array([0.5, 6.0])).tolist()
    [1.0, 0.25]
    """
    return np.minimum(1.0, HUBER / np.maximum(np.abs(size), 1e-12))


def loss(found: Sequence[Point], values: Values, each: np.ndarray | None = None) -> float:
    """What a fit makes small: the points' residuals ``each`` at these values, which are computed where they are not at hand,
    by Huber's loss, and how far each fitted coefficient is from where it began, in standard deviations."""
    each = np.array([point.residual(values) for point in found]) if each is None else each
    size = np.abs(residuals(found, each))
    squares = np.where(size <= HUBER, size**2, 2 * HUBER * size - HUBER**2)
    away = sum((log(values[c.name] / c.value) / c.deviation) ** 2 for c in COEFFICIENTS.values() if c.fitted)
    return float(squares.sum() + away)


def fit(
    rows: Iterable[Timing], progress: Callable[[str], None] = lambda said: None, start: Values | None = None
) -> Fit:
    """Fit every coefficient that has bounds. Raises InputError where no row of the half can be used."""
    found = points(rows)
    if not found:
        raise InputError("no row of the calibration half can be said as a plan; nothing to fit")
    free = [row for row in COEFFICIENTS.values() if row.fitted]
    fixed = {name: row.value for name, row in COEFFICIENTS.items()} | dict(start or {})
    origin = np.log([fixed[c.name] for c in free])
    low, high = np.log([c.low for c in free]), np.log([c.high for c in free])
    deviation = np.array([c.deviation for c in free])

    def at(x: np.ndarray) -> Values:
        return {**fixed, **{c.name: exp(value) for c, value in zip(free, x, strict=True)}}

    def timed(x: np.ndarray) -> np.ndarray:
        v = at(x)
        return np.array([point.residual(v) for point in found])

    x, now = origin.copy(), timed(origin)
    best = before = loss(found, fixed, now)
    for turn in range(ROUNDS):
        slopes = np.stack([(timed(x + SMALL * unit) - now) / SMALL for unit in np.eye(len(free))], axis=1)
        size = residuals(found, now)
        weight = np.sqrt(trust(size))
        matrix = np.vstack([residuals(found, slopes) * weight[:, None], np.diag(1 / deviation)])
        target = -np.concatenate([size * weight, (x - origin) / deviation])
        for damping in DAMPINGS:
            held = np.vstack([matrix, np.diag(damping / deviation)])
            step = np.linalg.lstsq(held, np.concatenate([target, np.zeros(len(free))]), rcond=None)[0]
            tried = np.clip(x + step, low, high)
            each = timed(tried)
            if (reached := loss(found, at(tried), each)) < best:
                break
        else:
            break
        gained, x, now, best = best - reached, tried, each, reached
        progress(f"round {turn + 1} of at most {ROUNDS}: {len(found)} rows, {best / before:.3f} of the squares left")
        if gained < 1e-3 * best:
            break
    fitted = {c.name: _rounded(value) for c, value in zip(free, np.exp(x), strict=True)}
    final = {**fixed, **fitted}
    return Fit(coefficients=fitted | spread(found, final), rows=len(found), before=before, after=loss(found, final))


def spread(found: Sequence[Point], values: Values) -> dict[str, float]:
    """The range: measured over predicted time that one in ten runs is below, and above. A run that is asked about is of none
    of these projects, so each project counts the same, however many runs it has."""
    clock = [point for point in found if point.units]
    measured = np.array([-point.residual(values) for point in clock])
    fast, slow = np.exp(quantiles(measured, np.array([point.weight**2 for point in clock]), (0.1, 0.9)))
    return {"range-fast": _rounded(min(fast, 1.0)), "range-slow": _rounded(max(slow, 1.0))}


def quantiles(values: np.ndarray, weights: np.ndarray, shares: Sequence[float]) -> np.ndarray:
    """Values below which these shares of the weight lie, linear between the middles of neighbours.

    >>> quantiles(np.array([3.0, 1.0, 2.0]), np.array([1.0, 1.0, 2.0]), (0.5, 0.9)).tolist()
    [2.0, 3.0]
    """
    order = np.argsort(values)
    middles = np.cumsum(weights[order]) - weights[order] / 2
    return np.interp(shares, middles / weights.sum(), values[order])


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")


def text(found: Fit, source: str, ranges: Sequence[Coverage]) -> str:
    """The file that memcalc reads, ``memcalc/calibrated.json``; ``ranges`` say what its range is worth.

    The loss is that of the coefficients as they are written, so that a test sees when the time model has changed since.
    """
    data = {
        "memcalc_calibration": 1,
        "made_by": "memcalc calibrate --published",
        "source": source,
        "half": "sources whose project and file have an even CRC-32; the others were not used",
        "rows": found.rows,
        "loss_before": round(found.before, 1),
        "loss_after": round(found.after, 6),
        "range": [asdict(each) for each in ranges],
        "coefficients": found.coefficients,
    }
    return json.dumps(data, indent=2) + "\n"
