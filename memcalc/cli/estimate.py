"""``memcalc estimate``: the peak memory of one plan, and what it is made of."""

from __future__ import annotations

import json
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any

import click

from memcalc.cli.config import config_options, configured, refuse_without_config
from memcalc.cli.kinds import File, Name
from memcalc.cli.options import Command, build_plan, check_effect, option, plan_options, said_by_file
from memcalc.cli.progress import waiting
from memcalc.cli.searched import search_instead
from memcalc.cli.subject import Saved, takes
from memcalc.cli.unsaid import unsaid
from memcalc.errors import InputError
from memcalc.files import check_output
from memcalc.models import MODELS
from memcalc.plan import Plan
from memcalc.tables import FORMATS
from memcalc.units import format_count

if TYPE_CHECKING:
    from memcalc.estimate import Rehearsed
    from memcalc.timeline import Timeline

__all__ = ["command", "planned", "rehearsed"]

EXAMPLES = (
    """\b
Examples:
  memcalc estimate gpt2 --batch-size 8 --precision amp-bf16 --gpu a100-80gb
  memcalc estimate llama-3-8b --gpus 8 --strategy fsdp-full-shard --checkpointing full --explain
  memcalc estimate --params 1e9 --adam
  memcalc estimate --params 7b --optimizer adamw --optimizer-kind fused --precision bf16
  memcalc estimate --params 1e9 --adam --batch-size 32 --input-shape 224x224x3 --layers 5 --activation-per-layer 64KB
  memcalc estimate gpt2-xl --gpu t4 --check --format json
  memcalc estimate llama-3-8b --seq-len 4096 --precision amp-bf16 --checkpointing full --adapter lora --quantize nf4-double --gpu rtx-4090
  memcalc estimate llama-3-8b --gpus 8 --strategy deepspeed-3 --precision bf16-master --offload-optimizer cpu --checkpointing full
  memcalc estimate megatron-22b --gpus 32 --tensor-parallel 8 --pipeline-parallel 2 --accumulation 8 --strategy megatron-distributed --precision bf16-master
  memcalc estimate my-llama/config.json --precision amp-bf16 --gpu a100-80gb
  memcalc estimate my-llama/ --gpus 8 --strategy fsdp-full-shard
  memcalc estimate weights.safetensors --adam
  memcalc estimate --module net.py:Net --input-shape 12 --batch-size 64
\b
Models:
"""
    + fill(", ".join(MODELS), 76, initial_indent="  ", subsequent_indent="  ", break_on_hyphens=False)
    + "\n"
)

# From here on an estimate takes seconds.
SLOW = 2000


@click.command("estimate", cls=Command, epilog=EXAMPLES)
@plan_options
@config_options
@option("The answer", "--plan", "plan_file", type=File(), metavar="FILE", help="Estimate a saved plan instead.")
@option("The answer", "--save-plan", type=File(), metavar="FILE", help="Save the plan, for --plan and memcalc launch.")
@option("The answer", "--format", type=Name("format", FORMATS), default="table", metavar="KIND",
        help=f"One of: {', '.join(FORMATS)}.  [default: table]")  # fmt: skip
@option("The answer", "--explain", is_flag=True,
        help="Also show each tensor alive at the peak, with its formula (csv, json: only these).")  # fmt: skip
@option("The answer", "--assumptions", "whole", is_flag=True,
        help="Also show all that is taken for granted, not only what could make the numbers wrong (json: always).")  # fmt: skip
@option("The answer", "--check", is_flag=True,
        help="Exit with 1 unless the high end of the estimate fits on --gpu, as memcalc check does.")  # fmt: skip
