"""Many plans one after the other in one process group: what ``memcalc validate`` starts.

torchrun --standalone --nproc-per-node 2 -m trainers.matrix --steps 3 RUN_DIR RUN_DIR ...

Each RUN_DIR holds a plan.json and is filled like one of ``memcalc launch``, without checkpoints and weights. The first
failure ends the job, because ranks that wait for a dead one cannot go on; the caller starts the rest again.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
from pathlib import Path

# Read when torch is loaded: 0 to 5, where 5 silences the profiler's messages about its own start and stop.
os.environ.setdefault("KINETO_LOG_LEVEL", "5")

import torch
import torch.distributed as dist

from memcalc.measurement import Measurement
from memcalc.plan import Plan
from memcalc.training import Training
from trainers.batches import Batches
from trainers.loop import train
from trainers.parts import Moments, Parts
from trainers.process import Process, Rank, Signals, join, log_to_file, report

__all__ = ["main", "run"]


def main(words: list[str] | None = None) -> None:
    """Run the plan in each folder; exits with 1 after the first that fails."""
    parser = argparse.ArgumentParser(prog="trainers.matrix", description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("folders", nargs="+", type=Path, metavar="RUN_DIR")
    parser.add_argument("--steps", type=int, default=3)
    arguments = parser.parse_args(words)
    place = Rank.from_environment()
    Signals()
    settings = Training(steps=arguments.steps, measure_steps=arguments.steps)
    with join(place, "cpu", settings.seed) as process:
        for folder in arguments.folders:
            if not run(folder, settings, process):
                sys.exit(1)  # inside join, which then does not wait for the others


def run(folder: Path, settings: Training, process: Process) -> bool:
    """Train the plan in a folder and leave its measurement there; False, with errors/rank-R.json, when that failed."""
    at = Moments()
    terminal = log_to_file(folder / "logs" / f"rank-{process.rank}.log")
    try:
        plan = Plan.load(folder / "plan.json")
        # oneDNN packs 16-bit weights into scratch memory whose size hangs on the CPU's instruction set: no plan can
        # know it. Convolutional families are played with oneDNN's copies, and run with it.
        torch.backends.mkldnn.set_flags(plan.family.convolves)
        measurement = train(plan, settings, process, at=at, parts=Parts(batches=_all_trained_on))
        save(measurement, folder, process)
    except (Exception, KeyboardInterrupt) as error:
        line = report(error, out=folder, rank=process.rank, moment=at.moment)
        os.write(terminal, f"{line}\n".encode())
        return False
    finally:
        os.dup2(terminal, 2)
        os.close(terminal)
        at.meter = None
        # Modules and optimizers hold each other in circles; what one plan leaves must not count for the next.
        gc.collect()
    dist.barrier()
    if process.first:
        print(f"done {folder.name}", flush=True)
    return True


def _all_trained_on(plan: Plan, settings: Training, process: Process) -> Batches:
    """Nothing is evaluated at the end, which takes as long as all steps: memory and the losses of the steps are asked for."""
    batches = Batches(plan, settings, process)
    batches.held_out = batches.held_out[:0]
    return batches


def save(measurement: Measurement, folder: Path, process: Process) -> None:
    """This rank's memory; rank 0 also keeps the record of the run."""
    (folder / "measured").mkdir(exist_ok=True)
    for rank in measurement.ranks:
        rank.save(folder / "measured" / f"rank-{rank.rank}.json")
    if process.first:
        measurement.save(folder / "run.json")


if __name__ == "__main__":
    main()
