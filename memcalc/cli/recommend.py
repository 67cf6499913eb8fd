"""``memcalc recommend``: the plans that fit this machine or the GPUs that were named, fastest first."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from memcalc.cli.confirmed import confirm
from memcalc.cli.kinds import File, Free, Name, Names, Share, Whole
from memcalc.cli.options import Command, build_plan, given, option, plan_options, training_tokens
from memcalc.cli.progress import waiting
from memcalc.cli.recommended import brief, follow_up, nothing, shown
from memcalc.errors import InputError
from memcalc.files import check_output
from memcalc.sound import MOST_RANKS
from memcalc.tables import FORMATS, printable

if TYPE_CHECKING:
    from memcalc.plan import Plan
    from memcalc.search import Search

__all__ = ["EMITTED", "command"]

EMITTED = ("fsdp", "deepspeed", "accelerate", "torchrun", "sbatch")
"""What ``memcalc.configs.emit`` writes; to import it takes longer than most recommendations need."""

EXAMPLES = """\b
Examples:
  memcalc recommend gpt2-xl --gpus 8 --gpu a100-80gb
  memcalc recommend llama-3-8b --gpus 8 --gpu h100 --seq-len 4096 --global-batch 64
  memcalc recommend llama-3-8b --max-gpus 64 --gpu h100 --global-batch 512 --tokens 300b --explain
  memcalc recommend gpt2-xl --gpus 8 --gpu a100-80gb --keep-free 10% --without tensor-parallel,fsdp-no-shard
  memcalc recommend gpt2-xl --gpus 8 --gpu a100-80gb --only deepspeed
  memcalc recommend gpt2-xl --gpu rtx-4090 --checkpointing full --format markdown
  memcalc recommend my-llama/config.json --gpus 8 --gpu h100 --seq-len 4096
  memcalc recommend gpt2-xl --gpus 8 --gpu a100-80gb --rehearse
  memcalc recommend gpt2-small-text --save-plan plan.json
  memcalc recommend gpt2-xl --gpus 8 --gpu a100-80gb --emit accelerate launch/
  memcalc recommend gpt2-small-text --launch --data book.txt --steps 200 --out run

