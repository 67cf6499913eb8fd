"""Starting a plan for real: everything that can be checked first, then one call of torchrun.

A run owns its folder; memcalc.run_folder says what is in it.
"""

from __future__ import annotations

import importlib.util
import os
import shlex
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from memcalc.errors import PlanError, RunError
from memcalc.failure import failure
from memcalc.plan import Plan
from memcalc.run_folder import check_folder, check_space, held, newest_checkpoint, prepare
from memcalc.supervise import GRACE_SECONDS, Stopped, supervise
from memcalc.training import Training

__all__ = [
    "Run",
    "check",
    "command",
    "environment",
    "installed_torch",
    "launch",
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
    with held(out):
        prepare(plan, training, out)
        return _run(plan, training, out, show, grace_seconds)


def _run(plan: Plan, training: Training, out: Path, show: Callable[[str], None], grace_seconds: float) -> Run:
    started = time.monotonic()
    try:
        code = supervise(
            command(plan.ranks, TRAINERS, str(out / "plan.json"), str(out), *training.arguments()),
            environment=environment(os.environ, plan.allocator),
            errors=out / "logs" / "torchrun.log",
            show=show,
            grace_seconds=grace_seconds,
        )
    except Stopped as stopped:
        raise Stopped(stopped.signal, _how_to_go_on(out)) from None
    if code:
        raise failure(plan, out, code)
    return Run(out=out, seconds=time.monotonic() - started)


def _how_to_go_on(out: Path) -> str:
    """What can be done with a run that was stopped; its folder knows plan and training."""
    checkpoint = newest_checkpoint(out)
    if checkpoint is None:
        return "no checkpoint was written; --checkpoint-every N keeps some"
    words = ["memcalc", "launch", str(out / "plan.json"), "--out", str(out), "--resume"]
    return f"resume with: {shlex.join(words)} (from step {checkpoint[0]})"


def command(ranks: int, module: str, *arguments: str) -> list[str]:
    """One torchrun call: a free port of its own (``--standalone``), and the first failure ends the job."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--max-restarts", "0"]
    return [*torchrun, "--nproc-per-node", str(ranks), "-m", module, *arguments]


def environment(base: Mapping[str, str], allocator: str = "") -> dict[str, str]:
    """What the ranks get: lines at once, one thread each (more only fight over the cores), the allocator's options, and this memcalc."""
    root = Path(__file__).resolve().parent.parent
    # PYTHONSAFEPATH: a folder named trainers where the user happens to stand is not run in place of ours.
    found = {"OMP_NUM_THREADS": "1", **base, "PYTHONUNBUFFERED": "1", "PYTHONSAFEPATH": "1"}
    if allocator:
        found["PYTORCH_CUDA_ALLOC_CONF"] = allocator
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
    if plan.untrained:
        raise PlanError(f"this plan can be estimated, but memcalc cannot train {plan.untrained}")
    if plan.nodes > 1:
        raise PlanError(f"the plan is for {plan.nodes} nodes; launch starts ranks on this machine only")
    row = plan.optimizer_row
    if not row.library.startswith("torch."):
        raise PlanError(f"{row.name} can be estimated but not trained: {row.library} is not part of torch, take adamw")
    if not row.trained:
        raise PlanError(f"{row.name} can be estimated but not trained: its step takes more than gradients, take adamw")
    check_folder(plan, out, resume=training.resume)
    check_space(plan, out)
    return _check_machine(plan)


def require_torch() -> None:
    """Raises RunError where torch is not installed; looks without importing it."""
    if importlib.util.find_spec("torch") is None:
        raise RunError("torch is not installed; to train: pip install 'torch>=2.6'")


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
        found = f"{len(machine.gpus)} GPU{'s' * (len(machine.gpus) > 1)}" if machine.gpus else "no GPU"
        raise PlanError(
            f"the plan needs {plan.ranks} GPU{'s' * (plan.ranks > 1)}, this machine has {found}; make one for it with memcalc recommend"
        )
    warnings = []
    if plan.device == "cpu" and plan.ranks > machine.cores:
        warnings.append(f"{plan.ranks} ranks share {machine.cores} cores and will be slow")
    if plan.torch != installed_torch():
        warnings.append(
            f"the plan is for torch {plan.torch}, installed is {installed_torch()}: its estimate may differ"
        )
    return warnings
