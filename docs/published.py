"""Puts the tables of ``memcalc bench`` into validation/published.md and validation/throughput.md: `python docs/published.py`."""

from __future__ import annotations

import re
from pathlib import Path

from click.testing import CliRunner

from memcalc.bench.throughput.claims import CLAIMS, MISSES, Claim, held
from memcalc.bench.throughput.rows import read_timings
from memcalc.cli.bench import command
from memcalc.cli.bench_throughput import FACTS
from memcalc.tables import render

__all__ = ["PAGE", "SPEEDS", "claims", "refreshed", "refreshed_speeds"]

PAGE = Path(__file__).resolve().parent / "validation" / "published.md"
SPEEDS = PAGE.with_name("throughput.md")
OPTIONS = ["--format", "markdown", "--worst", "12"]
RESULTS = re.compile(r"^## Results\n.*?(?=^## )", re.MULTILINE | re.DOTALL)
RANKINGS = re.compile(r"^## Ranking facts\n.*?(?=^## )", re.MULTILINE | re.DOTALL)


def _results(options: list[str]) -> str:
    return f"## Results\n\n{CliRunner().invoke(command, options, catch_exceptions=False).stdout}\n"


def refreshed(text: str) -> str:
    """The page of memory with the tables of today."""
    tables = _results(OPTIONS)
    return RESULTS.sub(lambda match: tables, text)


def refreshed_speeds(text: str) -> str:
    """The page of speeds with the tables of today."""
    tables, facts = _results(["--throughput", *OPTIONS]), f"## Ranking facts\n\n{claims()}\n\n"
    return RANKINGS.sub(lambda match: facts, RESULTS.sub(lambda match: tables, text))


def claims() -> str:
    """A line for each ranking fact: measured, predicted, and why where it is missed."""
    rows = {row.id: row for row in read_timings(FACTS)}
    return render(
        [_line(claim, held(claim, rows).ratio) for claim in CLAIMS],
        ("fact", "says", "source", "measured", "predicted", "held"),
        "markdown",
    )


def _line(claim: Claim, ratio: float | None) -> tuple[object, ...]:
    said = "-" if ratio is None else f"{ratio:.2f}"
    return claim.fact, claim.says, claim.source, f"{claim.ratio:.2f}", said, MISSES.get(claim.name, "yes")


if __name__ == "__main__":
    for page, refresh in ((PAGE, refreshed), (SPEEDS, refreshed_speeds)):
        page.write_text(refresh(page.read_text(encoding="utf-8")), encoding="utf-8")
