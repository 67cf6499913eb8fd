"""``memcalc launch``: train a plan on this machine, then show estimated against measured."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from memcalc.checkpoints import newest_checkpoint, read_marker
from memcalc.cli.compare import compare_table, summary
from memcalc.cli.config import config_options, configured, refuse_without_config
from memcalc.cli.kinds import File, ModelName, Name, Whole
from memcalc.cli.options import Command, beside_options, said_by_file
from memcalc.compare import compare_run
from memcalc.errors import FileError, InputError
from memcalc.launch import MOST_RESTARTS, Place, Run, check_plan, launch, torchrun
from memcalc.measurement import Measurement
from memcalc.models import MODELS
from memcalc.module import rehearse
from memcalc.named_code import code_options, confirm_code
from memcalc.plan import Plan
from memcalc.run_folder import REHEARSAL, continued, load_plan
from memcalc.training import LIMITS, Training

__all__ = ["command", "run_and_show"]

EXAMPLES = """\b
Examples:
  memcalc launch plan.json --data book.txt --steps 200 --out run
  memcalc launch plan.json --data books/ --steps 1000 --checkpoint-every 100 --eval-every 100 --out run
  memcalc launch run/plan.json --steps 2000 --out run --resume
  memcalc launch gpt2-tiny --config fsdp_config.yaml --scale-to-ranks 2 --out run
  memcalc launch my-llama/config.json --config fsdp_config.yaml --scale-to-ranks 2 --out run
  memcalc launch plan.json --module net.py:Net --out run
  memcalc launch plan.json --checkpoint-every 100 --max-restarts 3 --on-oom next --out run
  memcalc launch plan.json --out /shared/run --nodes 2 --node-rank 0 --rdzv node0:29500    # and rank 1 on the other
  memcalc launch plan.json --out run --dry-run

