"""A plan's memory against its micro batch, its tokens or its GPUs, for several strategies, and where it stops fitting."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from memcalc.assumptions import activations_known
from memcalc.errors import InputError, PlanError
from memcalc.estimate import estimate, usable_bytes
from memcalc.plan import Plan
from memcalc.units import format_both, format_bytes, format_count, things

__all__ = ["AGAINST", "LABEL", "Line", "Point", "Sweep", "sweep"]

AGAINST: Mapping[str, str] = MappingProxyType({"micro-batch": "micro_batch", "seq-len": "tokens", "gpus": "ranks"})
"""What stands on the x axis, and the Plan's field it is."""

LABEL: Mapping[str, str] = MappingProxyType(
    {"micro-batch": "micro batch", "seq-len": "tokens per sample", "gpus": "GPUs"}
)

FIRST = {"micro-batch": 1, "seq-len": 128, "gpus": 1}
MOST = {"micro-batch": 1024, "seq-len": 2**20, "gpus": 1024}
"""Where the x axis ends at the latest."""

OPEN = 6
"""Doublings that are shown where no card says when to stop."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """One plan: its value on the x axis and what it takes on its fullest rank, in bytes."""

    value: int
    peak: int
    low: int
    high: int
    """What the device shows, between these."""
    verdict: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """One strategy."""

    strategy: str
    points: tuple[Point, ...]
    edge: int | None
    """The last value that fits for sure (of GPUs: the first); None where none does, or no card was named."""
    left_out: str
    """Why there are values without a point; blank where there are none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sweep:
    """All lines of a figure."""

    base: Plan
    against: str
    lines: tuple[Line, ...]
    capacity: int | None

    @property
    def top(self) -> int:
        """The largest number of bytes there is."""
        return max([self.capacity or 0, *(point.high for line in self.lines for point in line.points)])

    @property
    def unbounded(self) -> str:
        """Why no strategy has an edge."""
        return "on CPU cores, which no card bounds" if self.base.device == "cpu" else "no card was named"

    @property
    def ends(self) -> str:
        """Where the model ends before the figure does, in a sentence; blank where it does not."""
        model = self.base.model
        most = model.context - model.position_offset
        last = max((point.value for line in self.lines for point in line.points), default=0)
        if self.against != "seq-len" or not most or last < most:
            return ""
        return f"{model.name}'s context ends at {things(most, 'token')}."

    def edge(self, line: Line) -> str:
        """Where one strategy stops fitting, in words.

        >>> from memcalc.models import MODELS
        >>> plan = Plan(model=MODELS["gpt2"], tokens=1024, micro_batch=1, gpu="t4")
        >>> found = sweep(plan, "micro-batch", ["single"])
        >>> found.edge(found.lines[0])
        'fits up to micro batch 8'
        """
        if self.capacity is None:
            return self.unbounded
        if line.edge is None:
            return "none of these fits for sure"
        value, shown = format_count(line.edge), [point.value for point in line.points]
        if self.against == "gpus":
            fewest = ", the fewest shown" * (line.edge == shown[0] > 1)
            return f"fits from {value} GPU{'s' * (line.edge > 1)} on{fewest}"
        last = {"micro-batch": f"micro batch {value}", "seq-len": f"{value} tokens"}[self.against]
        return f"fits up to {last}{', the most shown' * (line.edge == shown[-1])}"

    def text(self) -> str:
        """What the figure shows, for those who do not see it."""
        card = f" {self.base.gpu} has {format_both(self.capacity)}." if self.capacity is not None else ""
        lines = [
            f"{line.strategy}: {format_bytes(line.points[0].peak)} at {line.points[0].value} to "
            f"{format_bytes(line.points[-1].peak)} at {line.points[-1].value}, {self.edge(line)}."
            for line in self.lines
            if line.points
        ]
        return f"Allocated peak of {self.base.model.name} against {LABEL[self.against]}.{card} {' '.join(lines + [self.ends] * bool(self.ends))}"


def sweep(
    base: Plan,
    against: str,
    strategies: Sequence[str] = (),
    *,
    values: Sequence[int] = (),
    told: Callable[[str], None] = lambda _: None,
) -> Sweep:
    """Estimate the plan at each value, for each strategy; without ``values`` at doublings, until nothing fits.

    ``told`` is called with each strategy before it is estimated. Raises InputError where the value changes nothing, and
    where no value makes sense with any strategy.
    """
    _check(base, against)
    names = tuple(dict.fromkeys(strategies)) or (base.strategy,)
    card = base.gpu_row
    capacity = None if card is None else usable_bytes(base, card)
    chosen = tuple(sorted(set(values))) or tuple(_doublings(base, against))
    lines = []
    for name in names:
        told(name)
        lines.append(_line(base, against, name, chosen, capacity, fixed=bool(values)))
    if not any(line.points for line in lines):
        raise InputError(lines[0].left_out)
    return Sweep(base=base, against=against, lines=tuple(lines), capacity=capacity)


def _check(base: Plan, against: str) -> None:
    if base.model.module.factory:
        raise InputError(
            f"what {base.model.name} keeps is known from a rehearsal of each plan, too slow for a figure of many; "
            "compare some with memcalc estimate --module"
        )
    if against == "seq-len" and not base.tokens:
        raise InputError(f"--against seq-len does not apply to {base.model.name}, which reads no tokens")
    if against != "gpus" and (not activations_known(base) or base.model.layer_bytes):
        raise InputError(f"--against {against} changes nothing: no activations of {base.model.name} are counted by it")


def _doublings(base: Plan, against: str) -> Iterator[int]:
    value, most = FIRST[against], MOST[against]
    if against == "seq-len":
        value, most = (
            min(FIRST[against], base.tokens),
            max(base.model.context - base.model.position_offset, base.tokens),
        )
    while value < most:
        yield value
        value *= 2
    yield most


def _line(base: Plan, against: str, strategy: str, values: Sequence[int], capacity: int | None, *, fixed: bool) -> Line:
    points: list[Point] = []
    why = ""
    for value in values:
        try:
            points.append(_point(base, against, strategy, value))
        except PlanError as error:
            why = why or f"{strategy}, {against} {value}: {error}"
            if points:
                break
            continue
        if fixed:
            continue
        if capacity is None and len(points) > OPEN:
            break
        over = [point for point in points if capacity is not None and point.low > capacity]
        if against == "gpus":
            fits = [point for point in points if point.verdict == "fits"]
            if len(fits) > 2 and value >= base.ranks:
                break
        elif over:
            break
    return Line(
        strategy=strategy,
        points=tuple(points),
        edge=None if capacity is None else _edge(base, against, strategy, points),
        left_out=why,
    )


def _point(base: Plan, against: str, strategy: str, value: int) -> Point:
    changed: dict[str, Any] = {AGAINST[against]: value}
    plan = replace(base, strategy=strategy, **changed)
    found = estimate(plan)
    device = found.device
    return Point(value=value, peak=found.peak.bytes, low=device.low, high=device.high, verdict=found.verdict)


def _edge(base: Plan, against: str, strategy: str, points: Sequence[Point]) -> int | None:
    """The last value that fits for sure: exact, between the last point that does and the first that does not."""
    fits = [point.value for point in points if point.verdict == "fits"]
    if not fits or against == "gpus":
        return min(fits, default=None)
    low = max(fits)
    high = min((point.value for point in points if point.value > low), default=low + 1)
    while high - low > 1:
        middle = (low + high) // 2
        if _point(base, against, strategy, middle).verdict == "fits":
            low = middle
        else:
            high = middle
    return low
