"""What the test of random kills did, as a page of the docs.

python -m tests.trainers.chaos LOG > docs/validation/chaos.md   # LOG is what the test wrote to $CHAOS_LOG
"""

from __future__ import annotations

import json
import platform
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from memcalc.tables import render

__all__ = ["WHO", "Kill", "report"]

WHO = ("launcher", "agent", "rank 0", "rank 1")
"""Which process is killed: memcalc launch, torchrun, or one of the two ranks."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Kill:
    """One run that was killed, and how it ended."""

    seed: int
    number: int
    steps: int
    strategy: str
    who: str
    how: str
    """The signal."""
    at: str
    """Where in its life."""
    code: int
    """Exit code of the launcher."""
    seconds: float
    """From the kill until no process of the run was left."""
    resumed: int | None = None
    """The step it went on from; None where there was no checkpoint, so that it began anew."""


def report(kills: Sequence[Kill]) -> str:
    """The page that ``make chaos`` writes of kills that all passed: what was killed, and when."""
    by_strategy = {name: [kill for kill in kills if kill.strategy == name] for name in _names(kills)}
    rows = [
        (
            name,
            len(mine),
            sum(kill.how == "SIGKILL" for kill in mine),
            sum(kill.at == "while it saved" for kill in mine),
            sum(kill.resumed is not None for kill in mine),
            f"{max(kill.seconds for kill in mine):.1f}",
        )
        for name, mine in by_strategy.items()
    ]
    late = sum(kill.at.startswith("nothing") for kill in kills)
    headers = ("strategy", "kills", "by SIGKILL", "while it saved", "resumed", "longest end, s")
    where = Counter((kill.who, kill.how, kill.at) for kill in kills)
    codes: dict[tuple[str, str, str], set[int]] = {}
    for kill in kills:
        codes.setdefault((kill.who, kill.how, kill.at), set()).add(kill.code)
    detail = [(*key, count, ", ".join(map(str, sorted(codes[key])))) for key, count in sorted(where.items())]
    lines = [
        "# Random kills",
        "",
        f"Written by `make chaos`: {_seeds(kills)}, torch {torch.__version__}, {platform.system()}, two ranks on CPU cores.",
        "",
        f"{len(kills)} runs were started to be killed, of which {late} had ended before. All ended, resumed or begun anew, with the same last loss to 4 decimals",
        f"after {kills[0].steps} steps as a run of the same strategy to which nothing happened. After each kill no process of the run",
        "was left, and no file was found that was not whole. A run that has no complete checkpoint yet begins anew.",
        "",
        render(rows, headers, "markdown"),
        "",
        "The longest end is the time from the kill until the last process of the run was gone: ranks that are told to stop",
        "have 25 s to save what they did, and torchrun kills them after 30 s.",
        "",
        "## Which process, and when",
        "",
        "A negative exit code is the signal that ended the launcher itself; 75 says that all was saved and can be resumed.",
        "",
        render(detail, ("killed", "by", "at", "runs", "exit codes of the launcher"), "markdown"),
        "",
    ]
    return "\n".join(line.rstrip() if "\n" not in line else line for line in lines)


def _seeds(kills: Sequence[Kill]) -> str:
    found = sorted({kill.seed for kill in kills})
    return f"seed{'s' * (len(found) > 1)} {', '.join(map(str, found))}"


def _names(kills: Iterable[Kill]) -> list[str]:
    return list(dict.fromkeys(kill.strategy for kill in kills))


if __name__ == "__main__":
    lines = Path(sys.argv[1]).read_text(encoding="utf-8").splitlines()
    print(report([Kill(**json.loads(line)) for line in lines]), end="")
