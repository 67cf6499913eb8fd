"""``memcalc recommend``: the plans that fit this machine or the GPUs that were named, fastest first."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from memcalc.cli.confirmed import as_dict, confirm, numbers_of
from memcalc.cli.kinds import File, Name, Whole
from memcalc.cli.options import Command, build_plan, given, option, plan_options
from memcalc.errors import InputError
from memcalc.tables import FORMATS, heading, printable, render
from memcalc.units import format_both, format_bytes, format_count

if TYPE_CHECKING:
    from memcalc.confirmation import Confirmation
    from memcalc.plan import Plan
    from memcalc.recommend import Choice, Recommendation, Refusal
    from memcalc.search import Search

__all__ = ["EMITTED", "command"]

EMITTED = ("fsdp", "deepspeed", "accelerate", "torchrun", "sbatch")
"""What ``memcalc.configs.emit`` writes; to import it takes longer than most recommendations need."""

EXAMPLES = """\b
Examples:
  memcalc recommend gpt2-xl --gpus 8 --gpu a100-80gb
  memcalc recommend llama-3-8b --gpus 8 --gpu h100 --seq-len 4096 --global-batch 64
  memcalc recommend gpt2-xl --gpu rtx-4090 --checkpointing full --format markdown
  memcalc recommend my-llama/config.json --gpus 8 --gpu h100 --seq-len 4096
  memcalc recommend gpt2-xl --gpus 8 --gpu a100-80gb --rehearse
  memcalc recommend gpt2-small-text --save-plan plan.json
  memcalc recommend gpt2-xl --gpus 8 --gpu a100-80gb --emit accelerate launch/
  memcalc recommend gpt2-small-text --launch --data book.txt --steps 200 --out run

