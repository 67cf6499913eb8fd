"""GPUs: what torch can use of their memory, what others take from it, and how fast they are.

Where sources differ, memory is the lowest reading seen, so that none is promised that may not be there.
An alias that fits several cards (``a100``) means the one with the least memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from memcalc.catalog import Catalog

__all__ = ["GPUS", "LARGE_NODES", "NODE_GPUS", "Bounds", "Gpu", "smallest_card", "usual_nodes"]

MIB = 2**20


class Bounds(NamedTuple):
    """Bytes that differ between drivers and runs: the least and the most seen."""

    low: int
    high: int


def _oom(hundredths: int) -> int:
    """Bytes from an out-of-memory message's "total capacity", which is rounded to 0.01 GiB: half of that is taken off."""
    return (2 * hundredths - 1) * 2**30 // 200


# Idle CUDA context. Low: RTX 3090, torch 2.7.1 (InvokeAI#9413). High: the largest in public notes since kernels are
# loaded on demand (CUDA 11.7, pytorch#107667); eager loading before that took more than 1000 MiB (pytorch#49877).
_CONTEXT = Bounds(256 * MIB, 680 * MIB)

NODE_GPUS = 8
"""GPUs of one machine where it is not said: as many as on an HGX board."""

LARGE_NODES = {"v100-32gb": 16, "a100-40gb": 16}
"""Cards that are sold in machines of more: NVIDIA DGX-2 (data sheet), Google's a2-megagpu-16g (its machine types)."""

# NCCL, per communicator: 12 MiB a channel (buffers in NCCL src/init.cc; 10485760 + 2097152 B seen in NCCL#1685).
_PCIE = Bounds(2 * 12 * MIB, 24 * 12 * MIB)  # nothing published; assumed: 2 channels (a ring each way) to 24
_NVLINK = Bounds(2 * 12 * MIB, 544 * 10**6)  # nothing published for V100: bounded by A100's
_NVLINK_A100 = Bounds(544 * 10**6, 688 * 10**6)  # NCCL#964, 2 ranks and 4 ranks
_NVLINK_H100 = Bounds(688 * 10**6, 1060 * 10**6)  # NCCL#964 below, NCCL#1685 above
_XGMI = Bounds(665 * MIB, 1024 * MIB)  # RCCL, LUMI-AI-Guide#111: 0.65 GiB each, 1 GiB the first

# Links inside a node, bytes/s one rank sends in one direction. Data sheets name the sum of both directions.
_GEN3, _GEN4, _GEN5 = 16e9, 32e9, 64e9  # PCIe x16


@dataclass(frozen=True, kw_only=True, slots=True)
class Gpu:
    """One card. Speeds are peaks of its data sheet, dense (without sparsity)."""

    name: str
    aliases: tuple[str, ...] = ()
    """Other names, among them the ones torch and NVML report, in lower case."""
    usable_bytes: int
    """``torch.cuda.get_device_properties().total_memory``; less than what nvidia-smi shows."""
    usable_source: str
    """Where ``usable_bytes`` was read."""
    architecture: str
    """``sm_`` and CUDA compute capability, or AMD's ``gfx`` name."""
    flops_16bit: float
    """FLOP/s of matrix products in 16 bit with float32 accumulation."""
    flops_fp32: float
    """FLOP/s in float32 proper: torch leaves TF32 off for matrix products."""
    memory_bandwidth: float
    """Bytes/s."""
    link_bandwidth: float
    """Bytes/s one GPU sends to its neighbour in the node."""
    nccl: Bounds
    """Bytes one NCCL communicator takes outside of torch."""
    context: Bounds = _CONTEXT
    """Bytes of the CUDA context, outside of torch."""

    @property
    def capability(self) -> tuple[int, int] | None:
        """CUDA compute capability; None for other makers.

        >>> GPUS["t4"].capability, GPUS["b200"].capability, GPUS["mi300x"].capability
        ((7, 5), (10, 0), None)
        """
        digits = self.architecture.removeprefix("sm_")
        return (int(digits[:-1]), int(digits[-1])) if digits.isdigit() else None

    @property
    def bfloat16(self) -> bool:
        """Whether matrix products in bfloat16 are fast: compute capability 8.0 on (CUDA C++ Programming Guide)."""
        return self.capability is None or self.capability >= (8, 0)

    def flops(self, dtype: str) -> float:
        """Peak FLOP/s of matrix products in a torch dtype.

        >>> GPUS["a100"].flops("bfloat16"), GPUS["t4"].flops("bfloat16")
        (312000000000000.0, 8100000000000.0)
        """
        fast = dtype == "float16" or (dtype == "bfloat16" and self.bfloat16)
        return self.flops_16bit if fast else self.flops_fp32


