"""Rehearsals: the trainers' own code run for one rank of a job, without its GPUs, in a process of its own.

The ledger says what a step takes from formulas, a rehearsal what torch's own code allocates (``trainers/rehearsal``).
Both give a Timeline; ``allocated`` comes from it, ``reserved`` from the same replay of the caching allocator.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from memcalc.errors import InputError, RunError, shorten
from memcalc.estimate import verdict, with_workspaces
from memcalc.launch import environment, require_torch
from memcalc.ledger import fullest, ledger
from memcalc.measurement import RankMeasurement
from memcalc.module import rehearse as rehearse_module
from memcalc.outside import device_range
from memcalc.parallel.replicated import workspaces
from memcalc.plan import Plan
from memcalc.reserved import Range, reserved_range
from memcalc.supervise import started, stop_signals
from memcalc.timeline import Peak, Timeline

__all__ = ["DEVICES", "TIMEOUT", "Rehearsal", "rehearse", "run_apart", "stage_of_rank", "unrehearsed", "usual_rank"]

DEVICES = ("fake", "cuda")
"""Where a rehearsal runs: on tensors without values, or with real kernels on one GPU of this machine."""
TIMEOUT = 600.0
"""Seconds a rehearsal may take; one of 80 layers takes less than a minute on two cores."""
_MODULE = "trainers.rehearsal"


@dataclass(frozen=True, kw_only=True, slots=True)
class Rehearsal:
    """What one rank takes in a steady step, in bytes."""

    plan: Plan
    rank: int
    timeline: Timeline
    peak: Peak
    reserved: Range | None
    """None, as ``device``, where the caching allocator's replay of the timeline fails; a remark says why."""
    device: Range | None
    verdict: str
    source: str
    """``rehearsal``, or ``ledger`` where the plan cannot be rehearsed."""
    remarks: tuple[str, ...]
    """Why the ledger stands in, and what it adds to a rehearsal."""
    measurement: RankMeasurement | None
    """What the rehearsal measured; None when the ledger stands in."""
    seconds: float


def unrehearsed(plan: Plan) -> str:
    """Why a plan cannot be rehearsed, in words that follow "because"; blank when it can.

    >>> from memcalc.models import MODELS
    >>> unrehearsed(Plan(model=MODELS["gpt2"], tokens=8, micro_batch=1))
    ''
    """
    if plan.untrained:
        return f"memcalc cannot train {plan.untrained}"
    if plan.family.opaque and not plan.model.module.factory:
        return "the model is known by its size only"
    if plan.strategy_row.one_process:
        return "nn.DataParallel drives all GPUs from one process"
    if plan.strategy_row.zero_stage is not None:
        return "DeepSpeed's engine needs tensors that have values"
    if plan.offload.on:
        return "tensors without values lie nowhere, neither on the host nor on the GPU"
    return ""


def stage_of_rank(plan: Plan, rank: int) -> int:
    """The pipeline stage a rank works on: ranks of one tensor parallel, then of one pipeline, are next to each other."""
    return rank // plan.layout.tensor % plan.layout.pipeline


def usual_rank(plan: Plan) -> int:
    """The first rank of the fullest stage."""
    return fullest(plan)[0] * plan.layout.tensor if plan.layout.pipeline > 1 else 0


def rehearse(
    plan: Plan, *, rank: int | None = None, device: str = "fake", timeout: float = TIMEOUT, allow_ledger: bool = True
) -> Rehearsal:
    """Rehearse two steps of one rank, of the fullest stage unless said; the second is kept. Raises RunError where that fails.

    Where a plan cannot be rehearsed its timeline is the ledger's, and says so, unless not ``allow_ledger``.
    """
    started = time.monotonic()
    rank = usual_rank(plan) if rank is None else rank
    if why := unrehearsed(plan):
        if not allow_ledger:
            raise RunError(f"this plan cannot be rehearsed: {why}")
        remark = f"not rehearsed, because {why}: all figures are the ledger's"
        return _found(plan, rank, ledger(plan, stage_of_rank(plan, rank)), "ledger", (remark,), None, started)
    doubts, remarks = tuple[str, ...](), list[str]()
    if plan.model.module.factory:
        measured, doubts, said = rehearse_module(plan, rank=rank, device=device, timeout=timeout)
        remarks += [*doubts, *said]
    else:
        measured = run_apart(plan, rank=rank, device=device, timeout=timeout)
    assert measured.timeline is not None, "a rehearsal keeps its timeline"
    timeline = measured.timeline
    if device == "fake" and (kept := workspaces(plan)):
        timeline = with_workspaces(plan, timeline)
        size = sum(size for _, size in kept)
        remarks.append(
            f"cuBLAS workspaces, {size:,} B, are the ledger's: no kernel runs in a rehearsal on fake tensors"
        )
    return _found(plan, rank, timeline, "rehearsal", tuple(remarks), measured, started, sure=not doubts)


def _found(
    plan: Plan,
    rank: int,
    timeline: Timeline,
    source: str,
    remarks: tuple[str, ...],
    measured: RankMeasurement | None,
    started: float,
    *,
    sure: bool = False,
) -> Rehearsal:
    reserved = device = None
    try:
        reserved = reserved_range(plan, timeline)
        device = device_range(plan, reserved, plan.gpu_row)
    except InputError as error:  # what is allocated is known all the same
        remarks = (*remarks, f"reserved and device are left out: the rehearsed step cannot be replayed ({error})")
    return Rehearsal(
        plan=plan,
        rank=rank,
        timeline=timeline,
        peak=timeline.steady(),
        reserved=reserved,
        device=device,
        verdict=verdict(plan, device, plan.gpu_row, sure=sure) if device else "unknown",
        source=source,
        remarks=remarks,
        measurement=measured,
        seconds=time.monotonic() - started,
    )


def run_apart(
    plan: Plan, *, rank: int = 0, device: str = "fake", timeout: float = TIMEOUT, module: str = _MODULE
) -> RankMeasurement:
    """``python -m trainers.rehearsal`` in a process that ends with this one. Raises RunError, in one line."""
    require_torch()
    with stop_signals(), tempfile.TemporaryDirectory(prefix="memcalc-") as name:
        said, out = Path(name) / "plan.json", Path(name) / "rank.json"
        plan.save(said)
        command = [sys.executable, "-m", module, str(said), str(out), "--rank", str(rank), "--device", device]
        code, errors = _run(command, timeout)
        if code or not out.exists():
            raise RunError(_line(errors, code))
        return RankMeasurement.from_json(out, "the rehearsal's answer")


def _run(command: Sequence[str], timeout: float) -> tuple[int, str]:
    """The exit code and the error output; no process is left, however this ends."""
    where = environment(os.environ)
    with started(command, environment=where, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
        try:
            _, errors = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            raise RunError(
                f"the rehearsal was stopped after {timeout:g} s; fewer layers, or --timeout SECONDS, would do"
            ) from None
        return process.returncode, errors.decode(errors="replace")


def _line(errors: str, code: int) -> str:
    """What the process said last that is an error; how it ended where it said nothing."""
    lines = [line.strip() for line in errors.splitlines() if line.strip()]
    for line in reversed(lines):
        if line.startswith("error: "):
            return line.removeprefix("error: ")
    last = f": {shorten(lines[-1], 200)}" if lines else ""
    ended = f"signal {-code}" if code < 0 else f"exit code {code}"
    return f"the rehearsal ended with {ended}{last}"
