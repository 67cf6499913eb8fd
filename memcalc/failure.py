"""Why a run failed, in one line, from what its ranks and torchrun left in the run's folder."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from memcalc.errors import FileError, MemcalcError, RunError
from memcalc.files import read_json
from memcalc.plan import Plan

__all__ = ["RankError", "failure", "rank_errors"]

_SHOWN = ("strategy", "ranks", "precision", "micro_batch", "accumulation", "checkpoint_every", "optimizer_kind")


@dataclass(frozen=True, kw_only=True, slots=True)
class RankError:
    """What one failing rank wrote down: the moment of the step, ``oom`` or ``error``, and torch's message."""

    rank: int
    moment: str
    kind: str
    message: str


def rank_errors(out: Path) -> list[RankError]:
    """What the ranks said, out of memory first, then by time; the others mostly fail because the first one did."""
    found = []
    for path in sorted((out / "errors").glob("rank-*.json"), key=lambda path: path.stat().st_mtime_ns):
        try:
            said = read_json(path, str(path))
            message = " ".join(str(said["message"]).split())
            found.append(
                RankError(rank=int(said["rank"]), moment=str(said["moment"]), kind=str(said["kind"]), message=message)
            )
        except (MemcalcError, KeyError, TypeError, ValueError):
            continue  # cut off by a full disk or a kill; the logs still say what happened
    return sorted(found, key=lambda error: error.kind != "oom")


def failure(plan: Plan, out: Path, code: int) -> RunError:
    """One line that says which rank failed, when and why, and where to read more."""
    errors = rank_errors(out)
    if not errors:
        return RunError(f"{_last_words(out, code)}; see {out / 'logs'}")
    first = errors[0]
    where = f"rank {first.rank} of {plan.ranks}"
    log = out / "logs" / f"rank-{first.rank}.log"
    if first.kind != "oom":
        return RunError(f"{where} failed in {first.moment}: {_cut(first.message)}; see {log}")
    return RunError(f"{where} ran out of memory in {first.moment}; {_next_plan(plan, out)}; see {log}")


def _next_plan(plan: Plan, out: Path) -> str:
    """Advice after an OOM: the nearest plan that the ledger says fits, saved beside the run."""
    from memcalc.machine import detect
    from memcalc.recommend import next_plan

    machine = detect()
    capacity = (
        min((gpu.usable_bytes for gpu in machine.gpus), default=0)
        if plan.device == "cuda"
        else machine.ram_bytes // plan.ranks
    )
    other = next_plan(plan, capacity)
    if other is None:
        return "no plan for this model fits on this machine"
    path = out / "next-plan.json"
    changed = [
        f"{name.replace('_', ' ')} {getattr(other, name)}"
        for name in _SHOWN
        if getattr(other, name) != getattr(plan, name)
    ]
    try:
        other.save(path)
    except FileError:
        return f"what should fit: {', '.join(changed)}"
    return f"what should fit: {', '.join(changed)} (saved as {path})"


def _last_words(out: Path, code: int) -> str:
    """What torchrun's log says when no rank wrote why: a kill from outside leaves no other trace."""
    try:
        text = (out / "logs" / "torchrun.log").read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    root = text[text.rfind("Root Cause") :] if "Root Cause" in text else ""
    rank, status = (re.search(rf"{word}\s*:\s*(-?\d+)", root) for word in ("rank", "exitcode"))
    if rank and status and int(status[1]) == -9:
        return f"rank {rank[1]} was killed (signal 9), as the kernel does when the machine has no memory left"
    if rank and status:
        return f"rank {rank[1]} ended with exit code {status[1]} and left no message"
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return f"torchrun failed: {_cut(lines[-1])}" if lines else f"torchrun ended with exit code {code}"


def _cut(message: str, limit: int = 300) -> str:
    return message if len(message) <= limit else message[: limit - 3] + "..."
