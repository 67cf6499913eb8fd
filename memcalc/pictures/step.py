"""What a figure of one step shows: its layers, the card, and what a rehearsal and a run say of the same step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from memcalc.assumptions import activations_known
from memcalc.estimate import Estimate, usable_bytes
from memcalc.measurement import RankMeasurement
from memcalc.palette import ORDER
from memcalc.pictures.layers import Layers, curve, layers
from memcalc.timeline import CATEGORIES, MOMENTS, Timeline
from memcalc.units import format_both, format_bytes

__all__ = ["NEAR", "Curve", "Step", "capacity", "of_rank", "of_timeline", "step"]

NEAR = 4
"""A card that holds at most so many times the largest thing in a figure is drawn to scale; a larger one is named."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Curve:
    """Another source's word on the same step, in bytes."""

    name: str
    """``rehearsal`` or ``measured``."""
    peak: int
    by_moment: dict[str, int]
    live: NDArray[np.int64] | None
    """In the columns of the figure, -1 before the step; None where the source kept no timeline, or one of other phases."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Step:
    """One figure of a step."""

    estimate: Estimate
    layers: Layers
    curves: tuple[Curve, ...]
    capacity: int | None
    """Bytes that the run may take of its card; None where no card was named."""

    @property
    def name(self) -> str:
        return f"{self.estimate.plan.model.name}, {self.estimate.plan.strategy} on {_ranks(self.estimate.plan.ranks)}"

    @property
    def categories(self) -> tuple[str, ...]:
        """Those that the step has, from the bottom of the stack up."""
        line = self.estimate.timeline
        there = set(line.category[line.delta > 0].tolist())
        return tuple(name for name in ORDER if CATEGORIES.index(name) in there)

    @property
    def largest(self) -> int:
        """The most that any source says."""
        return max([self.estimate.peak.bytes, *(each.peak for each in self.curves)])

    @property
    def near(self) -> bool:
        """Whether the card is drawn to scale."""
        return self.capacity is not None and self.capacity <= NEAR * max(self.largest, 1)

    @property
    def top(self) -> int:
        """The largest number of bytes that is drawn to scale."""
        return max(self.largest, self.capacity or 0) if self.near else self.largest

    @property
    def drawn(self) -> str:
        """How many of the step's micro batches there are in the figure, where it has not all of them; else blank."""
        plan = self.estimate.plan
        count = sum(phase.moment == "loss" for phase in self.layers.phases)
        if plan.layout.pipeline > 1 or not 0 < count < plan.accumulation:
            return ""
        return f"{count} of {plan.accumulation} micro batches are drawn; the others are as these are"

    def of(self, category: str) -> NDArray[np.int64]:
        """Bytes of one category, column by column."""
        held: NDArray[np.int64] = self.layers.held[CATEGORIES.index(category)]
        return held

    def most(self, category: str) -> int:
        """The most bytes of one category at any point, which need not be in a column: those show what is fullest in all."""
        return max(self.estimate.timeline.at_moment(moment, category) for moment in MOMENTS)

    def text(self) -> str:
        """What the figure shows, for those who do not see it."""
        return " ".join(self._sentences())

    def _sentences(self) -> Iterator[str]:
        found, peak = self.estimate, self.estimate.peak
        yield f"Memory of one training step of {self.name}, estimated on the fullest rank."
        parts = sorted(((size, name) for name, size in peak.by_category.items() if size), reverse=True)
        of_it = ", ".join(f"{name} {format_bytes(size)}" for size, name in parts)
        yield f"The peak is {format_both(peak.bytes)} in the moment {peak.moment}: {of_it}."
        yield f"By moment: {', '.join(f'{name} {format_bytes(size)}' for name, size in peak.by_moment.items())}."
        if not activations_known(found.plan) and "activations" not in self.categories:
            yield "Activations are not counted."
        if self.drawn:
            yield f"{self.drawn}."
        for each in self.curves:
            where = "" if each.live is not None else ", known by moment only"
            yield f"{each.name.capitalize()}: {format_both(each.peak)}{where}."
        if self.capacity is not None:
            yield f"{found.plan.gpu} has {format_both(self.capacity)} for it: {found.verdict}."


def step(found: Estimate, columns: int, curves: tuple[Curve, ...] = ()) -> Step:
    """The figure of an estimate in so many columns."""
    return Step(estimate=found, layers=layers(found.timeline, columns), curves=curves, capacity=capacity(found))


def capacity(found: Estimate) -> int | None:
    """Bytes that the run may take of its card."""
    return None if found.plan.gpu_row is None else usable_bytes(found.plan, found.plan.gpu_row)


def of_timeline(found: Estimate, timeline: Timeline, columns: int, name: str = "rehearsal") -> Curve:
    """A curve from a timeline of the same step."""
    peak = timeline.steady()
    live = curve(timeline, found.timeline, columns)
    return Curve(name=name, peak=peak.bytes, by_moment=peak.by_moment, live=live)


def of_rank(found: Estimate, rank: RankMeasurement, columns: int) -> Curve:
    """What a run measured on one rank, whose meters tell the peak also where no timeline was kept."""
    live = None if rank.timeline is None else of_timeline(found, rank.timeline, columns).live
    return Curve(name="measured", peak=rank.allocated_peak, by_moment=rank.by_moment, live=live)


def _ranks(count: int) -> str:
    return f"{count} rank{'s' * (count > 1)}"
