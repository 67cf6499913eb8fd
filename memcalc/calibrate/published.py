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

__all__ = ["CALIBRATION", "HALVES", "Fit", "Point", "fit", "points", "residuals", "spread_of", "text", "trust"]

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


HALVES = (CALIBRATION, "never used")


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
    """The runs of one half that a plan can be made of, tiers A and B, without those where more than the plan differs and
    those whose network is not stated, which would fit an assumption."""
    kept = []
    for row in rows:
        if row.half != half or row.tier not in ("A", "B") or row.comparison == "partial" or row.cost is None:
            continue
        run = run_of(row)
        place = run.place
        if run.plan is not None and place is not None and (place.nodes == 1 or place.between is not None):
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
    deviation = (high - low) / 4

    def at(x: np.ndarray) -> Values:
        return {**fixed, **{c.name: exp(value) for c, value in zip(free, x, strict=True)}}

    def timed(x: np.ndarray) -> np.ndarray:
        v = at(x)
        return np.array([point.residual(v) for point in found])

    def loss(x: np.ndarray, each: np.ndarray) -> float:
        size = np.abs(residuals(found, each))
        squares = np.where(size <= HUBER, size**2, 2 * HUBER * size - HUBER**2)
        return float(squares.sum() + (((x - origin) / deviation) ** 2).sum())

    x, now = origin.copy(), timed(origin)
    best = before = loss(x, now)
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
            if (reached := loss(tried, each)) < best:
                break
        else:
            break
        gained, x, now, best = best - reached, tried, each, reached
        progress(f"round {turn + 1} of at most {ROUNDS}: {len(found)} rows, {best / before:.3f} of the squares left")
        if gained < 1e-3 * best:
            break
    current = at(x)
    clock = np.array([value for value, point in zip(now, found, strict=True) if point.units])
    fast, slow = np.exp(np.quantile(-clock, [0.1, 0.9]))
    spread = {"range-fast": min(fast, 1.0), "range-slow": max(slow, 1.0)}
    kept = {c.name: current[c.name] for c in free} | spread
    return Fit(
        coefficients={name: float(f"{value:.4g}") for name, value in kept.items()},
        rows=len(found),
        before=before,
        after=best,
    )


def spread_of(rows: Iterable[Timing], coefficients: Values, half: str) -> dict[str, float | int]:
    """Of the runs of one half whose clock can be compared: how many, the median error in percent of the time, and the part
    in percent that lies in the range."""
    v = {name: row.value for name, row in COEFFICIENTS.items()} | dict(coefficients)
    off = np.array([point.residual(v) for point in points(rows, half) if point.units])
    if not len(off):
        return {"rows": 0, "median_error_pct": 0.0, "in_range_pct": 0.0}
    ratio = np.exp(-off)  # measured over predicted
    inside = (ratio >= v["range-fast"]) & (ratio <= v["range-slow"])
    return {
        "rows": len(off),
        "median_error_pct": round(100 * float(np.median(np.abs(np.exp(off) - 1))), 1),
        "in_range_pct": round(100 * float(inside.mean()), 1),
    }


def text(found: Fit, source: str) -> str:
    """The file that memcalc reads, ``memcalc/calibrated.json``."""
    data = {
        "memcalc_calibration": 1,
        "made_by": "memcalc calibrate --published",
        "source": source,
        "half": "sources whose project and file have an even CRC-32; the others were not used",
        "rows": found.rows,
        "loss_before": round(found.before, 1),
        "loss_after": round(found.after, 1),
        "coefficients": found.coefficients,
    }
    return json.dumps(data, indent=2) + "\n"
