"""``memcalc launch``: train a plan on this machine, then show estimated against measured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from memcalc.cli.compare import compare_table, summary
from memcalc.cli.kinds import File
from memcalc.compare import compare_run
from memcalc.errors import FileError, InputError
from memcalc.launch import Run, launch
from memcalc.measurement import Measurement
from memcalc.module import confirm_code, rehearse
from memcalc.plan import Plan
from memcalc.run_folder import REHEARSAL, continued, newest_checkpoint
from memcalc.training import Training

__all__ = ["command", "run_and_show"]

EXAMPLES = """\b
Examples:
  memcalc launch plan.json --data book.txt --steps 200 --out run
  memcalc launch plan.json --data books/ --steps 1000 --checkpoint-every 100 --eval-every 100 --out run
  memcalc launch run/plan.json --steps 2000 --out run --resume

The folder of a run holds plan.json, training.json, logs/, measured/, run.json, checkpoints/ and weights/.
Ctrl-C stops all ranks; a second one kills them at once.
"""


@click.command(epilog=EXAMPLES)
@click.argument("plan", type=File(), metavar="PLAN.json")
@click.option(
    "--data",
    type=File(),
    metavar="PATH",
    help="Text file or a folder of them, uint16 .bin, images in class folders or .npy; default: Python's own source files.",
)
@click.option("--tokenizer", type=File(), metavar="JSON", help="A tokenizers file; default: bytes are tokens.")
@click.option("--steps", type=int, default=20, show_default=True, help="Optimizer steps in all.")
@click.option("--out", type=File(), required=True, metavar="DIR", help="Folder of the run; new or empty.")
@click.option(
    "--resume",
    is_flag=True,
    help="Continue from the newest complete checkpoint in --out; options that are not given stay as they were.",
)
@click.option(
    "--module", metavar="FILE:NAME", help="Run the code of your own that the plan names; a file alone never does."
)
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("--learning-rate", type=float, default=3e-4, show_default=True)
@click.option(
    "--clip", type=float, default=1.0, show_default=True, help="Largest norm of the gradients; 0 leaves them."
)
@click.option("--eval-every", type=int, default=0, metavar="N", help="Evaluate every N steps; 0: at the end only.")
@click.option("--checkpoint-every", type=int, default=0, metavar="N", help="Save every N steps; 0: at the end only.")
@click.option(
    "--measure-steps",
    type=int,
    default=3,
    show_default=True,
    help="How many first steps are metered: 0, or at least 2.",
)
@click.pass_context
def command(ctx: click.Context, /, plan: Path, out: Path, module: str | None, **options: Any) -> None:
    """Train the plan in PLAN.json on this machine's GPUs or CPUs under torchrun.

    Ends with estimated against measured memory, the evaluation loss and where the checkpoint is.
    """
    what = Plan.load(plan)
    confirm_code(what, module, f"memcalc launch {plan}")
    if not options["resume"]:
        run_and_show(what, out=out, training=Training(**options))
        return
    given = {key: value for key, value in options.items() if ctx.get_parameter_source(key) != ParameterSource.DEFAULT}
    training, changed = continued(out, given)
    if changed:
        click.echo(changed)
    checkpoint = newest_checkpoint(out)
    if checkpoint is not None and checkpoint[0] >= training.steps:
        click.echo(f"already at step {checkpoint[0]}; give more --steps to go on")
        return
    run_and_show(what, out=out, training=training)


def run_and_show(plan: Plan, *, out: Path, training: Training) -> None:
    """Launch a plan with progress on the terminal, and show what came of it."""
    run = launch(plan, out=out, training=training, show=click.echo)
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
