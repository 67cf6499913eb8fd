"""The numbers of the time model that are neither counted nor read off a data sheet, each with its source."""

from __future__ import annotations

from dataclasses import dataclass

from memcalc.catalog import Catalog

__all__ = ["COEFFICIENTS", "Coefficient"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Coefficient:
    """One number of the time model that is neither counted nor read off a data sheet."""

    name: str
    value: float
    meaning: str
    source: str


COEFFICIENTS: Catalog[Coefficient] = Catalog(
    "coefficient",
    [
        Coefficient(
            name="efficiency-ampere",
            value=0.60,
            meaning="share of the peak FLOP/s that a training step reaches on Ampere cards of data centres",
            source="llm-foundry scripts/train/benchmarking, A100-80GB, 1B to 7B without checkpointing: median MFU of 15 rows",
        ),
        Coefficient(
            name="efficiency-hopper",
            value=0.41,
            meaning="the same on Hopper and newer",
            source="llm-foundry scripts/train/benchmarking, H100-80GB, without checkpointing: median MFU of 32 rows",
        ),
        Coefficient(
            name="efficiency-other",
            value=0.40,
            meaning="the same on cards for which no table was found; on one card it divides out of every ranking",
            source="bigscience tr3m-1B3 on V100-32GB without checkpointing: 23 s a step is 0.41 of 125 TFLOP/s; else a guess",
        ),
        Coefficient(
            name="overlap-ddp",
            value=0.9,
            meaning="share of DDP's traffic that can hide behind backward: all but the last buckets",
            source="assumed; Li et al. 2020 (PyTorch Distributed), figure 6, shows most of it hidden",
        ),
        Coefficient(
            name="overlap-fsdp",
            value=0.8,
            meaning="share of FSDP's traffic that can hide: the root unit is gathered before, and reduced after, everything",
            source="assumed; Zhao et al. 2023 (PyTorch FSDP), section 3.3",
        ),
        Coefficient(
            name="link-efficiency",
            value=0.75,
            meaning="share of a link's bytes/s that NCCL's rings reach",
            source="NVIDIA/nccl#986, a maintainer: 12 of 16 GB/s on PCIe gen 3, 350 of 450 GB/s on H100's NVLink",
        ),
        Coefficient(
            name="launch-seconds",
            value=8e-6,
            meaning="host time to start one operation from Python, autograd included",
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
        Coefficient(
            name="node-link",
            value=25e9,
            meaning="B/s a rank sends to another node",
            source="one port of InfiniBand HDR (200 Gb/s) per node; assumed where nothing better is known",
        ),
    ],
)  # fmt: skip
