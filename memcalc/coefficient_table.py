"""The table of the time model's numbers that are neither counted nor read off a data sheet, each with its source.

Those with bounds are fitted on published measurements by one command, ``memcalc calibrate --published FILE``, which writes
``memcalc/calibrated.json``; the values here are what it starts from. The others stand as they are.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import log

from memcalc.catalog import Catalog

__all__ = ["COEFFICIENTS", "Coefficient"]

PLAUSIBLE = 1000
"""How many times off the table's value a measured one may be: a slip or a damaged file is further off, no machine is."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Coefficient:
    """One number of the time model that is neither counted nor read off a data sheet."""

    name: str
    value: float
    low: float = 0.0
    """Bounds in which it is fitted; it is not where both are 0."""
    high: float = 0.0
    meaning: str
    source: str

    @property
    def fitted(self) -> bool:
        return self.low < self.high

    @property
    def deviation(self) -> float:
        """Standard deviation of its logarithm, of which the bounds are two either way."""
        return (log(self.high) - log(self.low)) / 4

    @property
    def limits(self) -> tuple[float, float]:
        """What a file may say: within a thousand times of the table's value either way, since no machine is further off,
        and not above 1 where the table is below (shares, and seconds of single operations)."""
        return self.value / PLAUSIBLE, min(self.value * PLAUSIBLE, 1.0 if self.value < 1 else float("inf"))


