"""Why a run failed, in one line, from what its ranks and torchrun left in the run's folder."""

from __future__ import annotations

import re
import shlex
import shutil
import signal
from dataclasses import dataclass
from pathlib import Path

from memcalc.checkpoints import newest_checkpoint
from memcalc.errors import FileError, MemcalcError, RunError
from memcalc.files import read_json
from memcalc.measurement import Measurement
from memcalc.plan import Plan
from memcalc.units import format_bytes

__all__ = ["OutOfMemory", "Preempted", "RankError", "failure", "how_to_go_on", "preempted", "rank_errors"]

_FULL = 2**20  # bytes left on a disk that cannot take the next log or result any more
_AFTERMATH = (signal.SIGTERM, signal.SIGINT, signal.SIGABRT)
"""What torchrun stops the other ranks with, and what NCCL's watchdog ends one with whose peer is gone: no cause."""

_SHOWN = ("strategy", "ranks", "precision", "micro_batch", "accumulation", "checkpoint_every", "optimizer_kind")


class Preempted(RunError):
    """The run was told to stop and saved what it did; the code is EX_TEMPFAIL of sysexits.h: try again later."""

    exit_code = 75


class OutOfMemory(RunError):
    """A rank ran out of memory."""

    def __init__(self, message: str, following: Plan | None) -> None:
        self.following = following
        """The same job in less memory, if there is a way."""
        super().__init__(message)


@dataclass(frozen=True, kw_only=True, slots=True)
class RankError:
    """What one failing rank wrote down: the moment of the step, ``oom`` or ``error``, and torch's message."""

    rank: int
    moment: str
    kind: str
    message: str
    allocated: int = 0
    """The most it held on its GPU, in bytes; 0 where that is not counted."""


def rank_errors(out: Path) -> list[RankError]:
    """What the ranks said, out of memory first, then by time; the others mostly fail because the first one did."""
    found = []
    for path in sorted((out / "errors").glob("rank-*.json"), key=lambda path: path.stat().st_mtime_ns):
        try:
            said = read_json(path, str(path))
            message = " ".join(str(said["message"]).split())
            found.append(
                RankError(
                    rank=int(said["rank"]), moment=str(said["moment"]), kind=str(said["kind"]), message=message,
                    allocated=int(said.get("allocated", 0)),
                )
            )  # fmt: skip
        except (MemcalcError, KeyError, TypeError, ValueError):
            continue  # cut off by a full disk or a kill; the logs still say what happened
    return sorted(found, key=lambda error: error.kind != "oom")


def failure(plan: Plan, out: Path, code: int, *, log: str = "torchrun.log", restarts: int = 0) -> RunError:
    """One line that says which rank failed, when and why, where to read more and, after ``restarts``, how to go on."""
    failed = _failure(plan, out, code, log)
    ranks = rank_errors(out) or _exits(_torchrun_log(out / "logs" / log))
    if not restarts or not ranks or isinstance(failed, Preempted | OutOfMemory):
        return failed
    return RunError(f"{failed}; --max-restarts {restarts} is used up; {how_to_go_on(out)}")


def _failure(plan: Plan, out: Path, code: int, log: str) -> RunError:
    errors, text = rank_errors(out), _torchrun_log(out / "logs" / log)
    full = f"no space left on the disk of {out}; " if _is_full(out) else ""
    if errors and errors[0].kind == "oom":
        first, (advice, following) = errors[0], _next_plan(plan, out)
        what = (
            f"rank {first.rank} of {plan.ranks} ran out of memory in {first.moment}{_broken_by(plan, first)}; {advice}"
        )
        return OutOfMemory(f"{what}; see {out / 'logs' / f'rank-{first.rank}.log'}", following)
    # torchrun's SignalException: it has passed the signal on to the ranks.
    agent_told = re.search(r"got signal: (15|Signals\.SIGTERM)\b", text)
    left = agent_told or any(status == Preempted.exit_code for _, status, _ in _exits(text))
    if left and (told := preempted(out, signal.SIGTERM)):
        return told
    killed = _killed(text)
    if killed is not None:  # the others lost their connection to it, and some had the time to say so
        return RunError(f"{killed}; see {out / 'logs'}")
    if errors:
        first = errors[0]
        what = f"rank {first.rank} of {plan.ranks} failed in {first.moment}: {_cut(first.message)}"
        return RunError(f"{full}{what}; see {out / 'logs' / f'rank-{first.rank}.log'}")
    return RunError(f"{full}{_last_words(text, code)}; see {out / 'logs'}")


