"""``memcalc check``: whether a plan fits, as an exit code."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from memcalc.cli.config import config_options
from memcalc.cli.kinds import Free, Name, Share
from memcalc.cli.options import Command, option, plan_options
from memcalc.cli.subject import is_plan
from memcalc.cli.unsaid import unsaid
from memcalc.errors import InputError
from memcalc.tables import FORMATS, printable, render

if TYPE_CHECKING:
    from memcalc.plan import Plan

__all__ = ["command"]

EXAMPLES = """\b
Examples:
  memcalc check gpt2-xl --batch-size 4 --precision amp-bf16 --gpu a100-80gb
  memcalc check plan.json --gpu t4 --keep-free 5%
  memcalc check llama-3-8b --config ds_config.json --gpus 8 --gpu h100 --keep-free 4GiB
  memcalc check my-llama/config.json --precision amp-bf16 --gpu a100-80gb --format json

\b
Exit codes:
  0  it fits: the high end of the estimate is within what may be taken
  1  it does not fit, or may not
  2  bad input
"""


class _ExamplesFirst(Command):
    """The exit codes are what a build asks for; the options of a plan, some hundred, come after them."""

    def format_help(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        self.format_usage(ctx, formatter)
        self.format_help_text(ctx, formatter)
        self.format_epilog(ctx, formatter)
        self.format_options(ctx, formatter)


@click.command("check", cls=_ExamplesFirst, epilog=EXAMPLES)
@plan_options
@config_options
@option(
    "The answer",
    "--keep-free",
    type=Share(),
    metavar="SHARE",
    help="Memory that shall stay free: 5%, or 4GiB.  [default: 0]",
)
@option("The answer", "--format", type=Name("format", FORMATS), default="table", metavar="KIND",
        help=f"One of: {', '.join(FORMATS)}.  [default: table, which is one line]")  # fmt: skip
def command(config: Path | None, scale: int | None, keep_free: Free | None, format: str, **words: Any) -> None:
    """Say in one line, and by the exit code, whether a plan fits on a GPU, or on CPU cores in the RAM of this machine.

    MODEL is a plan saved by --save-plan, or all that memcalc estimate takes. A plan is checked as it was saved; --gpu
    alone may name another card.
    """
    from memcalc.cli.estimate import planned, rehearsed
    from memcalc.estimate import estimate, usable_bytes
    from memcalc.gate import gate

    saved, model = None, words.get("model")
    if isinstance(model, Path) and is_plan(model):
        saved, words["model"] = model, None
    card = words.pop("gpu") if saved else None
    plan = planned(saved, config, scale, words, "check")
    if card is not None:
        plan = dataclasses.replace(plan, gpu=card)
    ram = _ram() if plan.device == "cpu" else 0
    if plan.gpu_row is None and plan.device != "cpu":
        raise InputError("say which card it shall fit on: --gpu NAME")
    rehearsal = rehearsed(plan, words) if plan.model.module.factory else None
    kept = 0 if keep_free is None else keep_free.of(usable_bytes(plan, plan.gpu_row) if plan.gpu_row else ram)
    found = gate(estimate(plan, rehearsal=rehearsal), kept, ram)
    if format == "json":
        click.echo(json.dumps(_of(plan) | found.to_dict(), indent=2))
    elif format == "csv":
        said = _of(plan) | found.to_dict() | {"hints": "; ".join(found.hints)}
        click.echo(render([list(said.values())], list(said), "csv"))
    else:
        place = f"{plan.ranks} x {plan.gpu}" if plan.gpu else f"{plan.ranks} rank{'s' * (plan.ranks > 1)} on CPU cores"
        beside = [*found.hints, *([] if saved or config else unsaid(words, plan))]
        open_ = "".join(f"; {each}" for each in beside)
        line = printable(f"{plan.model.name} in {plan.precision}, {plan.strategy} on {place}: {found.said}{open_}")
        click.echo(f"- {line}" if format == "markdown" else line)
    if not found.passes:
        raise click.exceptions.Exit(1)


def _of(plan: Plan) -> dict[str, Any]:
    """What was checked, by the names of the plan's fields."""
    names = ("precision", "strategy", "ranks", "nodes", "micro_batch", "accumulation")
    return {"model": plan.model.name} | {name: getattr(plan, name) for name in names}


def _ram() -> int:
    from memcalc.machine import detect

    return detect().ram_bytes or 0