# Memory: "MB" is what get_device_properties() prints (whole MiB, rounded down), "OOM" what an out-of-memory message
# says. Speeds: NVIDIA's and AMD's data sheet of the card; GeForce and RTX: the architecture's white paper.
_ROWS = [
    Gpu(name="p100-16gb", aliases=("p100", "tesla p100-pcie-16gb"), architecture="sm_60",
        usable_bytes=16280 * MIB, usable_source="16280MB, Colab logs",
        flops_16bit=18.7e12, flops_fp32=9.3e12, memory_bandwidth=732e9, link_bandwidth=_GEN3, nccl=_PCIE),
    Gpu(name="gtx-1080-ti", aliases=("1080ti", "geforce gtx 1080 ti", "nvidia geforce gtx 1080 ti"), architecture="sm_61",
        usable_bytes=_oom(1091), usable_source="OOM 10.91 GiB, public logs; 11169 to 11178MB elsewhere",
        flops_16bit=11.3e12, flops_fp32=11.3e12, memory_bandwidth=484e9, link_bandwidth=_GEN3, nccl=_PCIE),
    Gpu(name="v100-16gb", aliases=("v100", "tesla v100-sxm2-16gb", "tesla v100-pcie-16gb"), architecture="sm_70",
        usable_bytes=16130 * MIB, usable_source="16130MB, ultralytics/yolov3 logs; later drivers 16160MB",
        flops_16bit=125e12, flops_fp32=15.7e12, memory_bandwidth=900e9, link_bandwidth=150e9, nccl=_NVLINK),
    Gpu(name="v100-32gb", aliases=("tesla v100-sxm2-32gb", "tesla v100-pcie-32gb"), architecture="sm_70",
        usable_bytes=_oom(3175), usable_source="OOM 31.75 GiB, dynibar#8 and LlamaFactory#182",
        flops_16bit=125e12, flops_fp32=15.7e12, memory_bandwidth=900e9, link_bandwidth=150e9, nccl=_NVLINK),
    Gpu(name="t4", aliases=("tesla t4",), architecture="sm_75",
        usable_bytes=_oom(1456), usable_source="OOM 14.56 GiB with ECC, modal-client#2797; 14930MB to 15109MB elsewhere",
        flops_16bit=65e12, flops_fp32=8.1e12, memory_bandwidth=320e9, link_bandwidth=_GEN3, nccl=_PCIE),
    Gpu(name="rtx-2080", aliases=("2080", "nvidia geforce rtx 2080"), architecture="sm_75",
        usable_bytes=_oom(779), usable_source="OOM 7.79 GiB, public logs (card inferred from the size)",
        flops_16bit=40.3e12, flops_fp32=10.1e12, memory_bandwidth=448e9, link_bandwidth=_GEN3, nccl=_PCIE),
    Gpu(name="titan-rtx", aliases=("titan rtx", "nvidia titan rtx"), architecture="sm_75",
        usable_bytes=_oom(2365), usable_source="OOM 23.65 GiB, public logs",
        flops_16bit=130.5e12, flops_fp32=16.3e12, memory_bandwidth=672e9, link_bandwidth=_GEN3, nccl=_PCIE),
    Gpu(name="rtx-2080-ti", aliases=("2080ti", "nvidia geforce rtx 2080 ti"), architecture="sm_75",
        usable_bytes=11019 * MIB, usable_source="11019MB, public logs",
        flops_16bit=53.8e12, flops_fp32=13.4e12, memory_bandwidth=616e9, link_bandwidth=_GEN3, nccl=_PCIE),
    Gpu(name="a100-40gb", aliases=("a100", "nvidia a100-sxm4-40gb", "nvidia a100-pcie-40gb"), architecture="sm_80",
        usable_bytes=40326 * MIB, usable_source="40326MB on PCIe; 42298834944 B on SXM4, bottlerocket#3873",
        flops_16bit=312e12, flops_fp32=19.5e12, memory_bandwidth=1555e9, link_bandwidth=300e9, nccl=_NVLINK_A100),
    Gpu(name="a100-80gb", aliases=("nvidia a100-sxm4-80gb", "nvidia a100 80gb pcie"), architecture="sm_80",
        usable_bytes=_oom(7915), usable_source="OOM 79.15 GiB, modal-client#2797",
        flops_16bit=312e12, flops_fp32=19.5e12, memory_bandwidth=1935e9, link_bandwidth=300e9, nccl=_NVLINK_A100),
    Gpu(name="a800-80gb", aliases=("a800", "nvidia a800-sxm4-80gb", "nvidia a800 80gb pcie"), architecture="sm_80",
        usable_bytes=_oom(7915), usable_source="taken from a100-80gb, the same board; OOM 79.33 GiB in PB-LLM#3",
        flops_16bit=312e12, flops_fp32=19.5e12, memory_bandwidth=1935e9, link_bandwidth=200e9, nccl=_NVLINK_A100),
    Gpu(name="a10", aliases=("nvidia a10",), architecture="sm_86",
        usable_bytes=_oom(2205), usable_source="OOM 22.05 GiB, modal-client#2797",
        flops_16bit=125e12, flops_fp32=31.2e12, memory_bandwidth=600e9, link_bandwidth=_GEN4, nccl=_PCIE),
    Gpu(name="a10g", aliases=("nvidia a10g",), architecture="sm_86",
        usable_bytes=22587 * MIB, usable_source="22587MB, pytorch/torchcodec documentation; 22723MB elsewhere",
        flops_16bit=70e12, flops_fp32=35e12, memory_bandwidth=600e9, link_bandwidth=_GEN4, nccl=_PCIE),
    Gpu(name="a40", aliases=("nvidia a40",), architecture="sm_86",
        usable_bytes=45416 * MIB, usable_source="45416MB, public logs",
        flops_16bit=149.7e12, flops_fp32=37.4e12, memory_bandwidth=696e9, link_bandwidth=_GEN4, nccl=_PCIE),
    Gpu(name="rtx-3060", aliases=("3060", "nvidia geforce rtx 3060"), architecture="sm_86",
        usable_bytes=11938 * MIB, usable_source="11938MB, public logs; the card with 12 GB",
        flops_16bit=25.5e12, flops_fp32=12.7e12, memory_bandwidth=360e9, link_bandwidth=_GEN4, nccl=_PCIE),
    Gpu(name="rtx-3090", aliases=("3090", "nvidia geforce rtx 3090"), architecture="sm_86",
        usable_bytes=_oom(2356), usable_source="OOM 23.56 GiB, club-3090#58; 24268MB in pytorch#54564",
        flops_16bit=71e12, flops_fp32=35.6e12, memory_bandwidth=936e9, link_bandwidth=_GEN4, nccl=_PCIE),
    Gpu(name="rtx-a5000", aliases=("a5000", "nvidia rtx a5000"), architecture="sm_86",
        usable_bytes=24114 * MIB, usable_source="24114MB, public logs",
        flops_16bit=111.1e12, flops_fp32=27.8e12, memory_bandwidth=768e9, link_bandwidth=_GEN4, nccl=_PCIE),
    Gpu(name="rtx-a6000", aliases=("a6000", "nvidia rtx a6000"), architecture="sm_86",
        usable_bytes=_oom(4740), usable_source="OOM 47.40 GiB, public logs; 48676MB in mobicham's HQQ kernel notes",
        flops_16bit=154.8e12, flops_fp32=38.7e12, memory_bandwidth=768e9, link_bandwidth=_GEN4, nccl=_PCIE),
    Gpu(name="l4", aliases=("nvidia l4",), architecture="sm_89",
        usable_bytes=_oom(2203), usable_source="OOM 22.03 GiB, public logs (card inferred from the size)",
        flops_16bit=121e12, flops_fp32=30.3e12, memory_bandwidth=300e9, link_bandwidth=_GEN4, nccl=_PCIE),
    Gpu(name="l40", aliases=("nvidia l40",), architecture="sm_89",
        usable_bytes=_oom(4440), usable_source="OOM 44.40 GiB, Qwen3-VL#2097",
        flops_16bit=181e12, flops_fp32=90.5e12, memory_bandwidth=864e9, link_bandwidth=_GEN4, nccl=_PCIE),
    Gpu(name="l40s", aliases=("nvidia l40s",), architecture="sm_89",
        usable_bytes=_oom(4442), usable_source="OOM 44.42 GiB, Step-Video-T2V#8; 44.53 in Wan2.1#205",
        flops_16bit=362e12, flops_fp32=91.6e12, memory_bandwidth=864e9, link_bandwidth=_GEN4, nccl=_PCIE),
    Gpu(name="rtx-4080", aliases=("4080", "nvidia geforce rtx 4080"), architecture="sm_89",
        usable_bytes=16049 * MIB, usable_source="16049MB, public logs",
        flops_16bit=97.5e12, flops_fp32=48.7e12, memory_bandwidth=716.8e9, link_bandwidth=_GEN4, nccl=_PCIE),
    Gpu(name="rtx-4090", aliases=("4090", "nvidia geforce rtx 4090"), architecture="sm_89",
        usable_bytes=_oom(2352), usable_source="OOM 23.52 GiB with driver 595, public logs; 23.64 in VGen#104",
        flops_16bit=165.2e12, flops_fp32=82.6e12, memory_bandwidth=1008e9, link_bandwidth=_GEN4, nccl=_PCIE),
    Gpu(name="rtx-6000-ada", aliases=("6000-ada", "nvidia rtx 6000 ada generation"), architecture="sm_89",
        usable_bytes=_oom(4443), usable_source="OOM 44.43 GiB with ECC, MTVCrafter#21; 48622MB without",
        flops_16bit=364.2e12, flops_fp32=91.1e12, memory_bandwidth=960e9, link_bandwidth=_GEN4, nccl=_PCIE),
    Gpu(name="h100-80gb", aliases=("h100", "h100-sxm", "nvidia h100 80gb hbm3"), architecture="sm_90",
        usable_bytes=_oom(7910), usable_source="OOM 79.1 GiB, modal-client#2797; 81082MB and 81090MB elsewhere",
        flops_16bit=989.4e12, flops_fp32=66.9e12, memory_bandwidth=3350e9, link_bandwidth=450e9, nccl=_NVLINK_H100),
    Gpu(name="h100-pcie", aliases=("nvidia h100 pcie",), architecture="sm_90",
        usable_bytes=81008 * MIB, usable_source="81008MB, public logs",
        flops_16bit=756e12, flops_fp32=51.2e12, memory_bandwidth=2000e9, link_bandwidth=_GEN5, nccl=_PCIE),
    Gpu(name="h20", aliases=("nvidia h20",), architecture="sm_90",
        usable_bytes=97285 * MIB, usable_source="97285MB, public logs; OOM 95.08 GiB in sglang#10736",
        flops_16bit=148e12, flops_fp32=44e12, memory_bandwidth=4000e9, link_bandwidth=450e9, nccl=_NVLINK_H100),
    Gpu(name="h200", aliases=("nvidia h200",), architecture="sm_90",
        usable_bytes=_oom(13972), usable_source="OOM 139.72 GiB, public logs; 143156MB elsewhere",
        flops_16bit=989.4e12, flops_fp32=66.9e12, memory_bandwidth=4800e9, link_bandwidth=450e9, nccl=_NVLINK_H100),
    Gpu(name="b200", aliases=("nvidia b200",), architecture="sm_100",
        usable_bytes=_oom(17835), usable_source="OOM 178.35 GiB, pytorch/ao#4002; 182631MB and 182642MB elsewhere",
        flops_16bit=2250e12, flops_fp32=75e12, memory_bandwidth=8000e9, link_bandwidth=900e9, nccl=_NVLINK_H100),
    Gpu(name="b300", aliases=("nvidia b300 sxm6 ac",), architecture="sm_103",
        usable_bytes=_oom(26769), usable_source="OOM 267.69 GiB, public logs (card inferred from the size)",
        flops_16bit=2250e12, flops_fp32=75e12, memory_bandwidth=8000e9, link_bandwidth=900e9, nccl=_NVLINK_H100),
    Gpu(name="rtx-5090", aliases=("5090", "nvidia geforce rtx 5090"), architecture="sm_120",
        usable_bytes=_oom(3134), usable_source="OOM 31.34 GiB, public logs; 31.36 in TrajectoryCrafter#20, 31.37 in Wan2.1#465",
        flops_16bit=209.5e12, flops_fp32=104.8e12, memory_bandwidth=1792e9, link_bandwidth=_GEN5, nccl=_PCIE),
    Gpu(name="rtx-pro-6000", aliases=("nvidia rtx pro 6000 blackwell server edition",
                                      "nvidia rtx pro 6000 blackwell workstation edition"), architecture="sm_120",
        usable_bytes=_oom(9497), usable_source="OOM 94.97 GiB, public logs; 97250MB on the Server Edition",
        flops_16bit=503.8e12, flops_fp32=125e12, memory_bandwidth=1792e9, link_bandwidth=_GEN5, nccl=_PCIE),
    Gpu(name="rx-7900-xtx", aliases=("7900-xtx", "amd radeon rx 7900 xtx", "radeon rx 7900 xtx"), architecture="gfx1100",
        usable_bytes=_oom(2398), usable_source="OOM 23.98 GiB, public logs",
        flops_16bit=122.8e12, flops_fp32=61.4e12, memory_bandwidth=960e9, link_bandwidth=_GEN4, nccl=_PCIE),
    # torch sees each of the two dies as a GPU of its own: half of the data sheet, and one Infinity Fabric link.
    Gpu(name="mi250x", aliases=("mi250", "amd instinct mi250x", "amd instinct mi250x/mi250"), architecture="gfx90a",
        usable_bytes=_oom(6398), usable_source="OOM 63.98 GiB, public logs; 65520MB printed",
        flops_16bit=191.5e12, flops_fp32=23.9e12, memory_bandwidth=1638e9, link_bandwidth=50e9, nccl=_XGMI),
    Gpu(name="mi300x", aliases=("amd instinct mi300x",), architecture="gfx942",
        usable_bytes=_oom(19169), usable_source="OOM 191.69 GiB, public logs; 196592MB in ROCm#4203",
        flops_16bit=1307.4e12, flops_fp32=163.4e12, memory_bandwidth=5300e9, link_bandwidth=448e9, nccl=_XGMI),
]  # fmt: skip

GPUS: Catalog[Gpu] = Catalog("GPU", _ROWS, aliases={alias: row.name for row in _ROWS for alias in row.aliases})


def smallest_card(card: Gpu | None, size: int) -> str | None:
    """The smallest card on which torch can use ``size`` bytes: of the maker of ``card``, whose programs it runs.

    >>> smallest_card(GPUS["a100-80gb"], 90 * 10**9), smallest_card(GPUS["a100-80gb"], 10**12)
    ('rtx-pro-6000', None)
    """
    maker = card.architecture[:3] if card else ""
    rows = [row for row in GPUS.values() if row.usable_bytes >= size and row.architecture.startswith(maker)]
    return min(rows, key=lambda row: row.usable_bytes).name if rows else None


def usual_nodes(ranks: int, gpu: str | None) -> int:
    """Machines that so many cards are in where nobody says it: as few as machines of that card are built; 1 where those
    do not hold equal parts.

    >>> usual_nodes(8, "h100-80gb"), usual_nodes(64, "h100-80gb"), usual_nodes(16, "v100-32gb"), usual_nodes(11, None)
    (1, 8, 1, 1)
    """
    few = -(-ranks // LARGE_NODES.get(gpu or "", NODE_GPUS))
    return 1 if ranks % few else few