With --config the argument is a model: a named one, a config.json of Hugging Face or its folder; and options of a plan may stand beside it: see memcalc estimate --help.
The folder of a run holds plan.json, training.json, logs/, measured/, run.json, checkpoints/ and weights/.
Ctrl-C stops all ranks; a second one kills them at once. SIGTERM lets them save a checkpoint first (within
25 s): the exit code is then 75, and --resume goes on as if nothing had been. Several nodes need a folder that all
of them share.
"""


@click.command(cls=Command, epilog=EXAMPLES)
@beside_options
@click.argument("plan", required=False, type=File(), metavar="PLAN.json|MODEL")
@config_options
@click.option(
    "--data",
    type=File(),
    metavar="PATH",
    help="Text file or a folder of them, uint16 .bin, images in class folders or .npy; default: Python's own source files.",
)
@click.option("--tokenizer", type=File(), metavar="JSON", help="A tokenizers file; default: bytes are tokens.")
@click.option("--steps", type=Whole(*LIMITS["steps"]), default=20, show_default=True, help="Optimizer steps in all.")
@click.option("--out", type=File(), metavar="DIR", help="Folder of the run, new or empty; --config may say one.")
@click.option(
    "--resume",
    is_flag=True,
    help="Continue from the newest complete checkpoint in --out; options that are not given stay as they were.",
)
@click.option("--seed", type=Whole(*LIMITS["seed"]), default=0, show_default=True)
@click.option("--learning-rate", type=float, default=3e-4, show_default=True)
@click.option(
    "--schedule", default="", metavar="JSON", help="The learning rate by step, as a DeepSpeed file's scheduler says it."
)
@click.option(
    "--coefficients",
    default="",
    metavar="JSON",
    help='Numbers of the optimizer: {"betas": [0.9, 0.95], "weight_decay": 0.1}.',
)
@click.option(
    "--scaling", default="", metavar="JSON", help="How float16 losses are scaled, as a DeepSpeed file's fp16 says it."
)
@click.option(
    "--clip", type=float, default=1.0, show_default=True, help="Largest norm of the gradients; 0 leaves them."
)
@click.option("--nvme-path", type=File(), metavar="DIR", help="A folder on a disk, for plans that offload to NVMe.")
@click.option(
    "--accelerate", is_flag=True, help="Let accelerate's Accelerator.prepare put the strategy around the model."
)
@click.option(
    "--eval-every",
    type=Whole(*LIMITS["eval_every"]),
    default=0,
    metavar="N",
    help="Evaluate every N steps; 0: at the end only.",
)
@click.option(
    "--checkpoint-every",
    "save_every",
    type=Whole(*LIMITS["checkpoint_every"]),
    default=0,
    metavar="N",
    help="Save every N steps; 0: at the end only.",
)
@click.option(
    "--measure-steps",
    type=Whole(*LIMITS["measure_steps"]),
    default=3,
    show_default=True,
    help="How many first steps are metered: 0, or at least 2.",
)
@click.option(
    "--keep-checkpoints",
    type=Whole(*LIMITS["keep_checkpoints"]),
    default=0,
    metavar="N",
    help="Keep the newest N checkpoints; 0: all of them.",
)
@click.option(
    "--max-restarts",
    type=Whole(0, MOST_RESTARTS),
    default="0",
    metavar="N",
    help="Start the ranks again, at most N times, after one failed; they go on from the newest checkpoint.",
)
@click.option(
    "--on-oom",
    type=Name("choice", ("stop", "next")),
    default="stop",
    help="After running out of memory: stop, or go on with the next plan that should fit.",
)
@click.option("--nodes", type=Whole(), metavar="N", help="Machines the plan's ranks are spread over; else the plan's.")
@click.option(
    "--node-rank",
    type=Whole(0),
    metavar="R",
    envvar="SLURM_NODEID",
    help="Which of them this is, from 0; under srun it is known.",
)
@click.option(
    "--rdzv", default="", metavar="HOST:PORT", help="Where the nodes meet: the first one, and a free port on it."
)
@click.option(
    "--dry-run", is_flag=True, help="Only show the torchrun line of this node and, for several, the srun line."
)
@click.pass_context
def command(
    ctx: click.Context,
    /,
    plan: Path | None,
    out: Path | None,
    config: Path | None,
    scale: int | None,
    nodes: int | None,
    node_rank: int | None,
    rdzv: str,
    max_restarts: int,
    on_oom: str,
    dry_run: bool,
    **options: Any,
) -> None:
    """Train the plan in PLAN.json, or what --config says of MODEL, on this machine's GPUs or CPUs under torchrun.

    Ends with estimated against measured memory, the evaluation loss and where the checkpoint is.
    """
    typed = {name for name in options if ctx.get_parameter_source(name) != ParameterSource.DEFAULT}
    trains = {_FIELDS.get(name, name): options.pop(name) for name in _TRAINING}
    chosen = {_FIELDS.get(name, name) for name in _TRAINING if name in typed}
    what, found = _plan(plan, config, scale, {**options, "nodes": nodes})
    out = out or found.pop("out", None)
    if out is None:
        raise InputError("--out DIR is missing: a new folder for the run")
    trains |= {field: value for field, value in found.items() if field not in {*chosen, "out"}}
    # SLURM sets the node's number for any job; a plan for one node has no use for it.
    place = Place(node=(node_rank or 0) if what.nodes > 1 else 0, rendezvous=rdzv, restarts=max_restarts)
    if what.nodes == 1 and ctx.get_parameter_source("node_rank") == ParameterSource.COMMANDLINE:
        raise InputError("--node-rank is for several nodes; this plan is for one: give --nodes N, or leave it out")
    training, changed = (
        continued(out, {field: trains[field] for field in chosen}) if trains["resume"] else (Training(**trains), "")
    )
    if dry_run:
        file = plan if plan is not None and config is None else out / "plan.json"
        if config is not None:
            click.echo(
                f"memcalc: {file} is the plan that memcalc estimate --config {config} --save-plan writes", err=True
            )
        if on_oom == "next":
            click.echo(
                "memcalc: the line does not go on with another plan; --on-oom next does without --dry-run", err=True
            )
        click.echo(dry(what, training, place, plan_file=file, out=out))
        return
    how: dict[str, Any] = {"place": place, "on_oom_next": on_oom == "next"}
    checkpoint = newest_checkpoint(out) if training.resume else None
    if checkpoint is not None and checkpoint[0] >= training.steps:
        read_marker(checkpoint[1], what)  # a folder may have any name
        click.echo(
            f"nothing to do and nothing changed: {out} is at step {checkpoint[0]}, and --steps {training.steps} are steps in "
            "all; give more to go on"
        )
        return
    if changed:
        click.echo(changed)
    run_and_show(what, out=out, training=training, **how)


_TRAINING = (
    "data", "tokenizer", "steps", "resume", "seed", "learning_rate", "clip", "eval_every", "save_every", "measure_steps",
    "keep_checkpoints", "schedule", "coefficients", "scaling", "nvme_path",
    "accelerate",
)  # fmt: skip
"""Options that say how to train, by their parameters' names."""
_FIELDS = {"save_every": "checkpoint_every"}
"""Those that Training calls otherwise."""