def command(
    plan_file: Path | None, config: Path | None, scale: int | None, save_plan: Path | None, format: str, explain: bool,
    whole: bool, check: bool, **words: Any,
) -> None:  # fmt: skip
    """Predict the peak memory of a training run on its fullest GPU.

    MODEL is a named model, a config.json of Hugging Face, its folder, or a .safetensors file; options change its
    numbers. It may be the file of a saved plan, too. Or leave it out and give --params for one known by its size, or --module for code of your own.
    """
    from memcalc.cli.summary import explanation, summary
    from memcalc.estimate import estimate

    if save_plan is not None:
        check_output(save_plan)
    named = "estimate --plan"
    if isinstance(words["model"], Saved):
        if plan_file is not None:
            raise InputError(f"two plans, {words['model'].path} and {plan_file}; leave one out")
        plan_file, words["model"], named = words["model"].path, None, "estimate"
    plan = planned(plan_file, config, scale, words, named)
    slow: AbstractContextManager[None] = nullcontext()
    if plan.model.blocks >= SLOW:
        blocks = format_count(plan.model.blocks)
        click.echo(f"memcalc: plays {blocks} blocks one by one, about a second for every thousand", err=True)
        slow = waiting(f"still plays {blocks} blocks")
    rehearsal = rehearsed(plan, words) if plan.model.module.factory else None
    with slow:
        found = estimate(plan, rehearsal=rehearsal)
    if check and plan.gpu is None:
        raise InputError("--check needs --gpu NAME: without one it is not known what the plan should fit on")
    if save_plan is not None:
        plan.save(save_plan)
    if explain and format in ("csv", "json"):
        click.echo(explanation(plan, format, _timeline(rehearsal)))
    elif format == "json":
        click.echo(json.dumps(found.to_dict(), indent=2))
    else:
        open_ = [] if plan_file or config else unsaid(words, plan)
        if found.verdict == "does-not-fit" and not (plan_file or config):
            open_ = [*filter(None, [search_instead(click.get_current_context().command, words)]), *open_]
        click.echo(summary(found, format, whole=whole, unsaid=open_))
        if explain:
            click.echo("\n" + explanation(plan, format, _timeline(rehearsal)))
    if check:
        from memcalc.gate import gate

        if not (passed := gate(found)).passes:
            click.echo(f"memcalc: {passed.said}", err=True)
            raise click.exceptions.Exit(1)


takes(command, Saved)


def _timeline(rehearsal: Rehearsed | None) -> Timeline | None:
    return None if rehearsal is None else rehearsal.timeline


def planned(
    plan_file: Path | None,
    config: Path | None,
    scale: int | None,
    words: dict[str, Any],
    command: str = "estimate --plan",
) -> Plan:
    """The plan of a file, of a launch file or of words; ``command`` reads a plan's file, which follows. Raises InputError."""
    said = f"{'--plan ' * command.endswith('--plan')}{plan_file}"
    if config is None:
        refuse_without_config(scale)
    elif plan_file is not None:
        raise InputError(f"{said} and --config {config} both say what to estimate; leave one out")
    else:
        return configured(config, words, scale)[0]
    if plan_file is None:
        plan = build_plan(words)
        check_effect(words, plan)
        return plan
    said_by_file(said, words, "module", "sample", "module_timeout")
    plan = Plan.load(plan_file)
    module, sample = words.get("module"), words.get("sample")
    if module is not None or sample is not None or _needs_no_name(plan):
        from memcalc.named_code import confirm_code

        confirm_code(plan, module, sample, f"memcalc {command} {plan_file}")
    return plan


def _needs_no_name(plan: Plan) -> bool:
    """Its module is built by transformers, whose code runs unasked."""
    return plan.model.module.factory.endswith(".json")


def rehearsed(plan: Plan, words: dict[str, Any]) -> Rehearsed | None:
    """A rehearsal of the plan's module, whose code was named; None where it was not."""
    from memcalc.estimate import REHEARSED, Rehearsed
    from memcalc.module import TIMEOUT_SECONDS, rehearse

    if words.get("module") is None and not _needs_no_name(plan):
        return None
    if not plan.micro_batch:
        return Rehearsed(timeline=None)
    try:
        with waiting("still rehearses the module"):
            measured, doubts, said = rehearse(plan, timeout=words.get("module_timeout") or TIMEOUT_SECONDS)
    except InputError as error:
        return Rehearsed(timeline=None, remarks=(f"activations are not counted: it cannot be rehearsed ({error})",))
    return Rehearsed(timeline=measured.timeline, remarks=(REHEARSED, *doubts, *said), sure=not doubts)
