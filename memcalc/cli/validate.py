"""``memcalc validate``: many small plans run for real, each against its estimate."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import click

from memcalc.cli.kinds import File, Name
from memcalc.errors import InputError, RunError
from memcalc.tables import FORMATS, render
from memcalc.units import format_bytes
from memcalc.validate import MODEL_NAMES, STRATEGY_NAMES, TOLERANCE, WORLDS, Result, loss_problems, matrix, validate

__all__ = ["command"]

HEADERS = ("plan", "estimated", "measured", "error %", "states", "result")

EXAMPLES = """\b
Examples:
  memcalc validate --quick
  memcalc validate --model gpt2-tiny --strategy fsdp-full-shard --ranks 2
  memcalc validate --format markdown --out validation
"""


@click.command(epilog=EXAMPLES)
@click.option("--quick", is_flag=True, help="About half: none with two of bfloat16, checkpointing, 4 ranks.")
@click.option("--model", "models", type=Name("model", MODEL_NAMES), multiple=True, help="Only this model; repeatable.")
@click.option("--strategy", "strategies", type=Name("strategy", STRATEGY_NAMES), multiple=True, help="Only this one.")
@click.option(
    "--ranks", "worlds", type=Name("ranks", [str(n) for n in WORLDS]), multiple=True, help="Only so many ranks."
)
@click.option("--tolerance", type=float, default=TOLERANCE, show_default=True, help="Percent of the allocated peak.")
@click.option("--out", type=File(), metavar="DIR", help="Keep plans, logs and measurements here.")
@click.option("--format", "format_", type=Name("format", FORMATS), default="table", metavar="KIND",
              help=f"One of: {', '.join(FORMATS)}.  [default: table]")  # fmt: skip
def command(
    quick: bool,
    models: tuple[str, ...],
    strategies: tuple[str, ...],
    worlds: tuple[str, ...],
    tolerance: float,
    out: Path | None,
    format_: str,
) -> None:
    """Train small models with every strategy on this machine's CPUs and compare with the estimates.

    oneDNN is off in these runs: its scratch memory differs between CPUs.

    Exits with 1 when a peak is off by more than the tolerance, when parameters, gradients or optimizer
    states are not equal to the byte, or when fp32 losses differ between strategies.
    """
    if not 0 <= tolerance <= 100:
        raise InputError(f"tolerance {tolerance} must be from 0 to 100 percent")
    plans = matrix(
        quick=quick,
        models=models or MODEL_NAMES,
        strategies=strategies or STRATEGY_NAMES,
        worlds=[int(n) for n in worlds] or WORLDS,
    )
    if not plans:
        raise InputError("no plan of the matrix is left; single runs on 1 rank, the others on 2 and 4")
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="memcalc-") if out is None else nullcontext(str(out)) as folder:
        results = validate(plans, out=Path(folder), tolerance=tolerance, show=_progress(len(plans), format_))
    if format_ != "table":
        click.echo(render([_row(result) for result in results], HEADERS, format_))
    problems = loss_problems(results)
    for line in problems:
        click.echo(line, err=True)
    failed = [result for result in results if result.problem]
    click.echo(
        f"{len(results) - len(failed)} of {len(results)} plans within {tolerance:g} % in {time.monotonic() - started:.0f} s",
        err=True,
    )
    if failed or problems:
        raise RunError(f"{len(failed)} plans off, {len(problems)} losses differ")


def _progress(count: int, format_: str) -> Callable[[Result], None]:
    """Shows each result when it is there: the table's own line, or a counter beside another format."""
    width = max(len(model) for model in MODEL_NAMES) + max(len(name) for name in STRATEGY_NAMES) + 16
    done = 0
    if format_ == "table":
        click.echo(f"{'plan':{width}} {'estimated':>12} {'measured':>12} {'error %':>8}  states  result")

    def show(result: Result) -> None:
        nonlocal done
        done += 1
        if format_ != "table":
            click.echo(f"{done} of {count}: {result.name} {result.problem or 'ok'}", err=True)
            return
        name, estimated, measured, error, states, verdict = _row(result)
        click.echo(f"{name:{width}} {estimated:>12} {measured:>12} {error:>8}  {states:6}  {verdict}")

    return show


def _row(result: Result) -> tuple[str, str, str, str, str, str]:
    verdict = result.problem or "ok"
    if result.comparison is None:
        return result.name, "-", "-", "-", "-", verdict
    peak = result.comparison.peak
    percent = "-" if peak.error_percent is None else f"{peak.error_percent:+.3f}"
    states = "equal" if result.comparison.states_equal() else "differ"
    return (
        result.name,
        format_bytes(peak.low, binary=True),
        format_bytes(peak.measured, binary=True),
        percent,
        states,
        verdict,
    )