Without --gpu the GPUs of this machine are used; where it has none, its CPU cores and their RAM.
"""

_S, _R = "The search", "The run"


@click.command("recommend", cls=Command, epilog=EXAMPLES)
@plan_options
@option(_S, "--global-batch", type=Whole(), metavar="N",
        help="Samples per optimizer step over all GPUs; accumulation follows from it.")  # fmt: skip
@option(_S, "--allow-pure-16bit", is_flag=True, help="Also try 16-bit weights and optimizer states.")
@option(_S, "--top", type=Whole(), default="5", metavar="N", help="Plans to show, one per structure.  [default: 5]")
@option(_S, "--format", type=Name("format", FORMATS), default="table", metavar="KIND",
        help=f"One of: {', '.join(FORMATS)}.  [default: table]")  # fmt: skip
@option(
    _S,
    "--rehearse",
    is_flag=True,
    help="Confirm the first plan by a rehearsal (memcalc rehearse); one that does not fit by it makes way for the next.",
)
@option(_R, "--save-plan", type=File(), metavar="FILE", help="Save the first plan, for memcalc launch.")
@option(_R, "--emit", nargs=2, type=(Name("format", EMITTED), File()), metavar="FORMAT DIR",
        help=f"Write the first plan as a launch file into a folder. One of: {', '.join(EMITTED)}.")  # fmt: skip
@option(_R, "--replace", is_flag=True, help="With --emit: replace files that are there.")
@option(_R, "--launch", is_flag=True, help="Train the first plan on this machine now; needs --out.")
@option(_R, "--data", type=File(), metavar="PATH", help="With --launch: what to train on; see memcalc launch --help.")
@option(_R, "--steps", type=Whole(), metavar="N", help="With --launch: optimizer steps.  [default: 20]")
@option(_R, "--out", type=File(), metavar="DIR", help="With --launch: folder of the run; new or empty.")
def command(
    global_batch: int | None, allow_pure_16bit: bool, top: int, format: str, rehearse: bool,
    save_plan: Path | None, emit: tuple[str, Path] | None, replace: bool, launch: bool, data: Path | None,
    steps: int | None, out: Path | None, **words: Any,
) -> None:  # fmt: skip
    """Choose strategy, checkpointing, micro batch and precision for a training run, fastest first.

    MODEL is a named model, a config.json of Hugging Face, its folder, or a .safetensors file; or give --params. Plans of
    a --module are not searched: compare some with memcalc estimate --module.

    An option that is given is kept as it is; strategy, checkpointing and micro batch that are not given are
    searched. Weights stay in float32 unless --precision or --allow-pure-16bit says otherwise: GPUs with bfloat16
    compute in it (amp-bf16), older ones in float16 (amp-fp16), CPUs in float32.
    """
    from memcalc.recommend import recommend

    if not launch and given({"data": data, "steps": steps, "out": out}):
        raise InputError("--data, --steps and --out belong to --launch; add it, or use memcalc launch later")
    if launch and out is None:
        raise InputError("--launch needs --out DIR, a new folder for the run")
    if replace and emit is None:
        raise InputError("--replace belongs to --emit")
    if emit is not None:
        from memcalc.configs.emit import check_target

        check_target(*emit, replace=replace)
    job = _search(words, global_batch, allow_pure_16bit)
    found = recommend(job, top=top)
    confirmed = confirm(found, _brief) if rehearse else []
    click.echo(_show(found, confirmed, format))
    if not found.plans:
        click.echo(f"memcalc: {printable(_nothing(found))}", err=True)
        raise click.exceptions.Exit(1)
    if confirmed and not confirmed[-1].fits:
        click.echo(f"memcalc: by their rehearsals none of the {len(confirmed)} plans shown fits", err=True)
        raise click.exceptions.Exit(1)
    best = confirmed[-1].choice.plan if confirmed else found.plans[0].plan
    if save_plan is not None:
        best.save(save_plan)
    if emit is not None:
        _emit(best, *emit, replace)
    if format == "table":
        click.echo("" if launch else "\n" + "\n".join(_next(best, save_plan)))
    if launch and out is not None:
        from memcalc.cli.launch import run_and_show
        from memcalc.training import Training

        run_and_show(best, out=out, training=Training(data=data, steps=steps or 20))


def _emit(plan: Plan, kind: str, folder: Path, replace: bool) -> None:
    from memcalc.configs.emit import emit
    from memcalc.training import Training

    for line in emit(plan, kind, folder, Training(), replace=replace):
        click.echo(f"memcalc: {printable(line)}", err=True)


def _search(words: dict[str, Any], global_batch: int | None, pure: bool) -> Search:
    """The search that was said in words, on the named GPUs or on this machine."""
    from memcalc.search import default_precisions, pure_precision, search

    typed = given(words)
    if global_batch is not None and "accumulation" in typed:
        raise InputError("--global-batch decides the accumulation; leave out --accumulation")
    if "reentrant" in typed:
        typed.setdefault("checkpoint_every", 1)
    placed, capacity, ranks = _place(typed)
    # Built first without what only some precisions allow, to learn the precision of the card.
    usual = default_precisions(build_plan({**words, **typed, **placed, "attention": None, "precision": None}))
    precisions = [typed["precision"]] if "precision" in typed else list(usual)
    base = build_plan({**words, **typed, **placed, "precision": precisions[0]})
    if pure and "precision" not in typed:
        precisions.append(pure_precision(base))
    return search(
        base,
        capacity=capacity,
        ranks=ranks,
        strategies=[typed["strategy"]] if "strategy" in typed else None,
        checkpoints=[typed["checkpoint_every"]] if "checkpoint_every" in typed else None,
        precisions=precisions,
        micro_batches=[typed["micro_batch"]] if "micro_batch" in typed else None,
        global_batch=global_batch,
    )


def _place(typed: dict[str, Any]) -> tuple[dict[str, Any], int | None, tuple[int, ...] | None]:
    """Where the run shall be: fields of the plan, bytes there are, and the numbers of ranks to try."""
    if "gpu" in typed:
        if typed.get("device") == "cpu":
            raise InputError("--gpu and --device cpu contradict each other; leave one out")
        return {}, None, None
    from memcalc.machine import detect

    machine = detect()
    if machine.gpus and typed.get("device") != "cpu":
        from memcalc.hardware import GPUS

        least = min(machine.gpus, key=lambda gpu: gpu.usable_bytes)
        count = typed.get("ranks", len(machine.gpus))
        return {"gpu": least.name if least.name in GPUS else None, "ranks": count}, least.usable_bytes, None
    if typed.get("device") == "cuda" or (typed.get("ranks", 1) > 1 and "device" not in typed):
        raise InputError("this machine has no GPU that can be seen; say which with --gpu NAME, or give --device cpu")
    if not machine.ram_bytes:
        raise InputError("this machine does not say how much RAM it has; name a GPU with --gpu NAME")
    most = typed.get("ranks", machine.cores)
    counts = (most,) if "ranks" in typed else tuple(sorted({1, *(2**k for k in range(most.bit_length() - 1)), most}))
    if "strategy" in typed and "ranks" not in typed:
        counts = (1,) if typed["strategy"] == "single" else counts[-1:]
    return {"device": "cpu", "ranks": counts[-1]}, machine.ram_bytes, counts


def _show(found: Recommendation, confirmed: list[Confirmation], format: str) -> str:
    if format == "json":
        return json.dumps(as_dict(found, confirmed), indent=2)
    if format == "csv":
        names = ["peak_bytes", "needed_bytes", "headroom_bytes", "relative_speed", "reason"]
        numbers = [(c.peak, c.needed, c.headroom, round(c.speed, 4), c.reason) for c in found.plans]
        if confirmed:
            names += ["rehearsed_peak_bytes", "rehearsed_needed_bytes"]
            by_both = {c.choice.plan.to_json(): (c.peak, c.needed) for c in confirmed}
            both = [by_both.get(c.plan.to_json(), (None, None)) for c in found.plans]
            numbers = [(*n, *more) for n, more in zip(numbers, both, strict=True)]
        rows = [(*_knobs(c.plan), *n) for c, n in zip(found.plans, numbers, strict=True)]
        return render(rows, [*(name.replace(" ", "_") for name in KNOBS), *names], "csv")
    parts = [_title(found, format)]
    if found.plans:
        cells = [
            (i, *_knobs(c.plan), format_both(c.peak), format_both(c.headroom), f"{c.speed:.2f}")
            for i, c in enumerate(found.plans, 1)
        ]
        parts.append(render(cells, ["", *KNOBS, "peak", "headroom", "speed"], format))
    mark = "- " if format == "markdown" else "  "
    lines = (*numbers_of(confirmed), *_reasons(found.plans), *_refusals(found), *_remarks(found))
    parts.append("\n".join(mark + printable(line) for line in lines))
    return "\n\n".join(part for part in parts if part)


KNOBS = ("strategy", "ranks", "checkpointing", "precision", "micro batch", "accumulation")


def _knobs(plan: Plan) -> tuple[object, ...]:
    batch = plan.micro_batch or None
    return (plan.strategy, plan.ranks, _checkpointing(plan), plan.precision, batch, plan.accumulation)


def _checkpointing(plan: Plan) -> str:
    return ("none", "full")[plan.checkpoint_every] if plan.checkpoint_every < 2 else f"every-{plan.checkpoint_every}"


def _title(found: Recommendation, format: str) -> str:
    base, job = found.search.base, found.search
    first = "no plan fits" if not found.plans else f"{found.plans[0].plan.strategy}: {_brief(found.plans[0].plan)}"
    title = f"**{printable(first)}**" if format == "markdown" else heading(printable(first))
    count = sum(weight.numel for weight in base.family.weights(base.model))
    where = f"{format_both(job.capacity)} each" if base.device == "cuda" else f"{format_both(job.capacity)} of RAM"
    ranks = " or ".join(map(str, job.ranks))
    place = f"{ranks} x {base.gpu or 'GPU'}" if base.device == "cuda" else f"{ranks} ranks on CPU cores"
    size = f"{format_count(count)} parameters"
    name = size if base.model.name == size else f"{base.model.name}: {size}"
    return f"{title}\n{printable(f'{name} on {place}, {where}; {found.tried} plans tried')}"


def _brief(plan: Plan) -> str:
    batch = f"micro batch {plan.micro_batch}" if plan.micro_batch else "micro batch not given"
    times = f" x {plan.accumulation}" if plan.accumulation > 1 else ""
    return f"{batch}{times} on {plan.ranks} rank{'s' * (plan.ranks > 1)}, {plan.precision}, checkpointing {_checkpointing(plan)}"


def _reasons(plans: tuple[Choice, ...]) -> Iterator[str]:
    for number, choice in enumerate(plans, 1):
        yield f"{number}: {choice.reason}"


def _refusals(found: Recommendation) -> Iterator[str]:
    """The closest plan of each strategy that fits in no form."""
    works = {(c.plan.strategy, c.plan.ranks) for c in found.plans}
    for refusal in found.refused:
        key = (refusal.plan.strategy, refusal.plan.ranks)
        if key not in works:
            works.add(key)
            yield f"does not fit: {_breaks(refusal)}"


def _remarks(found: Recommendation) -> Iterator[str]:
    from memcalc.assumptions import limits, uncounted
    from memcalc.recommend import TIE
    from memcalc.search import activations_known

    if not activations_known(found.search.base):
        yield "activations are not counted because no shape was given"
    yield from uncounted(found.search.base)
    tried = [*(choice.plan for choice in found.plans), *(refusal.plan for refusal in found.refused)]
    for limit in dict.fromkeys(limit for plan in tried for limit in limits(plan)):
        names = dict.fromkeys(plan.strategy for plan in tried if limit in limits(plan))
        yield f"{', '.join(names)}: {limit}"
    if found.plans:
        yield (
            "peak is allocated memory; headroom is what is left at the high end of what the device may show; speed is "
            f"samples per second against the fastest plan that fits, predicted; within {TIE:.0%} the simpler plan goes first"
        )


def _breaks(refusal: Refusal) -> str:
    """Which plan, how much too much, and the largest term at its peak."""
    plan = refusal.plan
    return (
        f"{plan.strategy}, {_brief(plan)}: up to {format_bytes(refusal.missing)} too much; at the peak in "
        f"{refusal.moment} the largest part is {refusal.category}, {format_both(refusal.category_bytes)}"
    )


def _nothing(found: Recommendation) -> str:
    from memcalc.remedies import remedies

    cures = remedies(found.search)
    cure = f"what would do: {', or '.join(cures)}" if cures else "no single change would do; take a smaller model"
    return f"nothing fits; the closest is {_breaks(found.refused[0])}; {cure}"


def _next(plan: Plan, saved: Path | None) -> Iterator[str]:
    yield "next:" if saved else "next: add --save-plan plan.json, then"
    name = saved or "plan.json"
    yield f"  memcalc estimate --plan {name} --explain"
    if plan.untrained:
        yield f"  memcalc can estimate it, but cannot train {plan.untrained}"
    elif plan.model.family != "size":
        yield f"  memcalc launch {name} --steps 200 --out run"
