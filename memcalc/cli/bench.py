"""``memcalc bench``: published measurements against estimates."""

from __future__ import annotations

import json
from pathlib import Path

import click

from memcalc.bench import run
from memcalc.bench.boundary import REACHES, Outcomes, outcomes
from memcalc.bench.rows import Row, read_rows, select
from memcalc.bench.score import Score, Summary, worst
from memcalc.bench.throughput.rows import COMPARISONS
from memcalc.cli.kinds import File, Name, Whole
from memcalc.cli.progress import counted
from memcalc.errors import InputError
from memcalc.tables import FORMATS, render

__all__ = ["command"]

SUMMARY = (
    "source",
    "meter",
    "rows",
    "skipped",
    "median %",
    "90th %",
    "bias %",
    "under",
    "above range",
    "false fits",
    "false OOMs",
)
ROWS = ("id", "metric", "measured GiB", "estimated GiB", "error %", "verdict", "moment", "skipped")

EXAMPLES = """\b
Examples:
  memcalc bench
  memcalc bench measured.csv --use score --worst 10
  memcalc bench measured.csv --tier A --source torchtitan --format json
  memcalc bench --throughput --worst 5
  memcalc bench --throughput speeds.csv --cmp per_token --format json
"""

FACTS = Path(run.__file__).with_name("facts.csv")


@click.command(epilog=EXAMPLES)
@click.argument("file", required=False, type=File())
@click.option("--throughput", is_flag=True, help="FILE holds training speeds: judge the order of plans and the clock.")
@click.option(
    "--cmp",
    "comparison",
    type=Name("comparison", COMPARISONS),
    metavar="KIND",
    help=f"With --throughput, groups compared so: {', '.join(COMPARISONS)}.  [default: strict]",
)
@click.option("--tier", type=Name("tier", ("a", "b", "c")), metavar="A|B|C", help="Only rows whose notes say so.")
@click.option("--use", metavar="WORD", help="Only rows with this word in the column 'use', such as score.")
@click.option("--source", metavar="TEXT", help="Only rows with this text in their source.")
@click.option("--worst", "count", type=Whole(), metavar="N", help="List the N rows that are furthest off.")
@click.option("--format", "format_", type=Name("format", FORMATS), default="table", metavar="KIND",
              help=f"One of: {', '.join(FORMATS)}.  [default: table]")  # fmt: skip
def command(
    file: Path | None,
    throughput: bool,
    comparison: str | None,
    tier: str | None,
    use: str | None,
    source: str | None,
    count: int | None,
    format_: str,
) -> None:
    """Hold estimates to memory, or with --throughput to speed, that others measured and published.

    FILE is a CSV table with one run a row; without it, the table that comes with memcalc. A row that memcalc
    has no terms for is skipped and counted, with the reason. JSON and CSV list every row, or with --worst those.

    Speeds are judged by groups of rows among which a plan can be chosen: pairs that differ by 5 % or more and are in the
    right order, and the time lost by taking the plan that the time model says is fastest (regret).
    """
    if throughput:
        if use:
            raise InputError(f"--use {use}: a table of speeds has no column 'use'; choose by --tier, --source or --cmp")
        from memcalc.cli.bench_throughput import show  # half of the command's modules, for one of its two questions

        chosen = {"tier": (tier or "").upper(), "source": source or "", "comparison": comparison or ""}
        show(file, **chosen, count=count, format_=format_)
        return
    if comparison:
        raise InputError(f"--cmp {comparison} is for tables of speeds; add --throughput")
    rows = select(read_rows(file or FACTS), tier=tier and tier.upper(), use=use, source=source)
    scores = [run.score(row) for row in counted(rows, "rows")]
    furthest = worst(scores, count) if count else []
    if format_ == "json":
        click.echo(json.dumps(run.result(rows, scores, furthest if count else scores), indent=2))
    elif format_ == "csv":
        click.echo(render([_row(found) for found in (furthest if count else scores)], ROWS, "csv"))
    else:
        _report(rows, scores, furthest, format_)


def _report(rows: list[Row], scores: list[Score], furthest: list[Score], format_: str) -> None:
    table = [_summary(source, meter, each) for (source, meter), each in run.by_source(rows, scores).items()]
    table += [_summary("all", meter, each) for meter, each in run.by_meter(rows, scores).items()]
    click.echo(render(table, SUMMARY, format_))
    if found := outcomes(scores):
        click.echo()
        click.echo(render(_outcomes(found), ("runs of which only the outcome is known", "rows", "right"), format_))
    if furthest:
        click.echo()
        click.echo(render([_row(found)[:-1] for found in furthest], ROWS[:-1], format_))
    skipped = run.reasons(scores)
    if skipped:
        click.echo()
        click.echo(render(skipped, ("skipped for want of", "rows", "only for that"), format_))


def _outcomes(found: Outcomes) -> list[tuple[object, ...]]:
    return [
        ("out of memory, the states alone exceed the card", found.state_bound, "-"),
        ("out of memory otherwise: said does-not-fit or tight", found.open_ooms, found.open_refused),
        ("fitted: said fits or tight", found.fitted, found.fitted_accepted),
        (f"peak at least {REACHES} of allocated and tried", found.messages, found.messages_reached),
    ]


def _summary(source: str, meter: str, each: Summary) -> tuple[object, ...]:
    percents = (each.median_abs_error_pct, each.p90_abs_error_pct, each.bias_pct)
    cells = [_percent(value, signed=index == 2) for index, value in enumerate(percents)]
    outcomes = (each.false_fits, each.false_ooms) if meter == "boundary" else ("-", "-")
    return (
        source,
        meter,
        each.rows,
        each.skipped,
        *cells,
        "-" if meter == "boundary" else each.under_estimates,
        each.above if meter in ("reserved", "device") else "-",
        *outcomes,
    )


def _row(found: Score) -> tuple[object, ...]:
    return (
        found.id,
        found.metric,
        "" if found.measured_gib is None else f"{found.measured_gib:.3f}",
        "" if found.estimated_gib is None else f"{found.estimated_gib:.3f}",
        "" if found.error_pct is None else _percent(found.error_pct, signed=True),
        found.verdict or "",
        found.moment or "",
        found.skipped or "",
    )


def _percent(value: float | None, *, signed: bool) -> str:
    return "-" if value is None else f"{value:+.1f}" if signed else f"{value:.1f}"
