"""Launch files of somebody else, unchanged, scaled to two ranks of this machine, under the real torchrun."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from memcalc.hyperparameters import read_coefficients
from memcalc.measurement import Measurement
from memcalc.plan import Plan
from tests.launch_files import FSDP, TUTORIAL
from tests.trainers.engines import lacking

ROOT = Path(__file__).resolve().parents[2]


def launched(folder: Path, file: str, *words: str) -> subprocess.CompletedProcess[str]:
    """Two steps of a small model as the file says, on two CPU cores."""
    given = [
        "gpt2-tiny",
        "--config",
        file,
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
        [sys.executable, "-m", "memcalc", "launch", *given, *words], cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=400,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "states equal to the byte" in done.stdout
    return done


def test_a_tutorials_fsdp_file_trains_on_two_ranks(tmp_path: Path) -> None:
    (tmp_path / "fsdp.yaml").write_text(FSDP)
    done = launched(tmp_path, "fsdp.yaml")
    assert "fsdp.yaml: scaled to this machine: 8 -> 2 ranks" in done.stderr
    folder = tmp_path / "checkpoints"
    assert Plan.load(folder / "plan.json").reentrant
    record = Measurement.from_json(folder / "run.json", "run.json")
    assert len(record.losses) == 2 and None not in record.losses


@pytest.mark.skipif(bool(lacking("deepspeed")), reason="DeepSpeed, or the compiler it takes, is not installed")
def test_a_tutorials_deepspeed_file_trains_on_two_ranks(tmp_path: Path) -> None:
    """With its 32 samples a step and its numbers of the optimizer, in the 16 bit that a CPU has."""
    (tmp_path / "ds.json").write_text(TUTORIAL)
    done = launched(tmp_path, "ds.json", "--out", "run")
    said = "ds.json: scaled to this machine: 2 ranks, precision fp16-master -> bf16-master"
    assert said in done.stderr
    assert "ds.json: no losses are scaled in bf16-master" in done.stderr
    plan = Plan.load(tmp_path / "run" / "plan.json")
    assert (plan.strategy, plan.global_batch, plan.ranks) == ("deepspeed-2", 32, 2)
    trained = json.loads((tmp_path / "run" / "training.json").read_text())
    assert read_coefficients(trained["coefficients"]) == {"betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 3e-7}
    record = Measurement.from_json(tmp_path / "run" / "run.json", "run.json")
    assert len(record.losses) == 2 and None not in record.losses
