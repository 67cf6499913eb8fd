"""Starting a plan for real: everything that can be checked first, then one call of torchrun.

A run owns its folder:

    OUT/plan.json               the plan
    OUT/logs/torchrun.log       what torchrun said; logs/rank-R.log is what rank R said
    OUT/errors/rank-R.json      why rank R failed, when it did
    OUT/measured/, run.json     memory by rank and moment; losses, speed, versions
    OUT/checkpoints/step-N/     sharded checkpoints
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from memcalc.errors import FileError, PlanError, RunError
from memcalc.failure import failure
from memcalc.plan import Plan
from memcalc.precision import DTYPE_BYTES
from memcalc.supervise import GRACE_SECONDS, supervise
from memcalc.training import Training
from memcalc.units import format_bytes

__all__ = [
    "Run",
    "check",
    "command",
    "environment",
    "installed_torch",
    "launch",
    "prepare",
    "require_torch",
]

TRAINERS = "trainers"
"""The module torchrun runs on each rank."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """A run that ended well."""

    out: Path
    seconds: float


def launch(
    plan: Plan,
    *,
    out: Path,
    training: Training,
    show: Callable[[str], None] = print,
    grace_seconds: float = GRACE_SECONDS,
) -> Run:
    """Train ``plan`` on this machine and leave everything about it in the folder ``out``.

    Progress goes to ``show`` line by line. Raises MemcalcError before anything is written when the run cannot
    work, RunError when a rank fails, supervise.Stopped on Ctrl-C; no process is left in any case.
    """
    for warning in check(plan, out=out, training=training):
        show(f"warning: {warning}")
    prepare(plan, out)
    started = time.monotonic()
    code = supervise(
        command(plan.ranks, TRAINERS, str(out / "plan.json"), str(out), *training.arguments()),
        environment=environment(os.environ),
        errors=out / "logs" / "torchrun.log",
        show=show,
        grace_seconds=grace_seconds,
    )
    if code:
        raise failure(plan, out, code)
    return Run(out=out, seconds=time.monotonic() - started)


def command(ranks: int, module: str, *arguments: str) -> list[str]:
    """One torchrun call: a free port of its own (``--standalone``), and the first failure ends the job."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--max-restarts", "0"]
    return [*torchrun, "--nproc-per-node", str(ranks), "-m", module, *arguments]


def environment(base: Mapping[str, str]) -> dict[str, str]:
    """What the ranks get: lines at once, one thread each (more only fight over the cores), and this memcalc."""
    root = Path(__file__).resolve().parent.parent
    # PYTHONSAFEPATH: a folder named trainers where the user happens to stand is not run in place of ours.
    found = {"OMP_NUM_THREADS": "1", **base, "PYTHONUNBUFFERED": "1", "PYTHONSAFEPATH": "1"}
    if root.name != "site-packages":
        found["PYTHONPATH"] = os.pathsep.join(part for part in (base.get("PYTHONPATH"), str(root)) if part)
    return found


def check(plan: Plan, *, out: Path, training: Training) -> list[str]:
    """Everything that can be known before a process starts; returns warnings, raises MemcalcError."""
    require_torch()
    if plan.model.family == "size":
        raise PlanError(
            f"{plan.model.name} is known by its size only; a model to train needs a family: mlp, gpt2 or llama"
        )
    if plan.nodes > 1:
        raise PlanError(f"the plan is for {plan.nodes} nodes; launch starts ranks on this machine only")
    _check_folder(plan, out, resume=training.resume)
    _check_space(plan, out)
    return _check_machine(plan)


def require_torch() -> None:
    """Raises RunError where torch is not installed; looks without importing it."""
    if importlib.util.find_spec("torch") is None:
        raise RunError("torch is not installed; to train: pip install 'gpu-memcalc[train]'")


def installed_torch() -> str | None:
    """Version of the installed torch, major.minor, without importing it; None where there is none."""
    try:
        return ".".join(metadata.version("torch").split(".")[:2])
    except metadata.PackageNotFoundError:
        return None


def _check_machine(plan: Plan) -> list[str]:
    from memcalc.machine import detect

    machine = detect()
    if plan.device == "cuda" and len(machine.gpus) < plan.ranks:
        found = f"{len(machine.gpus)} GPUs" if machine.gpus else "no GPU"
        raise PlanError(
            f"the plan needs {plan.ranks} GPUs, this machine has {found}; make one for it with memcalc recommend"
        )
    warnings = []
    if plan.device == "cpu" and plan.ranks > machine.cores:
        warnings.append(f"{plan.ranks} ranks share {machine.cores} cores and will be slow")
    if plan.torch != installed_torch():
        warnings.append(
            f"the plan is for torch {plan.torch}, installed is {installed_torch()}: its estimate may differ"
        )
    return warnings


def _check_folder(plan: Plan, out: Path, *, resume: bool) -> None:
    if out.exists() and not out.is_dir():
        raise FileError(f"{out} is a file; give a folder for the run")
    if not resume:
        if out.is_dir() and any(out.iterdir()):
            raise FileError(f"{out} is not empty; give another folder, or --resume to continue the run in it")
    elif not (out / "plan.json").exists() or not any((out / "checkpoints").glob("step-*")):
        raise FileError(f"{out} holds no run with a checkpoint; nothing to resume")
    else:
        before = Plan.load(out / "plan.json")
        for field in ("model", "optimizer", "precision"):
            if getattr(before, field) != getattr(plan, field):
                raise PlanError(f"{out} holds a run with another {field}; a resumed run keeps it")
    place = _existing(out)
    if not place.is_dir():
        raise FileError(f"{out} cannot be made: {place} is a file")
    if not os.access(place, os.W_OK | os.X_OK):
        raise FileError(f"{out} cannot be written: no permission in {place}")


def _check_space(plan: Plan, out: Path) -> None:
    dtype = plan.precision_row.weights
    weights = plan.family.weights(plan.model)
    parameters = sum(weight.numel for weight in weights) * DTYPE_BYTES[dtype]
    states = sum(sum(plan.optimizer_row.state_bytes(weight, dtype)) for weight in weights)
    needed, free = 2 * parameters + states, shutil.disk_usage(_existing(out)).free
    if free < needed:
        raise FileError(
            f"{out} has {format_bytes(free)} left; one checkpoint and the final weights need {format_bytes(needed)}"
        )


def _existing(path: Path) -> Path:
    """The path or its nearest parent that exists."""
    path = path.absolute()
    return next(place for place in (path, *path.parents) if place.exists())


def prepare(plan: Plan, out: Path) -> None:
    """Make the run's folder and put the plan in it; what an earlier try said about its failure goes."""
    try:
        (out / "logs").mkdir(parents=True, exist_ok=True)
        shutil.rmtree(out / "errors", ignore_errors=True)
    except OSError as error:
        raise FileError(f"{out} cannot be written: {(error.strerror or str(error)).lower()}") from None
    plan.save(out / "plan.json")
