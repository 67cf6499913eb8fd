"""Several plans in one process group, whose ranks are forked from one process: torch is loaded once for all of them.

    python tests/trainers/driver.py RANKS JOBS.json

Loading it takes longer than most jobs. What torchrun does is the subject of others: test_launch_real.py, test_survival.py.
JOBS.json lists jobs ``{"plan": {...}, "settings": {...}, "out": folder or null, "result": path}``; rank 0 writes
each job's losses and evaluation loss to its ``result``, and every rank its measurement to ``result`` + ``.R``.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from memcalc import data
from memcalc.plan import Plan
from memcalc.training import Training
from tests.trainers.runs import EVALUATED
from trainers.loop import train
from trainers.process import Process, Rank, join

_LINEAR = torch.nn.functional.linear


def main(ranks: int, path: Path) -> None:
    """Run all jobs on so many ranks, which meet as those of torchrun do: at a store that none of them holds."""
    data.EVALUATED = EVALUATED
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    mp.start_processes(rank, (ranks, store.port, path), nprocs=ranks, start_method="fork")


def rank(number: int, ranks: int, port: int, path: Path) -> None:
    """Run all jobs as one of the ranks."""
    os.environ |= {
        "RANK": str(number), "LOCAL_RANK": str(number), "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True",
    }  # fmt: skip
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
    plan = Plan.from_dict(job["plan"])
    torch.nn.functional.linear = _LINEAR  # DeepSpeed's stage 3 leaves one of its own there, for all that comes after it
    torch.backends.mkldnn.set_flags(plan.family.convolves)  # as trainers/matrix.py, where the reason stands
    measurement = train(plan, Training(**settings), process, out=out)
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
    main(int(sys.argv[1]), Path(sys.argv[2]))