Without --gpu the GPUs of this machine are used; where it has none, its CPU cores and their RAM.
"""

_S, _R = "The search", "The run"


CLOSED = (
    "tensor-parallel", "pipeline-parallel", "checkpointing", "selective", "every-n", "fused", "chunked-loss",
    "sync-every-micro-batch", "offload",
)  # fmt: skip
"""Choices that --without closes, beside strategies: the keys of ``memcalc.search.WITHOUT``."""


@click.command("recommend", cls=Command, epilog=EXAMPLES)
@training_tokens
@plan_options
@option(_S, "--global-batch", type=Whole(), metavar="N",
        help="Samples per optimizer step over all GPUs; accumulation follows from it.")  # fmt: skip
@option(
    _S, "--max-gpus", type=Whole(most=MOST_RANKS), metavar="N", help="Choose the number of GPUs too, up to this many."
)
@option(_S, "--only", type=Names(), metavar="NAME,...",
        help="Strategies to choose from: names, or torch, deepspeed, megatron, all.  [default: torch]")  # fmt: skip
@option(_S, "--without", type=Names(), metavar="NAME,...",
        help=f"Strategies to leave out, named as for --only, or: {', '.join(CLOSED)}.")  # fmt: skip
@option(_S, "--keep-free", type=Share(), metavar="SHARE", help="Memory that shall stay free on each GPU: 10%, or 4GiB.")
@option(_S, "--allow-pure-16bit", is_flag=True, help="Also try 16-bit weights and optimizer states.")
@option(_S, "--top", type=Whole(), default="5", metavar="N", help="Plans to show, one per structure.  [default: 5]")
@option(_S, "--explain", is_flag=True, help="Also say where the time and the memory go, and how plans fell.")
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
    global_batch: int | None, max_gpus: int | None, only: tuple[str, ...] | None, without: tuple[str, ...] | None,
    keep_free: Free | None, train_tokens: int | None, allow_pure_16bit: bool, top: int, explain: bool,
    format: str, rehearse: bool,
    save_plan: Path | None, emit: tuple[str, Path] | None, replace: bool, launch: bool, data: Path | None,
    steps: int | None, out: Path | None, **words: Any,
) -> None:  # fmt: skip
    """Choose how to run a training: strategy, tensor and pipeline parallel, checkpointing, micro batch, optimizer and loss.

    MODEL is a named model, a config.json of Hugging Face, its folder, or a .safetensors file; or give --params. Plans of
    a --module are not searched: compare some with memcalc estimate --module.

    An option that is given is kept as it is; what is not given is searched, offload only where nothing fits without, and of
    the strategies only torch's own: --only deepspeed, megatron or all opens the others.
    The first plan is the simplest within 3% of the fastest, the others follow by their time. Weights stay in float32 unless --precision or --allow-pure-16bit says otherwise: GPUs with bfloat16
    compute in it (amp-bf16), older ones in float16 (amp-fp16), CPUs in float32. With --adapter lora the frozen weights
    are held in 16 bit and the adapters in float32, as PEFT does (bf16); --precision amp-bf16 holds both in float32. With
    --quantize all that is not quantised is float32 and computed in 16 bit (amp-bf16), as PEFT prepares such a model.
    """
    from memcalc.recommend import recommend

    if not launch and given({"data": data, "steps": steps, "out": out}):
        raise InputError("--data, --steps and --out belong to --launch; add it, or use memcalc launch later")
    if launch and out is None:
        raise InputError("--launch needs --out DIR, a new folder for the run")
    if replace and emit is None:
        raise InputError("--replace belongs to --emit")
    if save_plan is not None:
        check_output(save_plan)
    if emit is not None:
        from memcalc.configs.emit import check_target

        check_target(*emit, replace=replace)
    job = _search(
        words, global_batch, allow_pure_16bit, max_gpus=max_gpus, only=only, without=without or (),
        keep_free=keep_free, runnable=launch,
    )  # fmt: skip
    if emit is not None:
        job = _sayable(job, emit[0], named=only is not None or bool(given({"strategy": words.get("strategy")})))
    if train_tokens is not None and not job.base.tokens:
        raise InputError(f"--tokens does not apply to {job.base.model.name}, which reads no tokens")
    with waiting("still looks for the fastest plan that fits"):
        found = recommend(job, top=top)
    confirmed = confirm(found, brief) if rehearse else []
    click.echo(shown(found, confirmed, format, train_tokens or 0, explain))
    if not found.plans:
        click.echo(f"memcalc: {printable(nothing(found))}", err=True)
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
        click.echo("" if launch else "\n" + "\n".join(follow_up(best, save_plan or _emitted(emit))))
    if launch and out is not None:
        from memcalc.cli.launch import run_and_show
        from memcalc.training import Training

        run_and_show(best, out=out, training=Training(data=data, steps=steps or 20))


def _sayable(job: Search, kind: str, named: bool) -> Search:
    """The search among what the launch file has words for, and a line where that is less."""
    from memcalc.configs.sayable import narrowed

    found, names = narrowed(job, kind, named=named)
    if set(names) != set(job.strategies):
        click.echo(f"memcalc: chosen among what --emit {kind} can say: {', '.join(names)}", err=True)
    return found


def _emit(plan: Plan, kind: str, folder: Path, replace: bool) -> None:
    from memcalc.configs.emit import emit
    from memcalc.training import Training

    for line in emit(plan, kind, folder, Training(), replace=replace):
        click.echo(f"memcalc: {printable(line)}", err=True)


def _emitted(emit: tuple[str, Path] | None) -> Path | None:
    """The plan that --emit wrote beside its launch file."""
    from memcalc.configs.scripts import PLAN_FILE

    return None if emit is None else emit[1] / PLAN_FILE


def _search(
    words: dict[str, Any], global_batch: int | None, pure: bool, *, max_gpus: int | None = None,
    only: tuple[str, ...] | None = None, without: tuple[str, ...] = (),
    keep_free: Free | None = None, runnable: bool = False,
) -> Search:  # fmt: skip
    """The search that was said in words, on the named GPUs or on this machine."""
    from dataclasses import replace

    from memcalc.cli.closed import check_closed
    from memcalc.hardware import NODE_GPUS
    from memcalc.open_choices import default_precisions, gpu_counts, pure_precision
    from memcalc.search import search, strategy_names

    typed = given(words)
    if global_batch is not None and "accumulation" in typed:
        raise InputError("--global-batch decides the accumulation; leave out --accumulation")
    if only is not None and "strategy" in typed:
        raise InputError("--strategy and --only both say what to choose from; leave one out")
    check_closed(typed, only, without)
    per_node = None
    if max_gpus is not None:
        if "ranks" in typed:
            raise InputError("--gpus and --max-gpus both say how many GPUs; leave one out")
        if max_gpus % typed.get("nodes", 1):
            raise InputError(f"--max-gpus {max_gpus} does not divide over --nodes {typed['nodes']}")
        per_node = max_gpus // typed.pop("nodes") if "nodes" in typed else None
        typed["ranks"] = max_gpus if "gpu" in typed else typed.get("ranks")
        words = {**words, "nodes": None}
    if "reentrant" in typed:
        typed.setdefault("checkpoint_every", 1)
    placed, capacity, ranks = _place({name: value for name, value in typed.items() if value is not None})
    if max_gpus is not None:
        most = min(max_gpus, placed.get("ranks", max_gpus))
        per_node = per_node or NODE_GPUS
        ranks = tuple(count for count in ranks if count <= max_gpus) if ranks else gpu_counts(most, per_node)
        placed["ranks"] = ranks[-1]
        typed.pop("ranks", None)
    # Built first without what only some precisions allow, to learn the precision of the card.
    usual = default_precisions(build_plan({**words, **typed, **placed, "attention": None, "precision": None}))
    precisions = [typed["precision"]] if "precision" in typed else list(usual)
    base = build_plan({**words, **typed, **placed, "precision": precisions[0]})
    if pure and "precision" not in typed and pure_precision(base) not in precisions:
        precisions.append(pure_precision(base))
    if only is not None or "strategy" in typed:
        strategies = [typed["strategy"]] if only is None else strategy_names(only)
    else:
        strategies = None
    job = search(
        base,
        capacity=capacity,
        ranks=ranks,
        per_node=per_node if ranks else None,
        strategies=strategies,
        tensors=_typed(typed, "layout__tensor"),
        pipelines=_typed(typed, "layout__pipeline"),
        checkpoints=_typed(typed, "checkpoint_every"),
        policies=() if "checkpointing__policy" in typed or "checkpointing__one_in" in typed else None,
        precisions=precisions,
        kinds=_typed(typed, "optimizer_kind"),
        losses=(base.loss,) if any(name.startswith("loss__") for name in typed) else None,
        micro_batches=_typed(typed, "micro_batch"),
        accumulation=typed.get("accumulation"),
        global_batch=global_batch,
        without=without,
        runnable=runnable,
    )
    return job if keep_free is None else replace(job, keep_free=keep_free.of(job.capacity))


def _typed(typed: dict[str, Any], name: str) -> tuple[Any, ...] | None:
    """What was typed is the whole choice."""
    return (typed[name],) if name in typed else None


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
