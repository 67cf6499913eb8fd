"""``memcalc bench --throughput``: published training speeds against the time model."""

from __future__ import annotations

import json
from pathlib import Path

import click

from memcalc.bench.throughput import run
from memcalc.bench.throughput.plans import run_of
from memcalc.bench.throughput.rows import read_timings, select
from memcalc.bench.throughput.score import Contest, Scored, Summary, score
from memcalc.cli.progress import counted
from memcalc.tables import render

__all__ = ["FACTS", "RANGE", "range_line", "show"]

FACTS = Path(run.__file__).parent.parent / "throughput.csv"
SUMMARY = ("rows of", "groups", "pairs", "right %", "regret %: median", "90th", "clock off by %: median")
RANGE = ("rows of", "runs with a clock", "off by %: median", "in the predicted range %")
KNOBS = ("what differs", "pairs", "right %", "pairs that differ in nothing else", "right %")
SOURCES = ("source", "half", "groups", "pairs", "right %", "regret %", "clock off by %", "bias %", "skipped")
GROUPS = ("group", "half", "chosen", "regret %", "pairs", "right")
ROWS = ("group", "id", "metric", "value", "measured", "predicted", "error %", "skipped")


def show(file: Path | None, *, tier: str, source: str, comparison: str, count: int | None, format_: str) -> None:
    """Time every row of a file and print how well the time model chooses among them."""
    rows = select(read_timings(file or FACTS), tier=tier, source=source, comparison=comparison)
    kinds = comparison if comparison not in ("", "none") else "strict"
    found = run.report([score(run_of(row)) for row in counted(rows, "rows")], kinds, (tier,) if tier else ("A", "B"))
    furthest = run.worst(found.judged, count) if count else list(found.judged)
    if format_ == "json":
        click.echo(json.dumps(run.result(found, furthest), indent=2))
    elif format_ == "csv":
        listed = [row for group in furthest for row in group.rows] if count else list(found.rows)
        click.echo(render([_row(row) for row in listed], ROWS, "csv"))
    else:
        _tables(found, furthest if count else [], format_)


def _tables(found: run.Report, furthest: list[Contest], format_: str) -> None:
    parts = [(half, found.half(half)) for half in run.HALVES]
    click.echo(render([_summary(name, each) for name, each in (*parts, ("all", found.summary))], SUMMARY, format_))
    click.echo("\n" + render([range_line(each) for each in run.coverage(found.rows)], RANGE, format_))
    if knobs := run.by_knob(found.judged):
        table = [(k.name, k.pairs, _share(k.right, k.pairs), k.alone, _share(k.alone_right, k.alone)) for k in knobs]
        click.echo("\n" + render(table, KNOBS, format_))
    click.echo("\n" + render([_source(line) for line in run.by_source(found)], SOURCES, format_))
    if furthest:
        click.echo("\n" + render([_group(group) for group in furthest], GROUPS, format_))
    if skipped := run.reasons(found.rows):
        click.echo("\n" + render(skipped, ("skipped for want of", "rows"), format_))


def _summary(name: str, each: Summary) -> tuple[object, ...]:
    return (
        name, each.groups, each.pairs, _number(each.pairs_right_pct), _number(each.median_regret_pct),
        _number(each.p90_regret_pct), _number(each.mfu_median_error_pct),
    )  # fmt: skip


def range_line(each: run.Coverage) -> tuple[object, ...]:
    """A line of the table RANGE."""
    return each.half, each.rows, _number(each.median_error_pct), _number(each.in_range_pct)


def _source(line: run.Source) -> tuple[object, ...]:
    each = line.summary
    return (
        line.name, line.half, each.groups, each.pairs, _number(each.pairs_right_pct), _number(each.median_regret_pct),
        _number(each.mfu_median_error_pct), _number(line.bias_pct, signed=True), line.skipped,
    )  # fmt: skip


def _group(group: Contest) -> tuple[object, ...]:
    pairs, regret = group.pairs, group.regret
    right = sum(pair.right for pair in pairs)
    chosen = group.chosen.id if group.chosen else "-"
    return group.name, group.half, chosen, _number(None if regret is None else 100 * regret), len(pairs), right


def _row(row: Scored) -> tuple[object, ...]:
    timing = row.run.row
    return (
        timing.contest, row.id, timing.metric, "" if timing.measured is None else f"{timing.measured:g}",
        "" if row.measured is None else f"{row.measured:.6g}", "" if row.predicted is None else f"{row.predicted:.6g}",
        "" if row.error is None else f"{100 * row.error:+.1f}", row.run.skipped or "",
    )  # fmt: skip


def _number(value: float | None, *, signed: bool = False) -> str:
    return "-" if value is None else f"{value:+.1f}" if signed else f"{value:.1f}"


def _share(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f}" if whole else "-"
