"""``memcalc compare``: what a run was estimated to take against what it took."""

from __future__ import annotations

from pathlib import Path

import click

from memcalc.cli.kinds import File
from memcalc.compare import Comparison, Row, compare_run
from memcalc.tables import FORMATS, render
from memcalc.units import format_bytes

__all__ = ["command", "compare_table"]

HEADERS = ("rank", "meter", "category", "moment", "estimated", "measured", "error", "error %")
BYTES = (
    "rank",
    "meter",
    "category",
    "moment",
    "low_bytes",
    "high_bytes",
    "measured_bytes",
    "error_bytes",
    "error_percent",
    "instrument",
)

FIRST_STEP_ONLY = (
    "note: only the first step was metered; it lacks what lives from the second on, which is what the estimate is for"
)

EXAMPLES = """\b
Examples:
  memcalc compare run
  memcalc compare run --all-ranks --format csv > run.csv
"""


UNFINISHED = {
    "running": "the run is not done: it still runs, or its launcher was killed",
    "preempted": "the run was told to stop before its last step, and saved",
    "stopped": "the run was stopped before its last step",
    "failed": "the run failed before its last step",
}
"""What is said of a run by its status; nothing of one that is done."""


@click.command(epilog=EXAMPLES)
@click.argument("run_dir", type=File())
@click.option("--format", "format_", type=click.Choice(FORMATS), default="table", show_default=True)
@click.option("--all-ranks", is_flag=True, help="Every row of every rank, not only the peaks of the less full ones.")
def command(run_dir: Path, format_: str, all_ranks: bool) -> None:
    """Show estimated against measured memory of the run in RUN_DIR.

    The error is estimate minus measurement. The estimate is for the fullest rank.
    """
    comparison = compare_run(run_dir)
    click.echo(compare_table(comparison, format_, all_ranks=all_ranks or format_ in ("csv", "json")))
    if format_ in ("table", "markdown"):
        click.echo(f"\n{summary(comparison)}")


def compare_table(comparison: Comparison, format_: str = "table", *, all_ranks: bool = False) -> str:
    """The rows as text: sizes in words for people, whole bytes for programs."""
    rows = [
        row
        for row in comparison.rows
        if all_ranks or row.rank == comparison.fullest or row.category == "all" and row.moment == "peak"
    ]
    if format_ in ("csv", "json"):
        return render([_exact(row) for row in rows], BYTES, format_)
    return render([_words(row) for row in rows], HEADERS, format_)


def summary(comparison: Comparison) -> str:
    """Which rank was the fullest, how far off its peak the estimate was, and what measured it."""
    states = "equal to the byte" if comparison.states_equal() else "NOT equal"
    status = comparison.measurement.status
    instruments = ", ".join(dict.fromkeys(row.instrument for row in comparison.rows))
    return (
        f"fullest rank: {comparison.fullest}; allocated peak {_percent(comparison.peak)} % off; "
        f"parameters, gradients and optimizer states {states}\n"
        f"measured by: {instruments}"
        + (f"\n{FIRST_STEP_ONLY}" if comparison.first_step_only else "")
        + (f"\nnote: {UNFINISHED[status]}" if status in UNFINISHED else "")
    )


def _words(row: Row) -> list[object]:
    low, high = (format_bytes(size, binary=True) for size in (row.low, row.high))
    estimated = low if row.low == row.high else f"{low} to {high}"
    measured, error = format_bytes(row.measured, binary=True), format_bytes(row.error_bytes, binary=True)
    return [str(row.rank), row.meter, row.category, row.moment, estimated, measured, error, _percent(row)]


def _exact(row: Row) -> list[object]:
    percent = None if row.error_percent is None else round(row.error_percent, 4)
    return [
        row.rank,
        row.meter,
        row.category,
        row.moment,
        row.low,
        row.high,
        row.measured,
        row.error_bytes,
        percent,
        row.instrument,
    ]


def _percent(row: Row) -> str:
    if row.error_percent is None:
        return "-"
    text = f"{row.error_percent:+.2f}"
    return "0.00" if text in ("+0.00", "-0.00") else text
