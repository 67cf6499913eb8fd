"""Starting ``memcalc launch`` as a user does, and finding the processes of a run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.trainers.runs import SECONDS

ROOT = Path(__file__).resolve().parents[2]


def memcalc(*words: object, **options: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "memcalc", *map(str, words)],
        env=os.environ | {"PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        **options,  # type: ignore[call-overload]
    )  # fmt: skip


def ended(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=SECONDS)
    return process.returncode, out, err


def ranks_of(run: Path) -> dict[int, int]:
    """Process ids of the living ranks of a run, by rank, from the process table."""
    found = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            words = (entry / "cmdline").read_bytes().split(b"\0")
            environment = dict(
                line.split(b"=", 1) for line in (entry / "environ").read_bytes().split(b"\0") if b"=" in line
            )
        except OSError:
            continue
        if str(run).encode() in words and b"RANK" in environment:
            found[int(environment[b"RANK"])] = int(entry.name)
    return found


def anything_left(mark: Path) -> list[str]:
    lines = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            lines.append((entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace"))
        except OSError:
            continue
    return [line for line in lines if str(mark) in line]


def checkpoints_whole(run: Path) -> int:
    """How many checkpoints are marked as complete; that they are, and that no weights were left of a run that did not end."""
    markers = list((run / "checkpoints").glob("step-*/done.json"))
    for marker in markers:
        assert json.loads(marker.read_text())["step"] == int(marker.parent.name.removeprefix("step-"))
        assert (marker.parent / ".metadata").exists()
    assert not (run / "weights").exists()
    return len(markers)
