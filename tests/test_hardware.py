"""The table of GPUs: that its numbers are possible, and that its names are found."""

from __future__ import annotations

import re

import pytest

from memcalc.hardware import GPUS

GIB = 2**30
# Memory on the box, in the GiB nvidia-smi or rocm-smi rounds to (modal-client#2797 and data sheets).
BOX = {
    "p100-16gb": 16, "v100-16gb": 16, "v100-32gb": 32, "t4": 15, "rtx-2080-ti": 11, "a100-40gb": 40, "a100-80gb": 80,
    "a800-80gb": 80, "a10": 22.5, "a10g": 22.5, "a40": 45, "rtx-3060": 12, "rtx-3090": 24, "rtx-a5000": 24, "rtx-a6000": 48,
    "l4": 22.5, "l40": 45, "l40s": 45, "rtx-4080": 16, "rtx-4090": 24, "rtx-6000-ada": 45, "h100-80gb": 80, "h100-pcie": 80,
    "h20": 96, "h200": 141, "b200": 180, "b300": 270, "rtx-5090": 32, "rtx-pro-6000": 96, "mi250x": 64, "mi300x": 192,
    "gtx-1080-ti": 11, "rtx-2080": 8, "titan-rtx": 24, "rx-7900-xtx": 24,
}  # fmt: skip


def test_there_are_at_least_twenty() -> None:
    assert len(GPUS) >= 20
    assert set(GPUS) == set(BOX)


@pytest.mark.parametrize("name", list(GPUS))
def test_torch_gets_less_than_the_box_but_nearly_all(name: str) -> None:
    assert 0.96 < GPUS[name].usable_bytes / (BOX[name] * GIB) < 1


@pytest.mark.parametrize("name", list(GPUS))
def test_the_source_and_the_number_agree(name: str) -> None:
    gpu = GPUS[name]
    if oom := re.search(r"OOM (\d+\.\d+) GiB", gpu.usable_source):
        # The lowest reading that rounds to what the message printed, or a lower reading of the same board.
        assert gpu.usable_bytes <= (float(oom[1]) - 0.005) * GIB + 1
    printed = [int(mb) * 2**20 for mb in re.findall(r"(\d+)MB", gpu.usable_source)]
    assert oom or printed
    assert all(gpu.usable_bytes <= other + 2**20 for other in printed), "the lowest reading counts"


@pytest.mark.parametrize("name", list(GPUS))
def test_speeds_and_overheads_are_of_the_right_size(name: str) -> None:
    gpu = GPUS[name]
    # GeForce of Pascal multiplies 16-bit numbers as float32 (CUDA C++ Programming Guide, throughput of 6.1).
    assert (gpu.architecture == "sm_61") or 1.9 < gpu.flops_16bit / gpu.flops_fp32 <= 35
    assert 1e12 < gpu.flops_fp32 < 1e15
    assert gpu.link_bandwidth < gpu.memory_bandwidth < 1e13
    for low, high in (gpu.context, gpu.nccl):
        assert 0 < low < high < 2 * GIB


@pytest.mark.parametrize(
    ("alias", "name"),
    [
        ("a100", "a100-40gb"), ("h100", "h100-80gb"), ("v100", "v100-16gb"), ("4090", "rtx-4090"), ("3090", "rtx-3090"),
        ("NVIDIA A100-SXM4-80GB", "a100-80gb"), ("NVIDIA A100 80GB PCIe", "a100-80gb"), ("Tesla T4", "t4"),
        ("NVIDIA H100 80GB HBM3", "h100-80gb"), ("NVIDIA GeForce RTX 4090", "rtx-4090"), ("NVIDIA H200", "h200"),
        ("AMD Instinct MI300X", "mi300x"), ("Tesla V100-SXM2-32GB", "v100-32gb"), (" T4 ", "t4"),
    ],
)  # fmt: skip
def test_other_names(alias: str, name: str) -> None:
    assert GPUS[alias].name == name


def test_an_alias_belongs_to_one_card_and_is_no_name_of_another() -> None:
    aliases = [alias for gpu in GPUS.values() for alias in gpu.aliases]
    assert len(set(aliases)) == len(aliases)
    assert not set(aliases) & set(GPUS)
    assert all(alias == alias.lower().strip() for alias in aliases)


@pytest.mark.parametrize("prefix", ["a100", "h100", "v100"])
def test_a_name_that_fits_several_cards_means_the_smallest(prefix: str) -> None:
    family = [gpu.usable_bytes for name, gpu in GPUS.items() if name.startswith(f"{prefix}-")]
    assert GPUS[prefix].usable_bytes == min(family)


def test_capability_decides_bfloat16() -> None:
    without = {name for name, gpu in GPUS.items() if not gpu.bfloat16}
    assert without == {
        "p100-16gb", "gtx-1080-ti", "v100-16gb", "v100-32gb", "t4", "rtx-2080", "rtx-2080-ti", "titan-rtx",
    }  # fmt: skip
    for name, gpu in GPUS.items():
        assert gpu.flops("float16") == gpu.flops_16bit
        assert gpu.flops("float32") == gpu.flops_fp32
        assert gpu.flops("bfloat16") == (gpu.flops_fp32 if name in without else gpu.flops_16bit)
    assert GPUS["b300"].capability == (10, 3)
    assert GPUS["rtx-5090"].capability == (12, 0)
