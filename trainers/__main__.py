"""One rank of a run: ``torchrun --standalone --nproc-per-node RANKS -m trainers PLAN.json OUT``."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import click

from memcalc.checkpoints import newest_checkpoint
from memcalc.errors import MemcalcError
from memcalc.failure import Preempted
from memcalc.named_code import confirm_code
from memcalc.plan import Plan
from memcalc.training import Training
from trainers.process import Rank, Signals, join, log_to_file, report

__all__ = ["main", "read_plan"]


@click.command(help="Train the plan in PLAN on the ranks torchrun started; everything it leaves is in OUT.")
@click.argument("plan", type=click.Path(path_type=Path))
@click.argument("out", type=click.Path(path_type=Path))
@click.option("--data", type=click.Path(path_type=Path), help="Text, a folder of texts, a uint16 .bin, or images.")
@click.option(
    "--tokenizer", type=click.Path(path_type=Path), help="A tokenizers JSON; bytes are the tokens without one."
)
@click.option("--steps", type=click.IntRange(min=1), default=20, show_default=True)
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True)
@click.option("--learning-rate", type=float, default=3e-4, show_default=True)
@click.option("--clip", type=float, default=1.0, show_default=True, help="Largest gradient norm; 0 switches it off.")
@click.option("--eval-every", type=click.IntRange(min=0), default=0, help="Steps; 0 evaluates at the end only.")
@click.option("--checkpoint-every", type=click.IntRange(min=0), default=0, help="Steps; 0 saves at the end only.")
@click.option(
    "--keep-checkpoints", type=click.IntRange(min=0), default=0, help="How many of the newest stay; 0 keeps all."
)
@click.option("--schedule", default="", help="The learning rate by step, as a DeepSpeed file says it, in JSON.")
@click.option("--coefficients", default="", help="Numbers of the optimizer, as a DeepSpeed file says them, in JSON.")
@click.option("--scaling", default="", help="How losses are scaled, as a DeepSpeed file says it, in JSON.")
@click.option("--module", help="The code of a module that the plan runs, named once more.")
@click.option("--sample", help="The code that makes its batches, named once more.")
@click.option("--nvme-path", type=click.Path(path_type=Path), help="A folder for what is offloaded to NVMe.")
@click.option("--accelerate", is_flag=True, help="Let accelerate put the strategy around the model.")
@click.option("--resume", is_flag=True, help="Go on from the newest complete checkpoint in OUT.")
@click.option(
    "--measure-steps",
    type=click.IntRange(min=0),
    default=3,
    show_default=True,
    help="How many first steps are metered.",
)
def main(plan: Path, out: Path, module: str | None, sample: str | None, **options: object) -> None:
    """Run one rank; any error ends in one line, a log and ``OUT/errors/rank-R.json``."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "5")  # read when torch is imported; its profiler prints otherwise
    terminal = sys.stderr.fileno()
    try:
        place = Rank.from_environment()
        terminal = log_to_file(out / "logs" / f"rank-{place.rank}.log")
        signals, settings = Signals(), Training(**options)  # type: ignore[arg-type]
        if int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) and newest_checkpoint(out) is not None:
            settings = replace(settings, resume=True)
        code = _run(plan, out, place, settings, signals, terminal, named=(module, sample))
    except MemcalcError as error:  # no log yet, or it cannot be written
        os.write(terminal, f"error: {error}\n".encode())
        code = error.exit_code
    sys.stdout.flush()
    sys.stderr.flush()
    # A failed collective leaves threads that would wait for ranks that are gone.
    os._exit(code)


def read_plan(path: Path, module: str | None, sample: str | None) -> Plan:
    """The plan in a file, whose code has been named. Raises MemcalcError."""
    plan = Plan.load(path)
    confirm_code(plan, module, sample, "python -m trainers ...")
    return plan


def _run(
    path: Path, out: Path, place: Rank, settings: Training, signals: Signals, terminal: int,
    named: tuple[str | None, str | None],
) -> int:  # fmt: skip
    moment = "init"
    try:
        from trainers.loop import train
        from trainers.parts import Moments

        at = Moments()
        try:
            plan = read_plan(path, *named)
            with join(place, plan.device, settings.seed) as process:
                train(plan, settings, process, out=out, say=_say(process.first), at=at, signals=signals)
        except Preempted as told:
            print(f"stopped by SIGTERM: {told}", file=sys.stderr, flush=True)
            return told.exit_code
        finally:
            moment, signals.saves = at.moment, False
    except BaseException as error:
        line = report(error, out=out, rank=place.rank, moment=moment)
        os.write(terminal, f"{line}\n".encode())
        return error.exit_code if isinstance(error, MemcalcError) else 1
    return 0


def _say(first: bool) -> Callable[[str], None]:
    def say(line: str) -> None:
        print(line, file=sys.stderr, flush=True)
        if first:
            print(line, flush=True)

    return say


if __name__ == "__main__":
    main()
