"""The benchmarks run and their arithmetic is right; how fast things are is not tested."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import timing

SCRIPTS = sorted(path for path in Path(__file__).parent.glob("*.py") if path.stem not in {"timing", "test_benchmarks"})


def test_sides_take_turns() -> None:
    calls: list[str] = []
    taken = timing.interleave({"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, rounds=2)
    assert "".join(calls) == "baabba"
    assert [len(values) for values in taken.values()] == [2, 2]  # the first round only warms up


def test_a_cold_start_counts_from_the_first_round() -> None:
    calls: list[str] = []
    assert timing.interleave({"a": lambda: calls.append("a") or 0.5}, rounds=1, cold=True) == {"a": [0.5]}
    assert calls == ["a"]


def test_a_side_may_say_how_long_its_part_took() -> None:
    assert timing.interleave({"a": lambda: 0.25}, rounds=3) == {"a": [0.25, 0.25, 0.25]}


def test_the_ratio_is_of_medians() -> None:
    assert timing.ratio({"side": [4.0, 1.0, 100.0], "base": [2.0, 2.0, 0.1]}, "side", "base") == 2.0


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_a_benchmark_runs(script: Path, root: Path) -> None:
    command = [sys.executable, str(script), "--rounds", "1", "--small", "--json"]
    environment = os.environ | {"PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout.splitlines()[-1])
    assert said["rounds"] == 1
    assert all(value > 0 for value in said["median_ms"].values())
