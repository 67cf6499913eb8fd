"""Several plans in one process group, so that tests pay for starting torch once for each number of ranks.

    python -m torch.distributed.run --standalone --nproc-per-node 2 tests/trainers/driver.py JOBS.json

JOBS.json lists jobs ``{"plan": {...}, "settings": {...}, "out": folder or null, "result": path}``; rank 0 writes
each job's losses and evaluation loss to its ``result``, and every rank its measurement to ``result`` + ``.R``.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import torch.distributed as dist

from memcalc.plan import Plan
from memcalc.training import Training
from trainers.loop import train
from trainers.process import Process, Rank, join


def main(path: Path) -> None:
    """Run all jobs."""
    with join(Rank.from_environment(), "cpu", 0) as process:
        for job in json.loads(path.read_text()):
            run(job, process)


def run(job: dict, process: Process) -> None:
    """One plan from beginning to end."""
    if job.get("copy") and process.first:
        shutil.copytree(*job["copy"])
    dist.barrier()
    settings = dict(job["settings"])
    if "data" in settings:
        settings["data"] = Path(settings["data"])
    if settings.get("nvme_path"):
        settings["nvme_path"] = Path(settings["nvme_path"])
    out = Path(job["out"]) if job["out"] else None
    measurement = train(Plan.from_dict(job["plan"]), Training(**settings), process, out=out)
    result = Path(job["result"])
    if process.first:
        found = {
            "losses": measurement.losses,
            "evaluation": measurement.evaluation_loss,
            "speed": measurement.samples_per_second,
        }
        result.write_text(json.dumps(found))
    for rank in measurement.ranks:
        rank.save(result.with_name(f"{result.name}.{rank.rank}"))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
