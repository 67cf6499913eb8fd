"""What trained a source's runs: how it names its data parallel, keeps its weights and computes attention."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["ENGINES", "Engine", "engine_of"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Engine:
    """One row. Beginnings of the column ``source`` choose it, the longest that fits."""

    name: str
    sources: tuple[str, ...]
    megatron: bool = False
    """Its layers are Megatron's, or divided over ranks as Megatron divides them."""
    zero1: str = "deepspeed-1"
    """The strategy that is meant by ``zero1``."""
    plain: str = "ddp"
    """The strategy that is meant by plain data parallel."""
    pure: bool = False
    """Weights and gradients are of 16 bit where torch alone would cast."""
    attention: str = "auto"
    sequence: bool = False
    """Tensor parallel divides tokens between products too."""
    ends: bool = False
    """A pipeline counts embedding and head as a layer each where layers do not divide."""


ENGINES = (
    Engine(name="PyTorch and DeepSpeed", sources=("",)),
    Engine(
        name="Megatron-DeepSpeed of bigscience",
        sources=("bigscience",),
        # train/tr11-176B-ml/tr11-176B-ml.slurm: ZeRO stage 1, its own fused softmax; partition "type:transformer|embedding"
        megatron=True, plain="megatron-ddp", attention="eager", ends=True,
    ),
    Engine(
        name="Megatron-LM",
        sources=(
            "NVIDIA/Megatron", "NVIDIA-NeMo/Megatron-Bridge", "MooreThreads/SimuMax", "alibaba/Megatron-LLaMA",
            "InternLM/xtuner docs/en/benchmark/megatron",
        ),
        # megatron/core: the distributed optimizer is ZeRO-1; flash attention; sequence parallel with tensor parallel
        megatron=True, zero1="megatron-distributed", plain="megatron-ddp", attention="flash", sequence=True, ends=True,
    ),
    Engine(
        name="InternEvo",
        sources=("InternEvo", "InternLM/InternEvo"),
        # doc/en/train_performance.md: flash attention, bfloat16; internlm/solver/optimizer/hybrid_zero_optim.py: whole tensors
        # go to ranks, gradients are summed while backward runs, and updated weights broadcast within zero1.size ranks
        zero1="zero-1", attention="flash", pure=True,
    ),
    Engine(
        name="Paddle's hybrid parallel",
        sources=("FlagOpen/FlagPerf",),
        # training/nvidia/llama1_7B-paddle: tensor and pipeline layers after Megatron, flash attention
        megatron=True, plain="megatron-ddp", attention="flash",
    ),
    Engine(name="nanotron", sources=("nanotron/",), megatron=True, plain="megatron-ddp", attention="flash"),
    Engine(name="Alpa", sources=("alpa-projects/",), megatron=True, plain="megatron-ddp", attention="eager"),
    Engine(
        name="transformers before scaled_dot_product_attention (2023)",
        sources=(
            "microsoft/DeepSpeedExamples", "huggingface/blog pytorch-fsdp", "huggingface/blog accelerate-deepspeed",
            "huggingface/transformers issue #8771", "huggingface/transformers issue #9", "cybertronai/",
        ),
        attention="eager",
    ),
)  # fmt: skip


def engine_of(source: str) -> Engine:
    """The engine of a source; PyTorch and DeepSpeed where the table has no other.

    >>> engine_of("bigscience experiments/tr3m-1B3.md").name, engine_of("someone/else").name
    ('Megatron-DeepSpeed of bigscience', 'PyTorch and DeepSpeed')
    """
    found = [(len(start), engine) for engine in ENGINES for start in engine.sources if source.startswith(start)]
    return max(found, key=lambda pair: pair[0])[1]
