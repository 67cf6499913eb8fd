"""A launch file of somebody else, scaled to two ranks of this machine, under the real torchrun."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from memcalc.measurement import Measurement
from memcalc.plan import Plan
from tests.launch_files import FSDP

ROOT = Path(__file__).resolve().parents[2]


def test_a_tutorials_file_trains_on_two_ranks(tmp_path: Path) -> None:
    (tmp_path / "fsdp.yaml").write_text(FSDP)
    words = [
        "launch",
        "gpt2-tiny",
        "--config",
        "fsdp.yaml",
        "--scale-to-ranks",
        "2",
        "--device",
        "cpu",
        "--seq-len",
        "32",
        "--steps",
        "2",
    ]
    done = subprocess.run(
        [sys.executable, "-m", "memcalc", *words], cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "fsdp.yaml: scaled to this machine: 8 -> 2 ranks" in done.stderr
    assert "states equal to the byte" in done.stdout
    folder = tmp_path / "checkpoints"
    assert Plan.load(folder / "plan.json").reentrant
    record = Measurement.from_json(folder / "run.json", "run.json")
    assert len(record.losses) == 2 and None not in record.losses
