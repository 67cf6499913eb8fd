"""``trainers.doctor`` with this machine's torch, alone and as two ranks."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from trainers.doctor import facts

ROOT = Path(__file__).resolve().parents[2]


def test_facts_are_torchs() -> None:
    found = json.loads(json.dumps(facts()))
    assert found["torch"] == torch.__version__ and found["gloo"] is True
    assert len(found["gpus"]) == torch.cuda.device_count() and found["error"] is None


def test_a_gpu_is_described_and_a_broken_driver_is_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    card = SimpleNamespace(name="NVIDIA H100", major=9, minor=0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: card)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (70, 80))
    assert facts()["gpus"] == [{"name": "NVIDIA H100", "capability": [9, 0], "total": 80, "free": 70}]

    def broken(index: int) -> None:
        raise RuntimeError("CUDA driver initialization failed\nmore")

    monkeypatch.setattr(torch.cuda, "mem_get_info", broken)
    found = facts()
    assert found["error"] == "RuntimeError: CUDA driver initialization failed" and found["torch"] == torch.__version__


def test_two_ranks_agree_and_one_alone_gives_up_in_time() -> None:
    with socket.socket() as one, socket.socket() as other:
        for free in (one, other):
            free.bind(("127.0.0.1", 0))
        port, another = one.getsockname()[1], other.getsockname()[1]

    def rank(number: int, timeout: int, port: int) -> subprocess.Popen[str]:
        environ = os.environ | {
            "RANK": str(number),
            "WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
        command = [
            sys.executable,
            "-m",
            "memcalc",
            "doctor",
            "--cluster",
            "--timeout",
            str(timeout),
            "--format",
            "json",
        ]
        return subprocess.Popen(
            command, cwd=ROOT, env=environ, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )

    alone = rank(0, 1, another)
    both = [rank(number, 120, port) for number in range(2)]
    first, second = (process.communicate(timeout=180) for process in both)
    assert [process.returncode for process in both] == [0, 0], (first, second)
    said = {each["what"]: each for each in json.loads(first[0])}
    assert said["torch"]["found"] == f"{torch.__version__} on all ranks" and said["ranks"]["status"] == "ok"
    assert second[0] == ""
    out, err = alone.communicate(timeout=120)
    assert alone.returncode == 1 and out == ""
    assert err.startswith("memcalc: rank 0 of 2 did not hear from all others") and err.count("\n") == 1