COEFFICIENTS: Catalog[Coefficient] = Catalog(
    "coefficient",
    [
        # What a card reaches.
        *(
            Coefficient(
                name=f"efficiency-{name}", value=value, low=low, high=high,
                meaning=f"share of the peak FLOP/s that wide matrix products reach in training on {cards}",
                source=source,
            )
            for name, value, low, high, cards, source in (
                ("volta", 0.60, 0.3, 0.9, "Volta and Turing", "bounds: NVIDIA's deep learning performance guide shows 0.5 to 0.9 of peak in cuBLAS"),
                ("ampere", 0.75, 0.5, 0.95, "Ampere cards of data centres", "llm-foundry scripts/train/benchmarking, A100-80GB: MFU up to 0.63 with all else counted"),
                ("hopper", 0.60, 0.35, 0.85, "Hopper", "llm-foundry scripts/train/benchmarking, H100-80GB: HFU up to 0.56 with all else counted"),
                ("blackwell", 0.55, 0.3, 0.85, "Blackwell", "SimuMax docs/b200: Megatron reaches 0.3 to 0.5 of the dense peak"),
                ("other", 0.60, 0.3, 0.95, "other cards", "timm on one RTX 3090; on one card it divides out of every ranking"),
                ("float32", 0.80, 0.6, 0.95, "any card in float32 proper", "NVIDIA's deep learning performance guide: products without tensor cores reach most of the peak"),
            )
        ),
        Coefficient(
            name="narrow-products", value=2.0, low=0.5, high=6.0,
            meaning="times a product's elements are moved to or from memory; what narrow products lose",
            source="bounds: 1 is each once; tiles of 128 read factors anew for each tile, mostly from the L2 cache (NVIDIA's guide)",
        ),
        Coefficient(
            name="attention-efficiency", value=0.6, low=0.3, high=1.0,
            meaning="speed of fused attention against wide matrix products on the same card, up to Ampere and Ada",
            source="bounds: Dao 2023 (FlashAttention-2), figures 4 to 6: 0.35 to 0.73 of the peak on A100",
        ),
        Coefficient(
            name="attention-efficiency-later", value=0.5, low=0.2, high=1.0,
            meaning="the same from Hopper on",
            source="bounds: Shah et al. 2024 (FlashAttention-3), figure 5: its predecessor reaches 0.35 of H100's peak",
        ),
        Coefficient(
            name="pointwise-passes", value=1.3, low=0.7, high=4.0,
            meaning="bytes moved by norms, residuals, activations and rotary positions, over those that were counted at full bandwidth",
            source="bounds: kernels reach 0.7 to 0.9 of the bandwidth (STREAM); casts, copies and biases are not counted",
        ),
        Coefficient(
            name="compiled-passes", value=0.4, low=0.2, high=1.0,
            meaning="part of those passes, and of the operations started, that torch.compile leaves",
            source="bounds: fusing two or more pointwise operations into one halves what they move at least",
        ),
        Coefficient(
            name="kernel-seconds", value=3e-6, low=1e-6, high=1e-5,
            meaning="time of the card that each operation costs beside its bytes and FLOPs: filling and draining it",
            source="bounds: an empty kernel takes 2 to 5 us from start to end (NVIDIA, CUDA graphs' documentation)",
        ),
        Coefficient(
            name="score-passes", value=16.0,
            meaning="elements read or written in forward and backward for each score of attention that is written out",
            source="counted in trainers/models: product, scale, mask, softmax, dropout, product, and their gradients",
        ),
        Coefficient(
            name="logit-bytes", value=36.0,
            meaning="bytes read or written for each logit: cast, log-softmax, gradient, and casting back",
            source="counted in F.cross_entropy of float32 copies: 2 + 2 + 4, 4 + 4, 4 + 4, 4 + 2, and products read 2 + 4",
        ),
        # Hiding.
        Coefficient(
            name="overlap-ddp", value=0.9, low=0.5, high=0.98,
            meaning="share of DDP's traffic that can hide behind backward: all but the last buckets",
            source="assumed; Li et al. 2020 (PyTorch Distributed), figure 6, shows most of it hidden",
        ),
        Coefficient(
            name="overlap-fsdp", value=0.8, low=0.5, high=0.98,
            meaning="share of FSDP's traffic that can hide: the root unit is gathered before, and reduced after, everything",
            source="assumed; Zhao et al. 2023 (PyTorch FSDP), section 3.3",
        ),
        # Links.
        Coefficient(
            name="link-efficiency", value=0.75, low=0.5, high=0.95,
            meaning="share of a link's bytes/s that NCCL's rings reach",
            source="NVIDIA/nccl#986, a maintainer: 12 of 16 GB/s on PCIe gen 3, 350 of 450 GB/s on H100's NVLink",
        ),
        Coefficient(
            name="tensor-share", value=0.6, low=0.15, high=1.0,
            meaning="speed of tensor parallel's collectives against long ones of the same link: they are short and ranks wait for each other",
            source="bounds: all-reduces of 16 to 64 MB reach 0.3 to 0.9 of the bandwidth of 1 GB (nccl-tests)",
        ),
        Coefficient(
            name="node-efficiency", value=0.7, low=0.2, high=0.95,
            meaning="share of a network's bytes/s that rings between machines reach",
            source="bounds: nccl-tests on InfiniBand reach up to 0.95 of the port; shared fabrics far less",
        ),
        Coefficient(
            name="staged-network-efficiency", value=0.4, low=0.05, high=0.9,
            meaning="the same of networks that do not read the cards' memory themselves: Omni-Path, Ethernet without RDMA",
            source="bounds: NCCL's documentation of GPUDirect RDMA; without it everything is copied through the host",
        ),
        Coefficient(
            name="hop-seconds-inside", value=4e-6,
            meaning="time from one rank to the next in a machine, of each step of a ring",
            source="NCCL's tuning table (src/graph/tuning.cc): 3.4 us a step of the Simple protocol over NVLink",
        ),
        Coefficient(
            name="hop-seconds", value=2e-5, low=5e-6, high=1e-4,
            meaning="the same from one machine to the next",
            source="bounds: 14 us a step of the Simple protocol over a network in NCCL's tuning table; many switches take more",
        ),
        *(
            Coefficient(
                name=f"node-link-{name}", value=value,
                meaning=f"B/s a machine of {cards} sends to others, where nothing is said",
                source=source,
            )
            for name, value, cards, source in (
                ("volta", 50e9, "V100 with NVLink", "DGX-1 data sheet: four ports of 100 Gb/s"),
                ("ampere", 200e9, "A100 with NVLink", "DGX A100 data sheet: eight ports of 200 Gb/s"),
                ("hopper", 400e9, "H100 and newer with NVLink", "DGX H100 and B200 data sheets: eight ports of 400 Gb/s"),
                ("other", 25e9, "other cards", "one port of InfiniBand HDR (200 Gb/s); assumed where nothing better is known"),
            )
        ),
        # The host.
        Coefficient(
            name="launch-seconds", value=2e-5, low=4e-6, high=5e-5,
            meaning="host time to start one operation from Python, autograd and the model's own code included",
            source="bounds: 8 us measured in a bare GPT block, torch 2.13, one 3 GHz core; libraries' modules check and convert more",
        ),
        Coefficient(
            name="cpu-launch-seconds", value=8e-6,
            meaning="the same of a bare operation: on a CPU, where nothing goes on meanwhile, and in an optimizer's loop",
            source="measured: forward of a 10-operation GPT block with 8 features, torch 2.13, one 3 GHz core",
        ),
        *(
            Coefficient(
                name=f"unit-seconds-{strategy}",
                value=value,
                meaning=f"host time {strategy} adds per unit and micro batch, forward and backward",
                source="measured: 32 tiny GPT blocks, fake process group of 2 ranks, torch 2.13, one 3 GHz core",
            )
            for strategy, value in (
                ("fsdp-no-shard", 9.3e-4),
                ("fsdp-shard-grad-op", 6.9e-4),
                ("fsdp-full-shard", 9.4e-4),
            )
        ),
        Coefficient(
            name="hook-seconds", value=1e-4, low=1e-5, high=1e-3,
            meaning="time of DeepSpeed's stage 2 for each gradient that is reduced, which is not hidden",
            source="bounds: OpenTau#177 profiles ZeRO-2 as host-bound by a hook on each parameter",
        ),
        Coefficient(
            name="fetch-seconds", value=3e-4, low=2e-5, high=2e-3,
            meaning="time of DeepSpeed's stage 3 for each weight and micro batch, not hidden: fetching, releasing, reducing",
            source="bounds: deepspeed/runtime/zero/partitioned_param_coordinator.py runs Python for each weight three times",
        ),
        Coefficient(
            name="broadcast-seconds",
            value=1.6e-5,
            meaning="host time of ZeroRedundancyOptimizer per tensor, which it broadcasts one by one after the step",
            source="measured: 384 tiny tensors, fake process group of 2 ranks, torch 2.13, one 3 GHz core",
        ),
        Coefficient(
            name="unfused-passes",
            value=20 / 7,
            meaning="passes over parameter-sized tensors in a foreach or for-loop Adam step, against one fused kernel",
            source="counted in torch/optim/adamw.py, _multi_tensor_adamw: 20; fused reads p, g, m, v and writes p, m, v",
        ),
        # Offload.
        Coefficient(
            name="host-link-share", value=0.4, low=0.03, high=0.9,
            meaning="share of a card's PCIe bytes/s that offloaded tensors reach",
            source="bounds: pinned copies reach 0.8 alone; cards share switches, and what is not pinned is several times slower",
        ),
        Coefficient(
            name="cpu-adam-rate", value=1.5e9, low=2e8, high=1e10,
            meaning="parameters a second that all cores of a machine update together",
            source="bounds: 28 B a parameter at 6 to 280 GB/s of host memory; DeepSpeed's CPU Adam with AVX",
        ),
        Coefficient(
            name="nvme-rate", value=3e9,
            meaning="B/s of a machine's NVMe, read or written",
            source="Rajbhandari et al. 2021 (ZeRO-Infinity), section 6: 3.2 GB/s written by one drive",
        ),
        # Memory that is nearly full.
        Coefficient(
            name="crowded-from", value=0.93,
            meaning="share of the card's memory that is reserved, from which the allocator starts to free and ask again",
            source="OpenTau#273: 7.0 samples/s at 91 % reserved, 6.2 at 98 %, 4.9 at 97 %",
        ),
        Coefficient(
            name="crowded-slowdown", value=0.3,
            meaning="time that is added where all memory is reserved, in parts of the step",
            source="OpenTau#273: 1.13 to 1.43 times as long; fms-fsdp#63: 1.28 times from batch 12 to 14",
        ),
        # How far the model is off.
        Coefficient(
            name="range-fast", value=0.7,
            meaning="measured over predicted time that one in ten published runs is below, each project counting the same",
            source="found by memcalc calibrate --published on the rows it fits",
        ),
        Coefficient(
            name="range-slow", value=1.5,
            meaning="measured over predicted time that one in ten published runs is above, each project counting the same",
            source="found by memcalc calibrate --published on the rows it fits",
        ),
        # A CPU.
        Coefficient(
            name="cpu-core-flops",
            value=1e11,
            meaning="float32 FLOP/s of one CPU core",
            source="2 FMA units x 8 lanes (AVX2) x 2 x 3 GHz = 96e9; 106e9 measured with a 1024-wide product",
        ),
        Coefficient(
            name="cpu-memory-bandwidth",
            value=4e10,
            meaning="B/s one CPU core reads and writes",
            source="measured: copy of 128 MiB with torch 2.13 on one core of an AMD EPYC",
        ),
        Coefficient(
            name="cpu-link",
            value=1.7e9,
            meaning="B/s a rank sends through gloo to a rank of the same machine",
            source="measured: all-reduce of 25 and 100 MiB, two ranks, gloo of torch 2.13",
        ),
    ],
)  # fmt: skip
