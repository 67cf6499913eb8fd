"""``memcalc explain-meters``: what each part of nvidia-smi's number is."""

from __future__ import annotations

import dataclasses
import json

import click

from memcalc.cli.kinds import Bytes, Name
from memcalc.hardware import GPUS
from memcalc.meters import COUNTERS, explain
from memcalc.tables import FORMATS, render
from memcalc.units import format_bytes

__all__ = ["command"]

EXAMPLES = """\b
Examples:
  memcalc explain-meters --allocated 18561MiB --active 25765MiB --reserved 27000MiB
  memcalc explain-meters --allocated 12.1GiB --reserved 14.3GiB --device 15.6GiB --gpu a100-80gb
  memcalc explain-meters --reserved 2MiB --device 1008MiB --format json
"""


@click.command("explain-meters", epilog=EXAMPLES)
@click.option("--allocated", type=Bytes(), metavar="SIZE", help=f"{COUNTERS['allocated']}: the peak, not now.")
@click.option("--active", type=Bytes(), metavar="SIZE", help=f"{COUNTERS['active']}.")
@click.option("--reserved", type=Bytes(), metavar="SIZE", help=f"{COUNTERS['reserved']}.")
@click.option("--device", type=Bytes(), metavar="SIZE", help="Memory-Usage of nvidia-smi; write MiB, which it means.")
@click.option("--gpu", type=Name("GPU", GPUS), metavar="NAME", help="The card, for its ranges of context and NCCL.")
@click.option("--format", "format_", type=Name("format", FORMATS), default="table", show_default=True)
def command(
    allocated: int | None,
    active: int | None,
    reserved: int | None,
    device: int | None,
    gpu: str | None,
    format_: str,
) -> None:
    """Take apart what a GPU's meters show: tensors, torch's cache, and what is not torch's.

    Give at least two meters, each read over the same run.
    """
    found = explain(
        allocated=allocated, active=active, reserved=reserved, device=device, gpu=GPUS[gpu] if gpu else None
    )
    if format_ == "json":
        click.echo(json.dumps(dataclasses.asdict(found), indent=2))
        return
    if format_ == "csv":
        rows = [(part.name, part.bytes, part.meaning) for part in found.parts]
        click.echo(render(rows, ("part", "bytes", "meaning"), "csv"))
        return
    total = sum(part.bytes for part in found.parts)
    table = [
        (part.name, format_bytes(part.bytes), format_bytes(part.bytes, binary=True), f"{share:.1f} %", part.meaning)
        for part, share in ((part, 100 * part.bytes / total) for part in found.parts)
    ]
    table.append((found.total, format_bytes(total), format_bytes(total, binary=True), "100.0 %", COUNTERS[found.total]))
    click.echo(render(table, ("part", "decimal", "binary", "share", "what it is"), format_))
    click.echo()
    for line in found.notes:
        click.echo(f"- {line}" if format_ == "markdown" else f"  {line}")
