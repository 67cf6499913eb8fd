"""Scripts that start a plan's run under torchrun, on one machine or through Slurm; the plan lies beside them."""

from __future__ import annotations

import shlex

from memcalc.errors import PlanError
from memcalc.plan import Plan
from memcalc.training import Training

__all__ = ["PLAN_FILE", "sbatch", "torchrun"]

PLAN_FILE = "plan.json"
_PORT = 29500


def _environment(plan: Plan) -> list[str]:
    found = ["export OMP_NUM_THREADS=1 PYTHONUNBUFFERED=1"]
    if plan.allocator:
        found.append(f"export PYTORCH_CUDA_ALLOC_CONF={shlex.quote(plan.allocator)}")
    return found


def _trainers(training: Training) -> str:
    """What torchrun runs on each rank: the folder of the run is the script's first argument."""
    words = shlex.join(training.arguments())
    return f'-m trainers "$here"/{PLAN_FILE} "$out" {words}'


def torchrun(plan: Plan, training: Training) -> str:
    """A bash script for one machine: ``bash run.sh OUT``. Raises PlanError for more nodes."""
    if plan.nodes > 1:
        raise PlanError(f"the plan is for {plan.nodes} nodes; torchrun's script is for one machine, take --emit sbatch")
    return _script([
        *_environment(plan),
        f"exec torchrun --standalone --max-restarts 0 --nproc-per-node {plan.ranks} {_trainers(training)}",
    ])  # fmt: skip


def sbatch(plan: Plan, training: Training) -> str:
    """A batch script for Slurm: ``sbatch run.sbatch OUT``. One torchrun a node meets the others on the first node."""
    each = plan.ranks // plan.nodes
    gpus = [f"#SBATCH --gpus-per-node={each}"] if plan.device == "cuda" else []
    meeting = [
        'head="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)"',
        "# A port of the job's own: several jobs may share a node.",
        f'port="$(({_PORT} + SLURM_JOB_ID % 1000))"',
    ]
    rendezvous = '--rdzv-backend c10d --rdzv-id "$SLURM_JOB_ID" --rdzv-endpoint "$head:$port"'
    run = (
        f"exec srun torchrun --nnodes {plan.nodes} --nproc-per-node {each} --max-restarts 0 {rendezvous} "
        f"{_trainers(training)}"
    )
    head = [f"#SBATCH --job-name={_job(plan)}", f"#SBATCH --nodes={plan.nodes}", "#SBATCH --ntasks-per-node=1", *gpus]
    return _script([*_environment(plan), *meeting, run], head, where='"${SLURM_SUBMIT_DIR:?}"')


def _job(plan: Plan) -> str:
    return "".join(letter if letter.isalnum() or letter in "-_." else "-" for letter in plan.model.name)[:40]


def _script(body: list[str], head: list[str] | None = None, where: str = "") -> str:
    here = f"here={where}" if where else 'here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"'
    lines = ["#!/bin/bash", *(head or []), "set -euo pipefail", here, 'out="${1:?folder of the run}"', *body]
    return "\n".join(lines) + "\n"
