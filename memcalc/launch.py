"""Starting a plan for real: everything that can be checked first, then one call of torchrun.

A run owns its folder; memcalc.run_folder says what is in it.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import sys
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path

from memcalc import data
from memcalc.checkpoints import newest_checkpoint
from memcalc.errors import InputError, PlanError, RunError, shorten
from memcalc.failure import OutOfMemory, failure, how_to_go_on, preempted
from memcalc.hyperparameters import check_coefficients, check_scaling
from memcalc.named_code import code_options
from memcalc.plan import Plan
from memcalc.run_folder import check_folder, check_space, ended, held, prepare, sweep
from memcalc.runnable import require_accelerate, require_engine, require_swap, require_unlocked
from memcalc.sound import unheard
from memcalc.supervise import GRACE_SECONDS, Stopped, supervise
from memcalc.training import Training

__all__ = [
    "MOST_RESTARTS",
    "Place",
    "Run",
    "check",
    "check_place",
    "check_plan",
    "command",
    "environment",
    "installed_torch",
    "launch",
    "require_torch",
    "torchrun",
]

TRAINERS = "trainers"
"""The module torchrun runs on each rank."""

MOST_PORT = 65535
MOST_RESTARTS = 1000
"""Past it a number is a slip: each start takes seconds, and a failure that comes back so often is no accident."""
_JOIN_SECONDS = 300
"""How long a machine waits for the others."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Which of the plan's machines this is, how they find each other, and how often they try. Raises InputError."""

    node: int = 0
    rendezvous: str = ""
    """HOST:PORT of the first machine; blank where there is one only."""
    restarts: int = 0
    """How often torchrun starts the ranks again after one failed; they go on from the newest checkpoint."""

    def __post_init__(self) -> None:
        told = re.fullmatch(r"([^\s:/\[\]]+|\[[0-9a-fA-F:]+\]):([0-9]{1,5})", self.rendezvous)
        if self.rendezvous and (told is None or int(told[2]) > MOST_PORT):
            raise InputError(f"--rdzv {shorten(self.rendezvous)} is not HOST:PORT, like node0:29500")
        if not 0 <= self.restarts <= MOST_RESTARTS:
            raise InputError(f"max restarts {shorten(self.restarts)} must be 0 to {MOST_RESTARTS:,}")

    @property
    def log(self) -> str:
        """torchrun's log in the run's folder, one for each machine."""
        return f"torchrun-node-{self.node}.log" if self.node else "torchrun.log"


_HERE = Place()


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
    place: Place = _HERE,
    on_oom_next: bool = False,
    show: Callable[[str], None] = print,
    grace_seconds: float = GRACE_SECONDS,
) -> Run:
    """Train this machine's part of ``plan`` and leave everything about it in the folder ``out``.

    Progress goes to ``show`` line by line. With ``on_oom_next`` a run that fails for want of memory goes on with the
    next plan of the same job that should fit. Raises MemcalcError before anything is written when the run cannot
    work, RunError when a rank fails, supervise.Stopped on Ctrl-C; no process is left in any case.
    """
    for warning in check(plan, out=out, training=training, place=place):
        show(f"warning: {warning}")
    with held(out, place.node):
        while True:
            prepare(plan, training, out, log=place.log, first=not place.node)
            try:
                return _run(plan, training, place, out, show, grace_seconds)
            except OutOfMemory as failed:
                if not on_oom_next or failed.following is None:
                    raise
                # Each plan needs clearly less than the one before, so this ends.
                show(f"{failed}; goes on with that")
                plan, training = failed.following, replace(training, resume=newest_checkpoint(out) is not None)
                shutil.rmtree(out / "measured", ignore_errors=True)  # of the plan that failed


def _run(
    plan: Plan, training: Training, place: Place, out: Path, show: Callable[[str], None], grace_seconds: float
) -> Run:
    started = time.monotonic()
    try:
        code = supervise(
            torchrun(plan, training, place, out),
            environment=environment(os.environ, plan.allocator),
            errors=out / "logs" / place.log,
            show=show,
            grace_seconds=grace_seconds,
        )
    except Stopped as stopped:
        ended(out, "stopped")
        raise preempted(out, stopped.signal) or Stopped(stopped.signal, how_to_go_on(out)) from None
    finally:
        if (swapped := swap_folder(training, out)) is not None:
            shutil.rmtree(swapped, ignore_errors=True)
        if plan.nodes == 1:  # ranks of other machines may still be writing
            sweep(out)
    if code:
        ended(out, "failed")
        raise failure(plan, out, code, log=place.log, restarts=place.restarts)
    return Run(out=out, seconds=time.monotonic() - started)


def swap_folder(training: Training, out: Path) -> Path | None:
    """The run's own folder below the one for NVMe: DeepSpeed empties what it finds there."""
    if training.nvme_path is None:
        return None
    place = out.absolute()
    return training.nvme_path.absolute() / f"memcalc-{place.name}-{zlib.crc32(bytes(place)):08x}"


