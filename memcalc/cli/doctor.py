"""``memcalc doctor``: what a machine or a cluster lacks for training, each with its cure."""

from __future__ import annotations

import dataclasses
import json

import click

from memcalc.cli.kinds import Name, Whole
from memcalc.tables import FORMATS, render

__all__ = ["command"]

EXAMPLES = """\b
Examples:
  memcalc doctor
  memcalc doctor --strict --format json
  torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29500 -m memcalc doctor --cluster
"""


@click.command("doctor", epilog=EXAMPLES)
@click.option("--cluster", is_flag=True, help="Under torchrun: does every rank see the same? The first rank answers.")
@click.option(
    "--timeout",
    type=Whole(),
    default="60",
    metavar="SECONDS",
    help="With --cluster: how long ranks wait for each other.  [default: 60]",
)
@click.option("--strict", is_flag=True, help="Exit with 1 when something is missing, or ranks differ.")
@click.option("--format", "format_", type=Name("format", FORMATS), default="table", metavar="KIND",
              help=f"One of: {', '.join(FORMATS)}.  [default: table]")  # fmt: skip
def command(cluster: bool, timeout: int, strict: bool, format_: str) -> None:
    """Look at this machine: versions, GPUs, limits, ports, compiler, disk; each line is ok or says the cure.

    Works without torch, which is then a finding. Without --strict the exit status is 0.
    """
    from memcalc import doctor

    found = doctor.cluster(timeout=timeout) if cluster else doctor.examine()
    if found is None:
        return
    if format_ == "json":
        click.echo(json.dumps([dataclasses.asdict(each) for each in found], indent=2))
    else:
        rows = [(each.what, each.status, each.found, each.cure) for each in found]
        click.echo(render(rows, ("what", "status", "found", "cure"), format_))
    bad = [each.what for each in found if each.status == "missing" or (cluster and each.status == "warning")]
    if strict and bad:
        click.echo(f"memcalc: {'ranks differ in' if cluster else 'missing'}: {', '.join(bad)}", err=True)
        raise click.exceptions.Exit(1)
