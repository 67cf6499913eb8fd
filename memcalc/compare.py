"""Estimated against measured: one run, meter by meter, moment by moment, category by category."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from memcalc.estimate import REHEARSED, Estimate, Rehearsed, estimate
from memcalc.ledger import skeleton
from memcalc.measurement import Measurement, RankMeasurement
from memcalc.plan import Plan
from memcalc.reserved import Range
from memcalc.run_folder import REHEARSAL
from memcalc.timeline import CATEGORIES, MOMENTS

__all__ = ["REST", "STATES", "Comparison", "Row", "compare", "compare_run", "exact"]

STATES = ("parameters", "gradients", "optimizer")
"""Categories whose tensors the training loop can name, so that their bytes are known exactly."""

REST = "everything else"
"""Activations, inputs, communication, temporaries, buffers and the gradients there are at the peak: no
instrument tells them apart, it counts bytes and not what they are for."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One quantity, estimated and measured, in bytes. The estimate is a range where ``low < high``."""

    rank: int
    meter: str
    """allocated, reserved, device or host."""
    category: str
    """``all``, one of STATES, or REST."""
    moment: str
    """A moment of the step, or ``peak`` for the largest of all."""
    low: int
    high: int
    measured: int
    instrument: str

    @property
    def error_bytes(self) -> int:
        """Estimate minus measurement: positive when memcalc says too much; 0 inside a range.

        >>> row = Row(rank=0, meter="allocated", category="all", moment="peak", low=99, high=99, measured=100, instrument="")
        >>> row.error_bytes, row.error_percent
        (-1, -1.0)
        """
        return max(self.low - self.measured, 0) + min(self.high - self.measured, 0)

    @property
    def error_percent(self) -> float | None:
        """The error in percent of the measurement; None where nothing was measured to divide by."""
        if not self.measured:
            return None if self.error_bytes else 0.0
        return 100 * self.error_bytes / self.measured


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """All rows of one run. The estimate is for the fullest rank, so only its errors judge the estimate."""

    estimate: Estimate
    measurement: Measurement
    fullest: int
    """The rank with the largest measured allocated peak; the first of equals."""
    rows: tuple[Row, ...]

    @property
    def first_step_only(self) -> bool:
        """Whether no steady step was metered, so that what lives from the second on is missing."""
        return any(rank.steps == 1 for rank in self.measurement.ranks)

    @property
    def peak(self) -> Row:
        """The row everything is about: the allocated peak of the fullest rank."""
        return self.row(self.fullest, "allocated", "all", "peak")

    def row(self, rank: int, meter: str, category: str, moment: str) -> Row:
        """One row by its four keys; KeyError when it was not measured."""
        for row in self.rows:
            if (row.rank, row.meter, row.category, row.moment) == (rank, meter, category, moment):
                return row
        raise KeyError((rank, meter, category, moment))

    def states_equal(self) -> bool:
        """Parameters, gradients and optimizer states are right to the byte on the rank that holds most of each."""
        layout = self.estimate.plan.layout
        for category in STATES:
            stages: dict[int, list[Row]] = {}
            for row in self.rows:
                if row.category == category:
                    stages.setdefault(layout.stage_of(row.rank), []).append(row)
            if any(max(row.measured for row in rows) != rows[0].low for rows in stages.values()):
                return False
        return True


def compare_run(folder: Path) -> Comparison:
    """The comparison for a folder that ``launch`` filled. Raises FileError when it does not hold a measured run."""
    measurement = Measurement.load(folder)
    return compare(estimate(measurement.plan, rehearsal=_rehearsed(folder)), measurement)


def _rehearsed(folder: Path) -> Rehearsed | None:
    """The rehearsal that launch left beside a run of a module, whose activations no ledger knows."""
    path = folder / REHEARSAL
    if not path.exists():
        return None
    return Rehearsed(timeline=RankMeasurement.from_json(path, str(path)).timeline, remarks=(REHEARSED,), sure=True)


def compare(estimated: Estimate, measured: Measurement) -> Comparison:
    """Every quantity that both sides have, for every rank; of a pipeline each rank against its own stage."""
    fullest = max(measured.ranks, key=lambda rank: (rank.allocated_peak, -rank.rank)).rank
    stages = {estimated.stage: estimated}
    for rank in measured.ranks:
        stage = estimated.plan.layout.stage_of(rank.rank)
        if stage not in stages:
            stages[stage] = estimate(estimated.plan, stage)
    rows = tuple(
        row for rank in measured.ranks for row in _rank(stages[estimated.plan.layout.stage_of(rank.rank)], rank)
    )
    return Comparison(estimate=estimated, measurement=measured, fullest=fullest, rows=rows)


def exact(plan: Plan, category: str, stage: int | None = None) -> int:
    """Bytes of one category between backward and step, as the tensors have them before an allocator rounds them up.

    >>> from memcalc.models import MODELS
    >>> exact(Plan(model=MODELS["gpt2"], tokens=8, micro_batch=1), "parameters") == 4 * 124_439_808
    True
    """
    timeline = replace(skeleton(plan, stage), block=1).at(plan.micro_batch)
    before = timeline.moment < MOMENTS.index("step")
    return int(timeline.delta[before & (timeline.category == CATEGORIES.index(category))].sum())


def _rank(estimated: Estimate, rank: RankMeasurement) -> Iterator[Row]:
    def row(meter: str, category: str, moment: str, low: int, measured: int, high: int | None = None) -> Row:
        return Row(
            rank=rank.rank, meter=meter, category=category, moment=moment, low=low,
            high=low if high is None else high, measured=measured, instrument=rank.instrument,
        )  # fmt: skip

    stage = estimated.stage if estimated.plan.layout.pipeline > 1 else None
    states = {category: exact(estimated.plan, category, stage) for category in STATES}
    yield row("allocated", "all", "peak", estimated.steady.bytes, rank.allocated_peak)
    for moment in MOMENTS:
        if moment in rank.by_moment and moment in estimated.steady.by_moment:
            yield row("allocated", "all", moment, estimated.steady.by_moment[moment], rank.by_moment[moment])
    for category in STATES:
        yield row("allocated", category, "peak", states[category], getattr(rank, category))
    lasting = rank.parameters + rank.optimizer
    rest = estimated.steady.bytes - states["parameters"] - states["optimizer"]
    yield row("allocated", REST, "peak", rest, rank.allocated_peak - lasting)
    for meter, bounds, measured in (
        ("reserved", estimated.reserved, rank.reserved_peak),
        ("device", estimated.device, rank.device_peak),
        ("host", Range(low=estimated.host, point=estimated.host, high=estimated.host), rank.host_peak),
    ):
        if measured is not None:
            yield row(meter, "all", "peak", bounds.low, measured, bounds.high)
