"""``memcalc report``: all that is known of a plan or a run, as one page."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import click

from memcalc.cli.config import config_options
from memcalc.cli.kinds import File
from memcalc.cli.options import Command, option, plan_options
from memcalc.cli.subject import RunFolder, Saved, Subject, rehearsal_of, subject, takes
from memcalc.errors import InputError, shorten
from memcalc.files import check_output, write_text
from memcalc.tables import printable
from memcalc.units import format_bytes

__all__ = ["command"]

EXAMPLES = """\b
Examples:
  memcalc report run -o report.html
  memcalc report plan.json -o report.html
  memcalc report gpt2-xl --gpus 8 --gpu a100-80gb --strategy fsdp-full-shard -o report.html
  memcalc report gpt2 --batch-size 8 --gpu t4 --rehearse -o report.html

The page is one file: it can be mailed, and asks for nothing from the network.
"""
_P = "The page"


@click.command("report", cls=Command, epilog=EXAMPLES)
@plan_options
@config_options
@option(_P, "-o", "--out", type=File(), metavar="FILE", help="Where to write it, as report.html. Needed.")
@option(
    _P, "--rehearse", is_flag=True, help="Lay a rehearsal over the timeline (memcalc rehearse), as a second opinion."
)
def command(config: Path | None, scale: int | None, out: Path | None, rehearse: bool, **words: Any) -> None:
    """Write a page with the verdict, the timeline, the breakdown, alternatives, and estimated against measured.

    MODEL is the folder of a run, the file of a saved plan, a named model, a config.json of Hugging Face or its folder; or
    give --params or --module.
    """
    if out is None:
        raise InputError("memcalc report writes a page; say where with -o report.html")
    if out.suffix.lower() not in (".html", ".htm"):
        raise InputError(f"{shorten(str(out))} says no page; end its name in .html")
    check_output(out)
    from memcalc.pictures.page.report import Report, alternatives, page
    from memcalc.pictures.page.timeline import COLUMNS
    from memcalc.pictures.step import of_rank, of_timeline, step

    found = subject(words, config, scale, "report")
    curves = [] if not rehearse else [of_timeline(found.estimate, rehearsal_of(found), COLUMNS)]
    if found.rank is not None:
        curves.append(of_rank(found.estimate, found.rank, COLUMNS))
    plan = found.estimate.plan
    click.echo("memcalc: looks for other plans that fit", err=True)
    made = page(
        Report(
            figure=step(found.estimate, COLUMNS, tuple(curves)),
            run=found.run,
            tensors=_tensors(found),
            alternatives=alternatives(plan, _ram() if plan.device == "cpu" else 0),
            command=shlex.join(["memcalc", *(click.get_current_context().find_root().obj or ("report",))]),
        )
    )
    write_text(out, made)
    peak = f"peak {format_bytes(found.estimate.peak.bytes)}, verdict {found.estimate.verdict}"
    click.echo(f"{printable(str(out))}: {peak}; open it in a browser")


takes(command, Saved, RunFolder)


def _tensors(found: Subject) -> list[tuple[str, str, str, int, int]]:
    from memcalc.cli.summary import explanation

    ours = found.estimate.plan.model.module.factory
    rows = json.loads(explanation(found.estimate.plan, "json", found.estimate.timeline if ours else None))
    return [(row["name"], row["category"], row["formula"], row["count"], row["bytes"]) for row in rows]


def _ram() -> int:
    from memcalc.machine import detect

    return detect().ram_bytes or 0
