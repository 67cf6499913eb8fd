"""All rows of a file timed, and the tables that are made of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from memcalc.bench.score import percentile
from memcalc.bench.throughput.knobs import KNOBS
from memcalc.bench.throughput.score import Contest, Scored, Summary, contests, summarise

__all__ = [
    "HALVES",
    "Coverage",
    "Knob",
    "Report",
    "Source",
    "by_knob",
    "by_source",
    "coverage",
    "judged",
    "reasons",
    "report",
    "result",
    "worst",
]

HALVES = ("calibration", "never used")


@dataclass(frozen=True, kw_only=True, slots=True)
class Knob:
    """Pairs whose plans differ in one knob, and in what else."""

    name: str
    pairs: int
    right: int
    alone: int
    """Pairs that differ in nothing else."""
    alone_right: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """What a file says of the time model."""

    rows: tuple[Scored, ...]
    judged: tuple[Contest, ...]
    """Contests that count."""
    alone: tuple[Scored, ...]
    """Rows that stand alone, with a speed that a clock would show."""

    @property
    def summary(self) -> Summary:
        return summarise(self.judged, self.alone)

    def only(self, keep: Callable[[Scored], bool]) -> Report:
        """A part, chosen by rows; a contest belongs where its first row does."""
        return Report(
            rows=tuple(filter(keep, self.rows)),
            judged=tuple(contest for contest in self.judged if keep(contest.rows[0])),
            alone=tuple(filter(keep, self.alone)),
        )

    def half(self, name: str) -> Summary:
        """The summary of the sources of one half."""
        return self.only(lambda row: row.run.row.half == name).summary


def judged(contest: Contest, comparison: str, tiers: Sequence[str]) -> bool:
    """Its rows are compared in that way, and the worst of their tiers is among those."""
    rows = [row.run.row for row in contest.rows]
    return all(row.comparison == comparison for row in rows) and max(row.tier or "C" for row in rows) in tiers


def report(rows: Iterable[Scored], comparison: str = "strict", tiers: Sequence[str] = ("A", "B")) -> Report:
    """Contests of one kind, and rows that stand alone, both of some tiers."""
    scored = tuple(rows)
    return Report(
        rows=scored,
        judged=tuple(each for each in contests(scored) if judged(each, comparison, tiers)),
        alone=tuple(row for row in scored if row.run.row.comparison == "none" and (row.run.row.tier or "C") in tiers),
    )


def by_knob(groups: Iterable[Contest]) -> list[Knob]:
    """A line for each knob that differs anywhere, most pairs first."""
    pairs = [(pair, set(pair.knobs)) for group in groups for pair in group.pairs]
    found = []
    for name in KNOBS:
        having = [(pair, knobs) for pair, knobs in pairs if name in knobs]
        alone = [pair for pair, knobs in having if knobs == {name}]
        found.append(
            Knob(
                name=name,
                pairs=len(having),
                right=sum(pair.right for pair, _ in having),
                alone=len(alone),
                alone_right=sum(pair.right for pair in alone),
            )  # fmt: skip
        )
    return sorted((knob for knob in found if knob.pairs), key=lambda knob: -knob.pairs)


@dataclass(frozen=True, kw_only=True, slots=True)
class Coverage:
    """What a predicted range is worth: of the runs of one half whose seconds may be compared."""

    half: str
    rows: int
    median_error_pct: float | None
    """Of the absolute errors of the rate; None without rows, as the next."""
    in_range_pct: float | None
    """Runs whose measured time lies in the predicted range."""


def coverage(rows: Iterable[Scored]) -> list[Coverage]:
    """A line for each half, of runs in contests and of those that stand alone."""
    known = [row for row in rows if row.error is not None and row.run.comparable]
    found = []
    for half in HALVES:
        mine = [row for row in known if row.run.row.half == half]
        middle = percentile([100 * abs(row.error or 0.0) for row in mine], 0.5)
        inside = round(100 * sum(row.inside is True for row in mine) / len(mine), 1) if mine else None
        off = None if middle is None else round(middle, 1)
        found.append(Coverage(half=half, rows=len(mine), median_error_pct=off, in_range_pct=inside))
    return found


def reasons(rows: Iterable[Scored]) -> list[tuple[str, int]]:
    """(why rows are skipped, how many), most first."""
    counts = Counter(lack.reason for row in rows if row.run.plan is None for lack in row.run.lacks)
    return sorted(counts.items(), key=lambda item: (-item[1], item[0]))


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """The rows of one project that are in one half."""

    name: str
    half: str
    summary: Summary
    bias_pct: float | None
    """Median of the signed errors of the clock: above 0 the predicted rate is too high."""
    skipped: int


def by_source(found: Report) -> list[Source]:
    """A line for each project and half, by name."""
    keys = {(row.run.row.group, row.run.row.half) for row in found.rows}
    table = []
    for key in sorted(keys, key=lambda pair: (pair[0].lower(), pair[1])):
        mine = found.only(lambda row, key=key: (row.run.row.group, row.run.row.half) == key)  # type: ignore[misc]
        bias = percentile([100 * row.error for row in mine.alone if row.error is not None], 0.5)
        table.append(
            Source(
                name=key[0],
                half=key[1],
                summary=mine.summary,
                bias_pct=None if bias is None else round(bias, 2),
                skipped=sum(row.run.plan is None for row in mine.rows),
            )  # fmt: skip
        )
    return table


def worst(groups: Iterable[Contest], count: int) -> list[Contest]:
    """The contests with the most to regret, then with the most pairs wrong."""

    def badness(group: Contest) -> tuple[float, int]:
        return group.regret or 0.0, sum(not pair.right for pair in group.pairs)

    return sorted((group for group in groups if badness(group) > (0.0, 0)), key=badness, reverse=True)[:count]


def result(found: Report, shown: Sequence[Contest]) -> dict[str, Any]:
    """All of it as plain JSON values; ``shown`` are the contests to list."""
    return {
        "summary": found.summary.to_dict(),
        "halves": {half: found.half(half).to_dict() for half in HALVES},
        "range": [asdict(each) for each in coverage(found.rows)],
        "knobs": [
            {"knob": each.name, "pairs": each.pairs, "right": each.right, "alone": each.alone, "alone_right": each.alone_right}
            for each in by_knob(found.judged)
        ],
        "sources": [
            {"source": line.name, "half": line.half, **line.summary.to_dict(), "bias_pct": line.bias_pct, "skipped": line.skipped}
            for line in by_source(found)
        ],
        "skipped": [{"reason": reason, "rows": count} for reason, count in reasons(found.rows)],
        "groups": [_plain(group) for group in shown],
    }  # fmt: skip


def _plain(group: Contest) -> dict[str, Any]:
    pairs, regret = group.pairs, group.regret
    return {
        "group": group.name,
        "source": group.source,
        "half": group.half,
        "pairs": len(pairs),
        "pairs_right": sum(pair.right for pair in pairs),
        "chosen": group.chosen.id if group.chosen else None,
        "regret_pct": None if regret is None else round(100 * regret, 2),
        "rows": [_row(row) for row in group.rows],
    }


def _row(row: Scored) -> dict[str, Any]:
    return {
        "id": row.id,
        "metric": row.run.row.metric,
        "value": row.run.row.measured,
        "measured": row.measured,
        "predicted": row.predicted,
        "error_pct": None if row.error is None else round(100 * row.error, 2),
        "skipped": row.run.skipped,
        "assumptions": list(row.run.assumptions),
    }
