"""Every row of a file estimated, and the numbers by which all of them are judged."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any

from memcalc.bench.boundary import outcomes, states
from memcalc.bench.rows import METERS, Row
from memcalc.bench.score import Score, Summary, summarise
from memcalc.bench.words import Said, say
from memcalc.errors import InputError
from memcalc.estimate import Estimate, estimate, verdict
from memcalc.hardware import GPUS
from memcalc.outside import outside
from memcalc.plan import Plan
from memcalc.reserved import replayed, reserved_range

__all__ = ["by_meter", "by_source", "reasons", "result", "score"]

GIB = 2**30


def score(row: Row) -> Score:
    """One row: estimated in the meter it was measured with, or skipped with all the reasons."""
    said = say(row)
    if said.plan is None:
        return _skipped(row, said, [lack.reason for lack in said.lacks])
    try:
        found = _estimate(said.plan, said.stage)
    except InputError as error:
        return _skipped(row, said, [f"no estimate: {str(error).replace(';', ',')}"])
    if said.lacks and found.steady.moment != "step":
        return _skipped(row, said, [lack.reason for lack in said.lacks])
    size = _reading(row, said, found) / GIB
    boundary = row.meter == "boundary"
    allocated, tried = row.gib("allocated_gib"), row.gib("tried_gib")
    assumptions = [*said.assumptions, *(f"{lack.reason}: not counted, the peak is in the step" for lack in said.lacks)]
    return Score(
        id=row.id,
        metric=row.metric,
        measured_gib=row.measured,
        estimated_gib=round(size, 4),
        error_pct=None if row.measured is None else round(100 * (size / row.measured - 1), 2),
        verdict=_verdict(said, found),
        moment=found.steady.moment,
        high_gib=_high(row, said, found),
        assumptions=tuple(assumptions),
        allocated_gib=round(found.peak.bytes / GIB, 4) if boundary else None,
        needed_gib=round(allocated + tried, 4) if row.metric == "OOM" and allocated and tried else None,
        state_bound=states(found.timeline) > said.usable.high if boundary and said.usable else None,
    )


@lru_cache(maxsize=1)
def _estimate(plan: Plan, stage: int | None) -> Estimate:
    """A run that was read with several meters stands in rows one after the other."""
    return estimate(plan, stage)


def _verdict(said: Said, found: Estimate) -> str:
    """The estimate's verdict on the row's own card; where its memory is known between bounds, a sure one only."""
    if said.usable is None:
        return "unknown"
    card = found.plan.gpu_row or next(iter(GPUS.values()))
    least, most = (
        verdict(found.plan, found.device, dataclasses.replace(card, usable_bytes=usable)) for usable in said.usable
    )
    return least if least == most else "tight"


def _skipped(row: Row, said: Said, lacks: Sequence[str]) -> Score:
    return Score(
        id=row.id,
        metric=row.metric,
        measured_gib=row.measured,
        assumptions=said.assumptions,
        skipped="; ".join(lacks),
    )


def _reading(row: Row, said: Said, found: Estimate) -> float:
    """Bytes in the row's meter; a boundary is held against the device."""
    if row.meter == "allocated":
        # The counter is of blocks, which keep what is too small to split off (c10/cuda/CUDACachingAllocator.cpp).
        return (found.held or replayed(found.plan, found.timeline)).peak_allocated
    card = found.plan.gpu_row
    rest = outside(found.plan, card, said.context).point
    # A full card makes the allocator give cached segments back. What ran cannot have needed more than the card;
    # where the estimate does, it shall show, so the replay is run again without an end.
    capacity = said.usable.low - rest if said.usable else None
    held = reserved_range(found.plan, found.timeline, capacity=capacity, free=found.held).point
    return held if row.meter == "reserved" else held + rest


def _high(row: Row, said: Said, found: Estimate) -> float | None:
    """The high end of the row's meter, GiB; None where the meter is no range, or the row is a boundary."""
    if row.meter not in ("reserved", "device"):
        return None
    rest = outside(found.plan, found.plan.gpu_row, said.context).high if row.meter == "device" else 0
    return round((found.reserved.high + rest) / GIB, 4)


def by_meter(rows: Iterable[Row], scores: Iterable[Score]) -> dict[str, Summary]:
    """A summary for each meter that occurs: readings of different meters are never mixed."""
    return {meter: summary for (_, meter), summary in _grouped(rows, scores, whole=True).items()}


def by_source(rows: Iterable[Row], scores: Iterable[Score]) -> dict[tuple[str, str], Summary]:
    """A summary for each publishing project and meter."""
    return _grouped(rows, scores, whole=False)


def _grouped(rows: Iterable[Row], scores: Iterable[Score], *, whole: bool) -> dict[tuple[str, str], Summary]:
    groups: dict[tuple[str, str], list[Score]] = {}
    for row, found in zip(rows, scores, strict=True):
        groups.setdefault(("" if whole else row.group, row.meter), []).append(found)
    order = list(dict.fromkeys(METERS.values()))
    keys = sorted(groups, key=lambda key: (key[0].lower(), order.index(key[1])))
    return {key: summarise(groups[key]) for key in keys}


def reasons(scores: Iterable[Score]) -> list[tuple[str, int, int]]:
    """(what lacks, rows that need it, rows that need nothing else), most rows first."""
    needed: Counter[str] = Counter()
    alone: Counter[str] = Counter()
    for found in scores:
        if found.skipped is None:
            continue
        parts = found.skipped.split("; ")
        needed.update(parts)
        if len(parts) == 1:
            alone.update(parts)
    return [
        (reason, needed[reason], alone[reason]) for reason in sorted(needed, key=lambda r: (-alone[r], -needed[r], r))
    ]


def result(rows: Sequence[Row], scores: Sequence[Score], shown: Sequence[Score]) -> dict[str, Any]:
    """All of it as plain JSON values; ``shown`` are the rows to list."""
    found = outcomes(scores)
    return {
        "summary": summarise(scores).to_dict(),
        "meters": {meter: summary.to_dict() for meter, summary in by_meter(rows, scores).items()},
        **({"boundary": found.to_dict()} if found else {}),
        "sources": [
            {"source": source, "meter": meter}
            | summary.to_dict()
            | {"under_estimates": summary.under_estimates, "above": summary.above, "skipped": summary.skipped}
            for (source, meter), summary in by_source(rows, scores).items()
        ],
        "rows": [_plain(found) for found in shown],
    }


def _plain(found: Score) -> dict[str, Any]:
    """A score as JSON values; what only boundary rows, or only rows with a range, have stands only there."""
    values = dataclasses.asdict(found) | {"assumptions": list(found.assumptions)}
    if METERS[found.metric] != "boundary":
        for name in ("allocated_gib", "needed_gib", "state_bound"):
            del values[name]
    if found.high_gib is None:
        del values["high_gib"]
    return values
