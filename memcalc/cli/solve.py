"""``memcalc solve``: the largest micro batch, sequence or model that fits, or the fewest GPUs that will do."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import click

from memcalc.cli.kinds import Free, Name, Share
from memcalc.cli.options import Command, build_plan, check_effect, of_group, option, plan_options
from memcalc.cli.progress import waiting
from memcalc.cli.unsaid import unsaid
from memcalc.errors import InputError
from memcalc.tables import FORMATS, printable, render
from memcalc.units import format_both, format_bytes, things

if TYPE_CHECKING:
    from memcalc.plan import Plan
    from memcalc.solve import Solution

__all__ = ["command"]

FOR = ("micro-batch", "seq-len", "gpus", "layers", "params")
"""The names of ``memcalc.solve.QUANTITIES``."""
_SAID = {"micro-batch": "micro_batch", "seq-len": "tokens", "gpus": "ranks", "layers": "layers", "params": "parameters"}
"""The option of a plan that says what is asked for."""

EXAMPLES = """\b
Examples:
  memcalc solve gpt2-xl --for micro-batch --precision amp-bf16 --gpu a100-80gb
  memcalc solve llama-3-8b --for seq-len --gpus 8 --strategy fsdp-full-shard --checkpointing full --gpu h100
  memcalc solve llama-3-70b --for gpus --strategy fsdp-full-shard --checkpointing full --seq-len 4096 --gpu h100
  memcalc solve gpt2 --for layers --batch-size 8 --gpu t4 --keep-free 10%
  memcalc solve --for params --adam --precision amp-bf16 --gpu a100-80gb --format json
"""


@click.command("solve", cls=Command, epilog=EXAMPLES)
@option("The question", "--for", "quantity", type=Name("quantity", FOR), metavar="WHAT",
        help=f"Needed. One of: {', '.join(FOR)}. Of gpus the fewest are asked for, of the others the most that fit.")  # fmt: skip
@option(
    "The question",
    "--keep-free",
    type=Share(),
    metavar="SHARE",
    help="Memory that shall stay free: 10%, or 4GiB.  [default: 0]",
)
@plan_options
@option("The answer", "--format", type=Name("format", FORMATS), default="table", metavar="KIND",
        help=f"One of: {', '.join(FORMATS)}.  [default: table]")  # fmt: skip
def command(quantity: str | None, keep_free: Free | None, format: str, **words: Any) -> None:
    """Find the largest micro batch, sequence, depth or size that fits, or the fewest GPUs that will do: exact to one.

    MODEL and all options are those of memcalc estimate; the one that is asked for need not be given. What fits is what the
    high end of the estimate says. One step more does not surely fit; since the allocator's rounding can lower the high end by a few
    percent from one size to the next, a still larger one now and then fits again. Exit code 1 when nothing fits.
    """
    from memcalc.estimate import usable_bytes
    from memcalc.solve import solve

    if quantity is None:
        raise InputError(f"say what is asked for: --for with one of {', '.join(FOR)}")
    plan = _plan(quantity, words)
    if plan.device == "cpu":
        raise InputError("solve is for cards; whether a run on CPU cores fits in this machine's RAM says memcalc check")
    if plan.gpu_row is None:
        raise InputError("say which card it shall fit on: --gpu NAME")
    there = usable_bytes(plan, plan.gpu_row)
    kept = 0 if keep_free is None else keep_free.of(there)
    if kept >= there:
        raise InputError(f"{format_both(kept)} cannot be kept free of the {format_both(there)} of {plan.gpu}")
    with waiting(f"still looks for {quantity}"):
        found = solve(plan, quantity, there - kept)
    click.echo(_show(found, format, unsaid(words, plan)))
    if found.value is None:
        click.echo(f"memcalc: {printable(_nothing(found))}", err=True)
        raise click.exceptions.Exit(1)


def _plan(quantity: str, words: dict[str, Any]) -> Plan:
    from memcalc.solve import fewest_ranks

    if words.get(_SAID[quantity]) is not None:
        raise InputError(
            f"--for {quantity} asks for what --{quantity.replace('micro-batch', 'batch-size')} says; leave one out"
        )
    if quantity == "params" and words.get("model") is None:
        words["parameters"] = 1
    if quantity == "layers" and words.get("parameters") is not None:
        words["layers"] = 1
    if quantity == "gpus":
        words["strategy"] = words.get("strategy") or "fsdp-full-shard"
        nodes = words.get("nodes") or 1
        words |= {"ranks": fewest_ranks(of_group("layout", words), of_group("fsdp", words), nodes), "nodes": nodes}
    plan = build_plan(words)
    check_effect(words, plan)
    return plan


def _show(found: Solution, format: str, unsaid: list[str]) -> str:
    said = {
        "for": found.quantity.name,
        "value": found.value,
        "needed_bytes": found.needed,
        "limit_bytes": found.limit,
        "one_further_needs_bytes": found.beyond,
        "plans_tried": found.tried,
    }
    if format == "json":
        return json.dumps({**said, "plan": json.loads(found.plan.to_json())}, indent=2)
    if format == "csv":
        return render([list(said.values())], list(said), "csv")
    if found.value is None:
        line = f"for {found.quantity.name} there is no answer on {found.plan.gpu} in {found.plan.precision}"
    else:
        word = "fewest" if found.quantity.fewest else "largest"
        sizes = [found.needed, found.limit, *([found.beyond] if found.beyond is not None else [])]
        alike = len({format_bytes(size) for size in sizes}) < len(set(sizes))  # then only all digits tell them apart
        needed, there, beyond = (
            f"{size:,} B" if alike else show(size)
            for size, show in ((found.needed, format_both), (found.limit, format_both), (sizes[-1], format_bytes))
        )
        line = (
            f"{word} {found.quantity.name}: {_counted(found.value, found.quantity.unit)}; needs up to {needed} "
            f"of {there} of {found.plan.gpu}, in {found.plan.precision}"
        )
        if found.beyond is not None:
            step = "one step less" if found.quantity.fewest else "one step more"
            line += f"; {step} would need up to {beyond}"
        elif not found.quantity.fewest:
            line += f"; {found.end or 'one step more takes more than memcalc counts'}"
    line = printable("; ".join([line, *unsaid]))
    return f"- {line}" if format == "markdown" else line


def _counted(count: int, unit: str) -> str:
    """A count and its unit: ``2 samples per GPU``."""
    thing, *per = unit.split(" ", 1)
    return " ".join([things(count, thing), *per])


def _nothing(found: Solution) -> str:
    plan = found.plan
    missing = format_both(found.needed - found.limit)
    if found.quantity.fewest:
        return f"none up to {things(plan.ranks, 'GPU')} will do: {plan.strategy} needs {missing} too much on each"
    return f"nothing fits: the smallest {found.quantity.name} needs {missing} too much"
