"""``memcalc strategies``: what each strategy would take and cost for one model, in numbers."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, Any

import click

from memcalc.cli.kinds import Name
from memcalc.cli.options import Command, build_plan, given, option, plan_options
from memcalc.errors import InputError
from memcalc.precision import PRECISIONS
from memcalc.strategies import STRATEGIES
from memcalc.tables import FORMATS, columns, folded, heading, printable, render
from memcalc.units import format_count, things

if TYPE_CHECKING:
    from memcalc.plan import Plan
    from memcalc.strategy_table import Line, Refused

__all__ = ["command"]

EXAMPLES = """\b
Examples:
  memcalc strategies
  memcalc strategies gpt2-xl --gpus 8
  memcalc strategies llama-3-8b --gpus 8 --gpu h100 --seq-len 4096 --checkpointing full
  memcalc strategies my-llama/config.json --gpus 8 --seq-len 4096
  memcalc strategies --module net.py:Net --input-shape 12 --batch-size 64 --gpus 4
  memcalc strategies --params 7b --gpus 16 --nodes 2 --format csv
"""
_GIB = 2**30


@click.command("strategies", cls=Command, epilog=EXAMPLES)
@plan_options
@option("The answer", "--format", type=Name("format", FORMATS), default="table", metavar="KIND",
        help=f"One of: {', '.join(FORMATS)}.  [default: table]")  # fmt: skip
def command(format: str, **words: Any) -> None:
    """Compare DDP, FSDP, DeepSpeed and Megatron: memory per GPU by category, bytes sent, speed, the smallest card.

    MODEL is a named model, a config.json of Hugging Face, its folder, or a .safetensors file; or give --params, or
    --module for code of your own (whose activations this table does not count). --gpus says over how many it is spread. Without --precision torch's
    strategies compute in bfloat16 and the others keep float32 masters. Without a model: the list of strategies.
    """
    if not given(words):
        click.echo(_catalog(format))
        return
    from memcalc.strategy_table import recipes, strategy_table, usual_recipes

    if words.get("strategy") is not None:
        raise InputError(f"memcalc strategies compares all of them; for {words['strategy']} alone: memcalc estimate")
    if (words.get("ranks") or 1) < 2:
        raise InputError("say over how many GPUs: --gpus N, at least 2; one GPU divides nothing")
    if any((words.get(f"layout__{way}") or 1) > 1 for way in ("tensor", "context", "pipeline", "expert")):
        raise InputError(
            "strategies are compared on equal ranks; leave tensor, context, pipeline and expert parallel out"
        )
    said = words.get("precision")
    precisions = recipes(said) if said else usual_recipes(build_plan({**_common(words), "strategy": "ddp"}))

    def plan(strategy: str, precision: str) -> Plan:
        return build_plan({**words, "strategy": strategy, "precision": precision})

    lines, refused = strategy_table(plan, precisions)
    if not lines:
        raise InputError(f"no strategy can train this: {refused[0].why}")
    click.echo(_show(lines[0].plan, lines, refused, format))


def _common(words: dict[str, Any]) -> dict[str, Any]:
    """What is said of the job and not of how a strategy works."""
    return {name: value for name, value in words.items() if "__" not in name or name.startswith("adapter__")}


def _catalog(format: str) -> str:
    from memcalc.strategy_table import divided

    names = ("strategy", "divides", "runs here", "what it is")
    rows = [
        (row.name, divided(row), "yes" if row.backend else "estimated only", row.summary) for row in STRATEGIES.values()
    ]
    return render(rows, names, format)


def _show(base: Plan, lines: list[Line], refused: list[Refused], format: str) -> str:
    if format == "json":
        return json.dumps({"strategies": [_as_dict(each, lines) for each in lines],
                           "refused": [dataclasses.asdict(each) for each in refused]}, indent=2)  # fmt: skip
    from memcalc.assumptions import in_one_machine
    from memcalc.strategy_table import OTHER, SHOWN

    if format == "csv":
        rows = [list(_as_dict(each, lines).values())[:-2] for each in lines]
        return render(rows, list(_as_dict(lines[0], lines))[:-2], "csv")
    cells = []
    for each in lines:
        other = sum(each.most[name] for name in OTHER)
        sizes = [*(_most(each)[name] for name in SHOWN), other, each.peak, each.device, each.sent]
        speed = _speed(each, lines)
        card = each.smallest or ("none" if each.counted and not each.limits else "-")
        cells.append([each.plan.strategy, each.plan.precision, *("-" if size is None else f"{size / _GIB:.2f}" for size in sizes),
                      "-" if speed is None else f"{'≤ ' if each.bound else ''}{speed:.2f}", card])  # fmt: skip
    names = [
        "GiB of the fullest GPU",
        "precision",
        *SHOWN,
        "other",
        "allocated",
        "device",
        "sent",
        "speed",
        "smallest card",
    ]
    title = _title(base)
    notes = [
        *_uncounted(lines),
        "each category is the most of it at any moment, and they do not all come at once: allocated is the peak; device is the "
        "high end of what nvidia-smi shows",
        "sent is what one GPU sends in an optimizer step, in rings",
        "speed is samples per second by the time model that orders plans in recommend, 1 for the fastest of torch's; ≤ where the "
        "host's work of the engine (DeepSpeed, Megatron, DataParallel) is not known and not in it",
        "smallest card is the smallest of the catalog that holds it for sure and computes its dtype",
        *_recipes_differ(lines),
        *in_one_machine(base),
        *(f"{', '.join(names)}: {why}" for why, names in _by_reason(refused).items()),
    ]
    mark = "- " if format == "markdown" else "  "
    table = render(cells, names, format)
    return "\n".join(
        [
            f"**{title}**" if format == "markdown" else heading(title),
            "",
            table,
            "",
            *(folded(printable(n), mark, columns() if format == "table" else None) for n in notes),
        ]
    )


def _most(line: Line) -> dict[str, int | None]:
    """The most of each category; None for activations that are not known."""
    return {**line.most, **({} if line.counted else {"activations": None})}


def _uncounted(lines: list[Line]) -> list[str]:
    """Why bytes are not all there are."""
    found = []
    if not all(each.counted for each in lines):
        why = (
            "memcalc estimate --module and memcalc rehearse run a module's code for them, and this table does not"
            if lines[0].plan.model.module.factory
            else "no shape was given"
        )
        found.append(
            f"activations are not counted, because {why}: allocated and device are without them, and no card is said to hold it"
        )
    limits: dict[str, list[str]] = {}
    for each in lines:
        for limit in each.limits:
            limits.setdefault(limit, []).append(each.plan.strategy)
    return found + [f"{', '.join(names)}: {limit}" for limit, names in limits.items()]


def _recipes_differ(lines: list[Line]) -> list[str]:
    """Which rows are of another precision than the first, so that their speed is of another recipe."""
    first = lines[0].plan.precision
    others = dict.fromkeys(each.plan.precision for each in lines if each.plan.precision != first)
    return (
        [
            f"speeds are not of one precision: {first} keeps {PRECISIONS[first].weights} weights, and rows of "
            f"{' and '.join(others)} keep 16-bit weights with float32 master copies, as these engines do"
        ]
        if others
        else []
    )


def _by_reason(refused: list[Refused]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for each in refused:
        found.setdefault(each.why, []).append(each.strategy)
    return found


def _title(base: Plan) -> str:
    nodes = f" on {base.nodes} nodes" if base.nodes > 1 else ""
    card = f", {base.gpu}" if base.gpu else ""
    count = format_count(sum(weight.numel for weight in base.weights))
    size = f"{count} parameters"
    name = size if base.model.name == size else f"{base.model.name} ({size})"
    each = (
        f", {things(base.micro_batch, 'sample')} of {base.tokens} token{'s' * (base.tokens > 1)} on each"
        if base.tokens
        else ""
    )
    return printable(f"{name}, {base.optimizer}, {things(base.ranks, 'GPU')}{nodes}{card}{each}")


def _speed(line: Line, lines: list[Line]) -> float | None:
    known = [each.seconds for each in lines if each.seconds and not each.bound] or [
        each.seconds for each in lines if each.seconds
    ]
    return min(known) / line.seconds if line.seconds and known else None


def _as_dict(line: Line, lines: list[Line]) -> dict[str, Any]:
    speed = _speed(line, lines)
    return {
        "strategy": line.plan.strategy,
        "precision": line.plan.precision,
        **{f"{name}_bytes": size for name, size in _most(line).items()},
        "allocated_bytes": line.peak,
        "device_bytes": line.device,
        "sent_bytes": line.sent,
        "relative_speed": None if speed is None else round(speed, 4),
        "speed_is_upper_bound": line.bound,
        "smallest_card": line.smallest,
        "verdict": line.verdict,
        "activations_counted": line.counted,
        "at_peak": line.by_category if line.counted else {**line.by_category, "activations": None},
        "collectives": [{**dataclasses.asdict(each), "sent": round(each.sent)} for each in line.collectives],
    }