def how_to_go_on(out: Path) -> str:
    """What can be done with a run that was stopped; its folder knows plan and training."""
    checkpoint = newest_checkpoint(out)
    if checkpoint is None:
        return "no checkpoint was written; --checkpoint-every N keeps some"
    words = ["memcalc", "launch", str(out / "plan.json"), "--out", str(out), "--resume"]
    return f"resume with: {shlex.join(words)} (from step {checkpoint[0]})"


def preempted(out: Path, number: int) -> Preempted | None:
    """What to say of a run that saved all it did when it was told to stop; None when it did not."""
    try:
        saved = Measurement.from_json(out / "run.json", "run.json").status == "preempted"
    except MemcalcError:
        return None
    if not saved or newest_checkpoint(out) is None:
        return None
    return Preempted(f"stopped by {signal.Signals(number).name} and saved; {how_to_go_on(out)}")


def _is_full(out: Path) -> bool:
    try:
        return shutil.disk_usage(out).free < _FULL
    except OSError:
        return False


def _broken_by(plan: Plan, error: RankError) -> str:
    """What the estimate says of the moment where it ended: how much, and what most of that is that a step adds."""
    from memcalc.estimate import estimate

    timeline = estimate(plan).timeline
    held, start = timeline.fullest_in(error.moment), timeline.fullest_in("start")
    if held is None or start is None:
        return ""
    grown = {name: size - start.by_category[name] for name, size in held.by_category.items()}
    most = max(grown, key=lambda name: grown[name])
    measured = f", measured {format_bytes(error.allocated)}" if error.allocated else ""
    added = f", {format_bytes(grown[most])} of it new {most}" if grown[most] > 0 else ""
    return f" (estimated {format_bytes(held.bytes)} there{measured}{added})"


def _next_plan(plan: Plan, out: Path) -> tuple[str, Plan | None]:
    """Advice after an OOM, and the nearest plan that the ledger says fits, saved beside the run."""
    from memcalc.machine import detect
    from memcalc.recommend import next_plan

    if plan.model.module.factory:
        return "compare smaller plans of the module with memcalc estimate --module", None
    machine = detect()
    capacity = (
        min((gpu.usable_bytes for gpu in machine.gpus), default=0)
        if plan.device == "cuda"
        else machine.ram_bytes // plan.ranks
    )
    other = next_plan(plan, capacity)
    if other is None:
        return "no plan for this model fits on this machine", None
    path = out / "next-plan.json"
    changed = [
        f"{name.replace('_', ' ')} {getattr(other, name)}"
        for name in _SHOWN
        if getattr(other, name) != getattr(plan, name)
    ]
    try:
        other.save(path)
    except FileError:
        return f"what should fit: {', '.join(changed)}", other
    return f"what should fit: {', '.join(changed)} (saved as {path})", other


def _torchrun_log(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _exits(text: str) -> list[tuple[int, int, int]]:
    """Rank, exit code and process id of each failed rank in torchrun's report, the one it saw first in front."""
    report = text[max(text.rfind("\nFailures:"), 0) :]
    others, found, root = report.rpartition("Root Cause")
    pattern = r"^\s*rank\s*: (\d+).*\n\s*exitcode\s*: (-?\d+) \(pid: (\d+)\)"
    entries = re.findall(pattern, root + others, re.MULTILINE) if found else []
    return [(int(rank), int(code), int(pid)) for rank, code, pid in entries]


def _killed(text: str) -> str | None:
    """The rank that a signal from outside ended, if one was; those that torchrun had to kill afterwards do not count."""
    by_torchrun = {int(pid) for pid in re.findall(r"Unable to shutdown process (\d+)", text)}
    for rank, code, pid in _exits(text):
        if code < 0 and -code not in _AFTERMATH and pid not in by_torchrun:
            return _by_signal(rank, -code)
    return None


def _by_signal(rank: int, number: int) -> str:
    if number == signal.SIGKILL:
        return f"rank {rank} was killed (signal 9), as the kernel does when memory runs out"
    return f"rank {rank} was killed (signal {number}, {signal.strsignal(number) or 'unknown'})"


def _last_words(text: str, code: int) -> str:
    """What torchrun's log says when no rank wrote why."""
    exits = _exits(text)
    if exits:
        rank, status, _ = exits[0]
        if status < 0:
            return _by_signal(rank, -status)
        return f"rank {rank} ended with exit code {status} and left no message"
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return f"torchrun failed: {_cut(lines[-1])}" if lines else f"torchrun ended with exit code {code}"


def _cut(message: str, limit: int = 300) -> str:
    return message if len(message) <= limit else message[: limit - 3] + "..."
