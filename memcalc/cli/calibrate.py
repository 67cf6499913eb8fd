"""``memcalc calibrate``: the time model's numbers from this machine, or from published speeds."""

from __future__ import annotations

import json
import shlex
import sys
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import click

from memcalc.cli.kinds import File, Name, Whole
from memcalc.coefficient_table import COEFFICIENTS
from memcalc.coefficients import CALIBRATED, calibration_file, values
from memcalc.errors import InputError
from memcalc.files import check_output, write_text
from memcalc.tables import FORMATS, render

__all__ = ["command"]

EXAMPLES = """\b
Examples:
  memcalc calibrate
  memcalc calibrate --device cpu --ranks 2 --format json
  memcalc calibrate --show
  memcalc calibrate --published -o calibrated.json
  memcalc calibrate --published speeds.csv -o mine.json
"""
HEADERS = ("coefficient", "value", "before", "meaning")


@click.command(epilog=EXAMPLES)
@click.argument("file", required=False, type=File())
@click.option("--published", is_flag=True, help="Fit on published speeds (FILE, else those that come with memcalc).")
@click.option(
    "--device",
    type=Name("device", ("cpu", "cuda")),
    metavar="KIND",
    help="cpu or cuda.  [default: cuda if there is a GPU]",
)
@click.option(
    "--ranks", type=Whole(), metavar="N", help="Processes that measure together.  [default: 2, or 1 with one GPU]"
)
@click.option(
    "--output", "-o", type=click.Path(path_type=Path), metavar="FILE", help="Where to write; --show reads it."
)
@click.option("--show", is_flag=True, help="Measure nothing: print what is in use.")
@click.option("--format", "format_", type=Name("format", FORMATS), default="table", metavar="KIND",
              help=f"One of: {', '.join(FORMATS)}.  [default: table]")  # fmt: skip
def command(
    file: Path | None,
    published: bool,
    device: str | None,
    ranks: int | None,
    output: Path | None,
    show: bool,
    format_: str,
) -> None:
    """Measure how fast this machine is, and keep it: later recommendations for it use these numbers.

    It measures matrix products by width and dtype, memory, all-reduces between two ranks, the time to start an operation
    and, on a GPU, the CUDA context. The file is MEMCALC_CALIBRATION, else memcalc/calibration.json in the user's
    configuration folder; delete it to go back to the published numbers.

    With --published the coefficients that every machine shares are fitted on training speeds that others measured: on the
    rows of one half of the sources, the other half is never used. memcalc comes with the result of that command.
    """
    if show:
        _show(format_)
    elif published:
        _fit(file, output, format_)
    elif file is not None:
        raise InputError(f"{file}: a table of speeds is for --published; without it this machine is measured")
    else:
        _measure(device, ranks, output, format_)


def _said(what: str) -> None:
    click.echo(what, err=True)


def _rows(new: dict[str, float], before: dict[str, float]) -> list[tuple[Any, ...]]:
    return [(name, f"{value:.4g}", f"{before[name]:.4g}", COEFFICIENTS[name].meaning) for name, value in new.items()]


def _print(new: dict[str, float], before: dict[str, float], format_: str, extra: dict[str, Any]) -> None:
    if format_ == "json":
        click.echo(json.dumps({"coefficients": new, **extra}, indent=2))
    else:
        click.echo(render(_rows(new, before), HEADERS, format_))


def _show(format_: str) -> None:
    used, table = dict(values()), {name: row.value for name, row in COEFFICIENTS.items()}
    own = calibration_file()
    _print(used, table, format_, {"file": str(own) if own.is_file() else None})
    if format_ == "table":
        click.echo(f"\nthis machine: {own if own.is_file() else 'not measured; run memcalc calibrate'}")


def _measure(device: str | None, ranks: int | None, output: Path | None, format_: str) -> None:
    from memcalc.calibrate.machine import coefficients, measure, record
    from memcalc.machine import detect

    machine = detect()
    kind = device or ("cuda" if machine.gpus else "cpu")
    if kind == "cuda" and not machine.gpus:
        raise InputError("device cuda: this machine has no GPU; leave --device out")
    most = len(machine.gpus) if kind == "cuda" else machine.cores
    count = ranks or min(2, most)
    if count > most:
        raise InputError(f"ranks {count}: this machine has {most} {'GPUs' if kind == 'cuda' else 'cores'}")
    target = output or calibration_file()
    if output is None:
        target.parent.mkdir(parents=True, exist_ok=True)
    check_output(target)
    found = measure(kind, count, _said)
    write_text(target, record(found, datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC")))
    new = {name: float(f"{value:.4g}") for name, value in coefficients(found).items()}
    _print(new, dict(values()), format_, {"file": str(target), "measured": found})
    if format_ == "table":
        widths = [(each["dtype"], each["width"], f"{each['flops'] / 1e9:.4g}") for each in found["products"]]
        click.echo("\n" + render(widths, ("dtype", "width of a product", "GFLOP/s"), format_))
    used = target.resolve() == calibration_file().resolve()
    _said(
        f"written to {target}; recommendations for this machine use it{'' if used else f' with MEMCALC_CALIBRATION={shlex.quote(str(target))}'}"
    )


def _fit(file: Path | None, output: Path | None, format_: str) -> None:
    from memcalc.bench.throughput.plans import run_of
    from memcalc.bench.throughput.rows import read_timings
    from memcalc.bench.throughput.run import coverage
    from memcalc.bench.throughput.score import score
    from memcalc.calibrate.published import fit, text
    from memcalc.cli.bench_throughput import FACTS, RANGE, range_line

    target = output or CALIBRATED
    check_output(target)
    rows = read_timings(file or FACTS)
    found = fit(rows, _said)
    table = {name: row.value for name, row in COEFFICIENTS.items()}
    ranges = coverage(score(run_of(row), table | found.coefficients) for row in rows)
    write_text(target, text(found, (file or FACTS).name, ranges))
    extra = {"range": [asdict(each) for each in ranges], "file": str(target)}
    _print(found.coefficients, table, format_, extra)
    if format_ != "json":
        click.echo("\n" + render([range_line(each) for each in ranges], RANGE, format_))
    _said(f"written to {target}")
    sys.stdout.flush()
