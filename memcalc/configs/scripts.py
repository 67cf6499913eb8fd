"""Scripts that start a plan's run: torchrun on one machine, or Slurm on several; the plan lies beside them."""

from __future__ import annotations

import shlex
from pathlib import Path

from memcalc import launch
from memcalc.errors import PlanError
from memcalc.plan import Plan
from memcalc.training import Training

__all__ = ["PLAN_FILE", "sbatch", "torchrun"]

PLAN_FILE = "plan.json"
_PORT = 29500
_HERE, _OUT, _PYTHON = "@here@", "@out@", "@python@"


def torchrun(plan: Plan, training: Training) -> str:
    """A bash script for one machine: ``bash run.sh OUT``, with the Python that ``PYTHON`` names or ``python``. Raises PlanError for a plan of several."""
    if plan.nodes > 1:
        raise PlanError(f"the plan is for {plan.nodes} nodes; torchrun's script is for one machine, take --emit sbatch")
    words = [_PYTHON, *launch.torchrun(plan, training, launch.Place(), Path(_OUT))[1:]]
    words[words.index(str(Path(_OUT) / PLAN_FILE))] = f"{_HERE}/{PLAN_FILE}"
    environment = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    if plan.allocator:
        environment["PYTORCH_CUDA_ALLOC_CONF"] = plan.allocator
    exports = [f"export {name}={shlex.quote(value)}" for name, value in environment.items()]
    here = 'here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"'
    python = ["# The Python that memcalc and torch are installed for: PYTHON=.venv/bin/python bash run.sh OUT"]
    python.append('python="${PYTHON:-python}"')
    return _script([], [here, *python, *exports, f"exec {_shell(words)}"])


def sbatch(plan: Plan, training: Training) -> str:
    """A batch script for Slurm: ``sbatch run.sbatch OUT`` from its folder. Each node starts its ranks; they meet on the first."""
    each = plan.ranks // plan.nodes
    words = ["srun", "memcalc", "launch", f"{_HERE}/{PLAN_FILE}", "--out", _OUT, *training.arguments()]
    meeting = ["# memcalc is looked up on PATH: activate its environment before sbatch, or here."]
    if plan.nodes > 1:
        words += ["--nodes", str(plan.nodes), "--rdzv", "@head@:@port@"]
        meeting += [
            'head="$(scontrol show hostnames "${SLURM_JOB_NODELIST:?}" | head -n 1)"',
            "# A port of the job's own: several jobs may share a node.",
            f'port="$(({_PORT} + SLURM_JOB_ID % 1000))"',
        ]
    name = "".join(letter if letter.isalnum() or letter in "-_." else "-" for letter in plan.model.name)[:40]
    head = [f"#SBATCH --job-name={name}", f"#SBATCH --nodes={plan.nodes}", "#SBATCH --ntasks-per-node=1"]
    head += [f"#SBATCH --gpus-per-node={each}"] if plan.device == "cuda" else [f"#SBATCH --cpus-per-task={each}"]
    return _script(head, ['here="${SLURM_SUBMIT_DIR:?}"', *meeting, f"exec {_shell(words)}"])


def _shell(words: list[str]) -> str:
    """Words for a shell, in which a name between two @ is a variable.

    >>> print(_shell(["a b", "@out@/c"]))
    'a b' "$out"/c
    """
    text = shlex.join(words)
    for name in ("here", "out", "head", "port", "python"):
        text = text.replace(f"@{name}@", f'"${name}"')
    return text


def _script(head: list[str], body: list[str]) -> str:
    return "\n".join(["#!/bin/bash", *head, "set -euo pipefail", 'out="${1:?folder of the run}"', *body]) + "\n"
