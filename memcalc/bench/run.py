"""Every row of a file estimated, and the numbers by which all of them are judged."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from memcalc.bench.rows import METERS, Row
from memcalc.bench.score import Score, Summary, summarise
from memcalc.bench.words import Said, say
from memcalc.errors import InputError
from memcalc.estimate import Estimate, estimate
from memcalc.hardware import GPUS, Bounds
from memcalc.reserved import replayed

__all__ = ["by_meter", "by_source", "reasons", "result", "score"]

GIB = 2**30


def score(row: Row) -> Score:
    """One row: estimated in the meter it was measured with, or skipped with all the reasons."""
    said = say(row)
    if said.plan is None:
        return _skipped(row, said, [lack.reason for lack in said.lacks])
    try:
        found = estimate(said.plan, said.stage)
    except InputError as error:
        return _skipped(row, said, [f"no estimate: {str(error).replace(';', ',')}"])
    if said.lacks and found.peak.moment != "step":
        return _skipped(row, said, [lack.reason for lack in said.lacks])
    size = _reading(row, said, found) / GIB
    assumptions = [*said.assumptions, *(f"{lack.reason}: not counted, the peak is in the step" for lack in said.lacks)]
    return Score(
        id=row.id,
        metric=row.metric,
        measured_gib=row.measured,
        estimated_gib=round(size, 4),
        error_pct=None if row.measured is None else round(100 * (size / row.measured - 1), 2),
        verdict=found.verdict if said.same_card else "unknown",
        moment=found.peak.moment,
        assumptions=tuple(assumptions),
    )


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
        return replayed(found.plan, found.timeline, said.allocator).peak_allocated
    card = found.plan.gpu_row
    cards = [card] if card else list(GPUS.values())
    context = said.context or _hull([card.context for card in cards])
    nccl = _hull([card.nccl for card in cards]) if found.plan.ranks > 1 else Bounds(0, 0)
    outside = (sum(context) + sum(nccl)) // 2
    # A full card makes the allocator give cached segments back. What ran cannot have needed more than the card;
    # where the estimate does, it shall show, so the replay is run again without an end.
    capacity = card.usable_bytes - outside if card and said.same_card else None
    held = replayed(found.plan, found.timeline, said.allocator, capacity=capacity)
    if held.refused:
        held = replayed(found.plan, found.timeline, said.allocator)
    return held.peak_reserved if row.meter == "reserved" else held.peak_reserved + outside


def _hull(bounds: list[Bounds]) -> Bounds:
    return Bounds(min(each.low for each in bounds), max(each.high for each in bounds))


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
    return {
        "summary": summarise(scores).to_dict(),
        "meters": {meter: summary.to_dict() for meter, summary in by_meter(rows, scores).items()},
        "sources": [
            {"source": source, "meter": meter}
            | summary.to_dict()
            | {"under_estimates": summary.under_estimates, "skipped": summary.skipped}
            for (source, meter), summary in by_source(rows, scores).items()
        ],
        "rows": [dataclasses.asdict(found) | {"assumptions": list(found.assumptions)} for found in shown],
    }