def _plan(
    plan: Path | None, config: Path | None, scale: int | None, words: dict[str, Any]
) -> tuple[Plan, dict[str, Any]]:
    """What to train, and what a launch file says of how, its folder under ``out``."""
    if config is not None:
        model = None if plan is None else ModelName("model", MODELS).read(str(plan), "MODEL")
        what, found = configured(config, {**words, "model": model}, scale)
        return what, {name: Path(value) if name in ("out", "nvme_path") else value for name, value in found.items()}
    refuse_without_config(scale)
    if plan is None:
        raise InputError("give PLAN.json, as recommend --save-plan writes it, or a MODEL with --config FILE")
    nodes = words.pop("nodes")
    if str(plan) in MODELS:
        raise InputError(
            f"{plan} is a model; launch needs its whole plan: memcalc recommend {plan} --save-plan plan.json, or --config FILE"
        )
    said_by_file(str(plan), words, "module", "sample")
    what = load_plan(plan)
    confirm_code(what, words.get("module"), words.get("sample"), f"memcalc launch {plan}")
    return replace(what, nodes=nodes) if nodes else what, {}


def dry(plan: Plan, training: Training, place: Place, *, plan_file: Path, out: Path) -> str:
    """The lines that would start the plan: torchrun's here, and what srun would call on every node."""
    check_plan(plan, out=out, training=training, place=place)
    words = ["torchrun", *torchrun(plan, training, place, out)[3:]]  # what follows "python -m torch.distributed.run"
    words[words.index(str(out / "plan.json"))] = str(plan_file)  # launch would write the other
    allocator = ["env", f"PYTORCH_CUDA_ALLOC_CONF={plan.allocator}"] if plan.allocator else []
    lines = [shlex.join([*allocator, *words])]
    if plan.nodes > 1:
        words = ["memcalc", "launch", str(plan_file), "--out", str(out), *training.arguments()]
        words += [*code_options(plan), "--nodes", str(plan.nodes), "--rdzv", place.rendezvous]
        words += ["--max-restarts", str(place.restarts)] if place.restarts else []
        gpus = ["--gpus-per-node", str(plan.ranks // plan.nodes)] if plan.device == "cuda" else []
        lines.append(shlex.join(["srun", "--nodes", str(plan.nodes), "--ntasks-per-node", "1", *gpus, *words]))
    return "\n".join(lines)


def run_and_show(plan: Plan, *, out: Path, training: Training, **how: Any) -> None:
    """Launch a plan with progress on the terminal, and show what came of it."""
    run = launch(plan, out=out, training=training, show=click.echo, **how)
    if how.get("place", Place()).node:
        click.echo(f"done in {run.seconds:.1f} s; the first node shows what came of it")
        return
    if plan.model.module.factory:
        try:
            rehearse(plan)[0].save(out / REHEARSAL)
        except InputError as error:
            click.echo(f"activations are not estimated: {error}")
    click.echo()
    try:
        comparison = compare_run(out)
        click.echo(f"{compare_table(comparison)}\n\n{summary(comparison)}")
    except FileError as error:  # the run itself went well: it was started without a meter
        click.echo(f"no comparison: {error}")
    click.echo(results(run))


def results(run: Run) -> str:
    """Evaluation loss, and where the newest checkpoint and the rest are."""
    record = Measurement.from_json(run.out / "run.json", str(run.out / "run.json"))
    checkpoint = newest_checkpoint(run.out)
    lines = [
        f"evaluation loss: {record.evaluation_loss:.4f}" if record.evaluation_loss is not None else "",
        f"checkpoint: {checkpoint[1]}" if checkpoint else "",
        f"done in {run.seconds:.1f} s; everything is in {run.out}",
    ]
    return "\n".join(line for line in lines if line)
