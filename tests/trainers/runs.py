"""What the tests of the trainers share: plans small enough for two cores, and starting them, many at a time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from memcalc.measurement import RankMeasurement
from memcalc.models import MODELS
from memcalc.plan import Plan

T = TypeVar("T")

ROOT = Path(__file__).parents[2]
SECONDS = float(os.environ.get("RUN_SECONDS", "400"))
"""How long all jobs of one start may take; more on a machine that others use as well."""
EVALUATED = 16
"""Samples at most that runs in tests evaluate in the end: as many as ``memcalc.data`` says would take longer than all steps."""
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--max-restarts", "0"]


def some(cases: dict[str, T], one_in: int = 3) -> dict[str, T]:
    """One case in so many; ``make test-all`` sets ALL_RUNS and gets each, which takes two cores a quarter of an hour more."""
    return cases if os.environ.get("ALL_RUNS") else dict(list(cases.items())[::one_in])


def rare(cases: dict[str, T]) -> dict[str, T]:
    """Cases that only ``make test-all`` runs."""
    return cases if os.environ.get("ALL_RUNS") else {}


def plan(model: str = "gpt2-tiny", *, ranks: int = 1, batch: int = 8, **fields: Any) -> Plan:
    """A plan on the CPU whose step takes ``batch`` samples over all ranks and micro batches."""
    tokens = 32 if MODELS[model].context else 0
    micro = batch // ranks // fields.get("accumulation", 1)
    return Plan(model=MODELS[model], ranks=ranks, tokens=tokens, micro_batch=micro, device="cpu", **fields)


@dataclass(frozen=True)
class Result:
    """What one job left."""

    losses: list[float]
    evaluation: float
    speed: float | None
    ranks: list[RankMeasurement]


@dataclass(frozen=True)
class Job:
    """One plan and how to train it."""

    plan: Plan
    steps: int = 4
    out: Path | None = None
    data: Path | None = None
    measure_steps: int = 0
    options: tuple[tuple[str, Any], ...] = ()
    copy: tuple[Path, Path] | None = None
    """A folder that is copied to another place before."""


def run(
    jobs: dict[str, Job], ranks: int, folder: Path, timeout: float = SECONDS, driver: str = "driver.py"
) -> dict[str, Result]:
    """Run all jobs in one process group of ``ranks`` and read what they left; fails with the output when they fail."""
    described = []
    for name, job in jobs.items():
        settings = {"steps": job.steps, "measure_steps": job.measure_steps, "learning_rate": 1e-3, **dict(job.options)}
        if job.data is not None:
            settings["data"] = str(job.data)
        described.append({
            "plan": json.loads(job.plan.to_json()), "settings": settings,
            "out": str(job.out) if job.out else None, "result": str(folder / f"{name}.result"),
            "copy": [str(path) for path in job.copy] if job.copy else None,
        })  # fmt: skip
    path = folder / f"jobs-{ranks}.json"
    path.write_text(json.dumps(described))
    program = str(Path(__file__).with_name(driver))
    done = subprocess.run(
        [sys.executable, program, str(ranks), str(path)],
        env=environment(), capture_output=True, text=True, timeout=timeout, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[:6000]
    return {name: _read(folder / f"{name}.result", job.plan.ranks) for name, job in jobs.items()}


def environment() -> dict[str, str]:
    """One thread a rank, and this checkout."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "KINETO_LOG_LEVEL": "5"}


def _read(path: Path, ranks: int) -> Result:
    measured = [path.with_name(f"{path.name}.{rank}") for rank in range(ranks)]
    return Result(
        **json.loads(path.read_text()), ranks=[RankMeasurement.from_json(file) for file in measured if file.exists()]
    )