def torchrun(plan: Plan, training: Training, place: Place, out: Path) -> list[str]:
    """The call that starts this machine's ranks of a plan."""
    training = replace(training, nvme_path=swap_folder(training, out))
    words = [str(out / "plan.json"), str(out), *training.arguments(), *code_options(plan)]
    if plan.nodes == 1:
        return command(plan.processes, TRAINERS, *words, restarts=place.restarts)
    meeting = [
        "--nnodes", str(plan.nodes), "--node-rank", str(place.node), "--rdzv-backend", "c10d",
        "--rdzv-endpoint", place.rendezvous, "--rdzv-id", f"memcalc-{out.name}",
        "--rdzv-conf", f"join_timeout={_JOIN_SECONDS}",
    ]  # fmt: skip
    return command(plan.processes // plan.nodes, TRAINERS, *words, restarts=place.restarts, meeting=meeting)


def command(
    ranks: int, module: str, *arguments: str, restarts: int = 0, meeting: Sequence[str] = ("--standalone",)
) -> list[str]:
    """One torchrun call: by itself on a free port of its own, and without restarts the first failure ends the job."""
    words = [sys.executable, "-m", "torch.distributed.run", *meeting, "--max-restarts", str(restarts)]
    return [*words, "--nproc-per-node", str(ranks), "-m", module, *arguments]


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


def check(plan: Plan, *, out: Path, training: Training, place: Place = _HERE) -> list[str]:
    """Everything that can be known before a process starts; returns warnings, raises MemcalcError."""
    require_torch()
    require_engine(plan)
    if plan.offload.swaps:
        require_swap(plan, training.nvme_path)
    if training.accelerate:
        require_accelerate(plan)
    check_plan(plan, out=out, training=training, place=place)
    check_space(plan, out)
    require_unlocked(plan)
    idle = [f"the plan says what changes nothing: {said}" for said in unheard(plan)]
    if training.nvme_path is not None and not plan.offload.swaps:
        idle.append("nothing of this plan is offloaded to NVMe; --nvme-path is not used")
    return [*_check_machine(plan), *_other_steps(plan, out, training), *idle]


def _other_steps(plan: Plan, out: Path, training: Training) -> list[str]:
    """A warning where a resumed run's steps are not those of the run so far."""
    before = Plan.load(out / "plan.json") if training.resume else plan
    if before.global_batch == plan.global_batch:
        return []
    return [
        f"a step takes {plan.global_batch} samples and took {before.global_batch} so far: the run does not learn what it "
        "would have without a stop"
    ]


def check_plan(plan: Plan, *, out: Path, training: Training, place: Place = _HERE) -> None:
    """What can be known of a run whatever this machine has; raises MemcalcError, and writes nothing."""
    if plan.model.family == "size":
        raise PlanError(
            f"{plan.model.name} is known by its size only; a model to train needs a family: mlp, gpt2 or llama"
        )
    if plan.untrained:
        raise PlanError(f"this plan can be estimated, but memcalc cannot train {plan.untrained}")
    check_place(plan, place)
    if plan.offload.parameters == "nvme" and (training.resume or place.restarts):
        # Seen with DeepSpeed 0.19.8: the step after a checkpoint was read moved the weights otherwise than without a stop.
        raise PlanError(
            "a run with parameters on NVMe does not go on from a checkpoint as it would have without a stop; make a plan with "
            "--offload-parameters cpu for it, and leave out --max-restarts"
        )
    row = plan.optimizer_row
    if not row.library.startswith("torch."):
        raise PlanError(f"{row.name} can be estimated but not trained: {row.library} is not part of torch, take adamw")
    if not row.trained:
        raise PlanError(f"{row.name} can be estimated but not trained: its step takes more than gradients, take adamw")
    check_coefficients(plan, training.coefficients)
    check_scaling(plan, training.scaling)
    if not place.node:
        check_folder(plan, out, resume=training.resume)
    data.check(plan, training.data, training.tokenizer)


def check_place(plan: Plan, place: Place) -> None:
    """Raises InputError when this machine has no place in the plan."""
    if plan.nodes > 1 and not place.rendezvous:
        raise PlanError(
            f"the plan is for {plan.nodes} nodes; on each of them give --node-rank R and --rdzv HOST:PORT of the first, "
            "or make it a plan for one with --nodes 1"
        )
    if plan.nodes == 1 and place.rendezvous:
        raise InputError("--rdzv is for several nodes; this plan is for one: give --nodes N, or leave it out")
    if place.node >= plan.nodes:
        raise InputError(f"--node-rank {place.node} must be below the number of nodes, {plan.nodes}")


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
    here = plan.ranks // plan.nodes
    if plan.device == "cuda" and len(machine.gpus) < here:
        found = f"{len(machine.gpus)} GPU{'s' * (len(machine.gpus) > 1)}" if machine.gpus else "no GPU"
        raise PlanError(
            f"the plan needs {here} GPU{'s' * (here > 1)}{' a node' * (plan.nodes > 1)}, this machine has {found}; "
            "make one for it with memcalc recommend"
        )
    warnings = []
    if plan.device == "cpu" and here > machine.cores:
        warnings.append(f"{here} ranks share {machine.cores} cores and will be slow")
    if plan.torch != installed_torch():
        warnings.append(
            f"the plan is for torch {plan.torch}, installed is {installed_torch()}: its estimate may differ"
        )
    return warnings
