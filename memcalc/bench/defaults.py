"""What a blank cell means: the defaults of the framework a row's source used, each with where it is documented.

Keys are columns of the file, and six things the file has no column for: ``torch`` (release), ``optimizer_kind``,
``loss`` (how its logits are held), ``fsdp`` (1 or 2), ``allocator`` (PYTORCH_CUDA_ALLOC_CONF) and ``context`` (MiB
outside of torch, lowest-highest).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

__all__ = ["FRAMEWORKS", "Default", "Framework", "framework_of"]


class Default(NamedTuple):
    """One documented value."""

    value: str
    source: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Framework:
    """One row: a framework at the time its numbers were published."""

    name: str
    sources: tuple[str, ...]
    """Beginnings of the column ``source`` that mean this framework; the longest that fits wins."""
    defaults: Mapping[str, Default] = field(default_factory=dict)

    def default(self, key: str) -> Default | None:
        """The framework's own default, else PyTorch's."""
        return self.defaults.get(key) or PYTORCH.get(key)


# Below every framework lies PyTorch.
PYTORCH = {
    "allocator": Default("", "PYTORCH_CUDA_ALLOC_CONF is not set"),
    "activation_checkpointing": Default("none", "torch.utils.checkpoint acts only where it is called"),
    "attention": Default("sdpa", "torch.nn.functional.scaled_dot_product_attention chooses its kernel"),
    "compile": Default("no", "torch.compile acts only where it is called"),
    "fsdp": Default("1", "FullyShardedDataParallel; fully_shard became public in torch 2.6"),
    "grad_accum": Default("1", "torch accumulates only when zero_grad is not called"),
    "loss": Default("float32", "memcalc's own: cross_entropy on float32 logits"),
    "offload": Default("none", "torch keeps tensors where they were made"),
    "optimizer_kind": Default("foreach", "torch.optim, _default_to_fused_or_foreach: foreach for CUDA parameters"),
    "torch": Default("2.13", "memcalc's own"),
}

FRAMEWORKS = (
    Framework(
        name="Lightning Fabric",
        sources=("Lightning-AI/pytorch-lightning",),
        defaults={
            "torch": Default("2.0", "the page came with Lightning 2.1 in 2023; torch 2.0 was the newest release"),
        },
    ),
    Framework(
        name="lightning-thunder",
        sources=("Lightning-AI/lightning-thunder",),
        defaults={
            "torch": Default("2.5", "nightly builds of mid-2024"),
            "loss": Default("logits, kept", "thunder/benchmarks/benchmark_litgpt.py: cross_entropy of logits, which stay bound"),
        },
    ),
    Framework(
        name="LitGPT with thunder",
        sources=("Lightning-AI/litgpt extensions/thunder",),
        defaults={
            "torch": Default("2.4", "extensions/thunder/README.md: a nightly build of 2.4"),
            "loss": Default("logits, kept", "extensions/thunder/pretrain.py: chunk_size=0, and logits stay bound"),
        },
    ),
    Framework(
        name="LitGPT",
        sources=("Lightning-AI/litgpt",),
        defaults={
            "loss": Default("chunked", "litgpt/utils.py: chunked_cross_entropy, chunk_size=128"),
        },
    ),
    Framework(
        name="torchtitan of spring 2024",
        sources=("pytorch/torchtitan PR #165", "pytorch/torchtitan PR #382"),
        defaults={
            "torch": Default("2.4", "README.md: a nightly build, then of 2.4"),
            "fsdp": Default("2", "torchtrain/parallelisms/parallelize_llama.py: fully_shard"),
            "loss": Default("float32, kept", "train.py before pull request 391: logits are not dropped before backward"),
        },
    ),
    Framework(
        name="torchtitan",
        sources=("pytorch/torchtitan", "pytorch/ao docs/source/eager_tutorials", "pytorch/ao docs/source/workflows"),
        defaults={
            "activation_checkpointing": Default("selective", "train_configs/llama3_8b.toml: selective, op"),
            "allocator": Default("expandable_segments:True", "run_llama_train.sh from October 2024 on"),
            "torch": Default("2.6", "README.md: a nightly build"),
            "fsdp": Default("2", "torchtitan/parallelisms/parallelize_llama.py: fully_shard"),
        },
    ),
    Framework(
        name="torchtune",
        sources=("pytorch/torchtune",),
        defaults={
            "torch": Default("2.5", "the newest release when the table was published"),
            "fsdp": Default("2", "recipes/full_finetune_distributed.py: fully_shard"),
        },
    ),
    Framework(
        name="Hugging Face Trainer",
        sources=("foundation-model-stack/fms-acceleration", "huggingface/transformers", "microsoft/DeepSpeedExamples"),
        defaults={
            "torch": Default("2.4", "fms-acceleration scripts/benchmarks/refs: torch 2.4"),
            "optimizer_kind": Default("foreach", "TrainingArguments.optim: adamw_torch, torch.optim.AdamW as it is"),
            "loss": Default(
                "shifted", "transformers/loss/loss_utils.py of 4.48, ForCausalLMLoss: float32 logits, shifted and copied"
            ),
        },
    ),
    Framework(
        name="llm-foundry",
        sources=("mosaicml/llm-foundry",),
        defaults={
            "loss": Default("fused", "llmfoundry/models/mpt/modeling_mpt.py: loss_fn defaults to fused_crossentropy"),
        },
    ),
    Framework(
        name="Megatron-LM",
        sources=("NVIDIA/Megatron-LM",),
        defaults={
            "zero": Default("megatron", "megatron/core/distributed and megatron/core/optimizer/distrib_optimizer.py"),
            "optimizer_kind": Default("fused", "megatron/core/optimizer/__init__.py: FusedAdam of Transformer Engine or apex"),
            "torch": Default("2.8", "Dockerfile.ci.dev: nvcr.io/nvidia/pytorch of 2025"),
        },
    ),
    Framework(
        name="Megatron-DeepSpeed of bigscience",
        sources=("bigscience-workshop/bigscience",),
        defaults={
            "zero": Default("deepspeed", "megatron/training.py: deepspeed.initialize"),
            "optimizer_kind": Default("fused", "megatron/optimizer/__init__.py: apex.optimizers.FusedAdam"),
            "loss": Default("copied", "megatron/mpu/cross_entropy.py: vocab_parallel_logits.clone()"),
            "torch": Default("1.12", "torch 1.8 to 1.11; memcalc's oldest"),
        },
    ),
    Framework(
        name="GPUMemNet's training loops",
        sources=("itu-rad/GPUMemNet",),
        defaults={
            "context": Default("1229-1536", "the project's own notes: 1.2 to 1.5 GiB on its A100"),
        },
    ),
)  # fmt: skip

_NONE = Framework(name="PyTorch", sources=())


def framework_of(source: str) -> Framework:
    """The framework a source used; plain PyTorch where the table has none.

    >>> framework_of("Lightning-AI/litgpt extensions/thunder/README.md").name
    'LitGPT with thunder'
    """
    found = [
        (len(start), framework) for framework in FRAMEWORKS for start in framework.sources if source.startswith(start)
    ]
    return max(found, key=lambda pair: pair[0])[1] if found else _NONE
