"""``memcalc launch``: train a plan on this machine, then show estimated against measured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from memcalc.cli.compare import compare_table, summary
from memcalc.cli.config import config_options, configured, refuse_without_config
from memcalc.cli.kinds import File, Name
from memcalc.cli.options import Command, beside_options, given
from memcalc.compare import compare_run
from memcalc.errors import FileError, InputError
from memcalc.launch import Run, launch
from memcalc.measurement import Measurement
from memcalc.models import MODELS
from memcalc.plan import Plan
from memcalc.run_folder import continued, newest_checkpoint
from memcalc.training import Training

__all__ = ["command", "run_and_show"]

EXAMPLES = """\b
Examples:
  memcalc launch plan.json --data book.txt --steps 200 --out run
  memcalc launch plan.json --data books/ --steps 1000 --checkpoint-every 100 --eval-every 100 --out run
  memcalc launch run/plan.json --steps 2000 --out run --resume
  memcalc launch gpt2-tiny --config fsdp_config.yaml --scale-to-ranks 2 --out run

With --config the argument is a model, and options of a plan may stand beside it: see memcalc estimate --help.
The folder of a run holds plan.json, training.json, logs/, measured/, run.json, checkpoints/ and weights/.
Ctrl-C stops all ranks; a second one kills them at once.
"""


@click.command(cls=Command, epilog=EXAMPLES)
@click.argument("plan", required=False, type=File(), metavar="PLAN.json|MODEL")
@config_options
@click.option(
    "--data",
    type=File(),
    metavar="PATH",
    help="Text file or a folder of them, uint16 .bin, images in class folders or .npy; default: Python's own source files.",
)
@click.option("--tokenizer", type=File(), metavar="JSON", help="A tokenizers file; default: bytes are tokens.")
@click.option("--steps", type=int, default=20, show_default=True, help="Optimizer steps in all.")
@click.option("--out", type=File(), metavar="DIR", help="Folder of the run, new or empty; --config may say one.")
@click.option(
    "--resume",
    is_flag=True,
    help="Continue from the newest complete checkpoint in --out; options that are not given stay as they were.",
)
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("--learning-rate", type=float, default=3e-4, show_default=True)
@click.option(
    "--clip", type=float, default=1.0, show_default=True, help="Largest norm of the gradients; 0 leaves them."
)
@click.option("--eval-every", type=int, default=0, metavar="N", help="Evaluate every N steps; 0: at the end only.")
@click.option(
    "--checkpoint-every", "save_every", type=int, default=0, metavar="N", help="Save every N steps; 0: at the end only."
)
@click.option(
    "--measure-steps",
    type=int,
    default=3,
    show_default=True,
    help="How many first steps are metered: 0, or at least 2.",
)
@beside_options
@click.pass_context
def command(
    ctx: click.Context, /, plan: Path | None, out: Path | None, config: Path | None, scale: int | None, **options: Any
) -> None:
    """Train the plan in PLAN.json, or what --config says of MODEL, on this machine under torchrun.

    Ends with estimated against measured memory, the evaluation loss and where the checkpoint is.
    """
    typed = {name for name in options if ctx.get_parameter_source(name) != ParameterSource.DEFAULT}
    trains = {field: options.pop(name) for name, field in _TRAINING.items()}
    chosen = {field for name, field in _TRAINING.items() if name in typed}
    what, found = _plan(plan, config, scale, options)
    folder = found.pop("out", None)
    if out is None and folder is None:
        raise InputError("--out DIR is missing: a new folder for the run")
    out = out or Path(folder)
    trains |= {field: value for field, value in found.items() if field not in chosen}
    if not trains["resume"]:
        run_and_show(what, out=out, training=Training(**trains))
        return
    training, changed = continued(out, {field: trains[field] for field in chosen})
    if changed:
        click.echo(changed)
    checkpoint = newest_checkpoint(out)
    if checkpoint is not None and checkpoint[0] >= training.steps:
        click.echo(f"already at step {checkpoint[0]}; give more --steps to go on")
        return
    run_and_show(what, out=out, training=training)


_TRAINING = {
    "data": "data", "tokenizer": "tokenizer", "steps": "steps", "resume": "resume", "seed": "seed",
    "learning_rate": "learning_rate", "clip": "clip", "eval_every": "eval_every", "save_every": "checkpoint_every",
    "measure_steps": "measure_steps",
}  # fmt: skip
"""Options by name, and the fields of Training they are."""


def _plan(
    plan: Path | None, config: Path | None, scale: int | None, words: dict[str, Any]
) -> tuple[Plan, dict[str, Any]]:
    """What to train, and what a launch file says of how."""
    if config is not None:
        model = None if plan is None else Name("model", MODELS).read(str(plan), "MODEL")
        return configured(config, {**words, "model": model}, scale)
    refuse_without_config(scale)
    if plan is None:
        raise InputError("give PLAN.json, as recommend --save-plan writes it, or a MODEL with --config FILE")
    if said := [name.replace("_", " ") for name in given(words)]:
        raise InputError(f"{plan} says the whole plan; leave out: {', '.join(said)}")
    return Plan.load(plan), {}


def run_and_show(plan: Plan, *, out: Path, training: Training) -> None:
    """Launch a plan with progress on the terminal, and show what came of it."""
    run = launch(plan, out=out, training=training, show=click.echo)
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
