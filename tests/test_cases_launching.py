"""Public reports about starting runs: docs/validation/cases.md lists them by number."""

from __future__ import annotations

import importlib.util
import re
import subprocess
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from memcalc import launch as launch_module
from memcalc.errors import PlanError
from memcalc.hardware import GPUS
from memcalc.machine import detect
from tests.launching import TWO, refused
from tests.test_machine import A100, MIB, FakeNvml, refuse

BESIDE = """
import os, socket, time, torch.distributed as dist
from pathlib import Path
dist.init_process_group('gloo')
Path(f'ports/{os.environ["MASTER_PORT"]}-{dist.get_rank()}').touch()
end = time.monotonic() + 300
while len(list(Path('ports').iterdir())) < 4 and time.monotonic() < end:  # neither job ends before the other has begun
    time.sleep(0.05)
dist.destroy_process_group()
"""


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")
def test_c43_two_runs_on_one_machine_find_ports_of_their_own(tmp_path: Path) -> None:
    """pytorch issue 126510, TorchDR/TorchDR issue 249: the second job of a machine failed on port 29500."""
    (tmp_path / "ports").mkdir()
    (tmp_path / "beside.py").write_text(BESIDE)
    jobs = [
        subprocess.Popen(launch_module.command(2, "beside"), cwd=tmp_path, stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    said = [job.communicate(timeout=400)[1] for job in jobs]
    assert [job.returncode for job in jobs] == [0, 0], said
    ports = {path.name.partition("-")[0] for path in (tmp_path / "ports").iterdir()}
    assert len(ports) == 2


@pytest.mark.usefixtures("machine")
def test_c50_more_ranks_than_gpus_are_refused(tmp_path: Path, machine: SimpleNamespace) -> None:
    """lukasHoel/ViewDiff issue 24: four processes on one GPU."""
    machine.gpus = (SimpleNamespace(usable_bytes=2**34),)
    refused(replace(TWO, ranks=4, device="cuda"), tmp_path, "the plan needs 4 GPUs, this machine has 1 GPU;", PlanError)


def test_c55_memory_is_that_of_the_card_that_is_used(tmp_path: Path) -> None:
    """CompVis/stable-diffusion issues 485 and 702: a user counted on 40 GB, and device 0 had 7.80 GiB."""
    small, large = ("NVIDIA GeForce RTX 2070", 8192 * MIB, 205 * MIB, 7000 * MIB), A100
    by_bus = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}

    def usable(**environ: str) -> list[tuple[str, float]]:
        found = detect(environ=by_bus | environ, root=tmp_path, nvml=FakeNvml([small, large]), run=refuse)
        return [(gpu.name, round(gpu.usable_bytes / 2**30, 2)) for gpu in found.gpus]

    assert usable() == [("NVIDIA GeForce RTX 2070", 7.8), ("a100-40gb", 39.38)]
    assert usable(CUDA_VISIBLE_DEVICES="1") == [("a100-40gb", 39.38)]
    assert usable(CUDA_VISIBLE_DEVICES="0") == [("NVIDIA GeForce RTX 2070", 7.8)]
    for name, gpu in GPUS.items():  # a card by name alone has less than its name says
        if match := re.search(r"-(\d+)gb$", name):
            assert gpu.usable_bytes < int(match[1]) * 2**30, name
