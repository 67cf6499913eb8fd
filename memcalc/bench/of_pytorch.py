"""Defaults of trainers that are written in plain PyTorch: Lightning, torchtitan, torchtune and others."""

from __future__ import annotations

from memcalc.bench.framework import Default, Framework

__all__ = ["OF_PYTORCH"]

_TORCHTITAN = {
    "activation_checkpointing": Default("selective", "train_configs/llama3_8b.toml: selective, op"),
    "implementation llama": Default(
        "norm=python, grouped=repeat, rotary=complex",
        "torchtitan/models/norms.py, RMSNorm (norm_type rmsnorm); models/llama/model.py: repeat_kv, apply_rotary_emb",
    ),
    "allocator": Default("expandable_segments:True", "run_llama_train.sh from October 2024 on"),
    "loss_parallel": Default("yes", "torchtitan/config_manager.py: disable_loss_parallel is off"),
    "sequence": Default("yes", "torchtitan/parallelisms/parallelize_llama.py, apply_tp: SequenceParallel norms"),
    "torch": Default("2.6", "README.md: a nightly build"),
    "fsdp": Default("2", "torchtitan/parallelisms/parallelize_llama.py: fully_shard"),
}

_TORCHTITAN_2025 = _TORCHTITAN | {
    "optimizer_kind": Default("fused", "torchtitan/config_manager.py from pull request 881 of February 2025 on: fused"),
    "torch": Default("2.8", "README.md: a nightly build"),
    "compiled loss": Default("yes", "torchtitan/components/loss.py, build_cross_entropy_loss: compiled with the model"),
}

_TORCHTRAIN = {
    "torch": Default("2.4", "README.md: a nightly build, then of 2.4"),
    "fsdp": Default("2", "torchtrain/parallelisms/parallelize_llama.py: fully_shard"),
    "implementation llama": Default(
        "norm=python, grouped=repeat, rotary=complex",
        "torchtrain/models/llama/model.py: RMSNorm, repeat_kv, apply_rotary_emb",
    ),
}

OF_PYTORCH = (
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
            "implementation llama": Default("norm=chain, grouped=repeat", "litgpt/model.py: RMSNorm in float32; repeat_interleave of k and v"),
            "implementation decoder": Default("norm=chain, grouped=repeat, softmax=float32", "litgpt/model.py: the same, and scaled_dot_product_attention of capped scores"),
            "qkv": Default("fused", "litgpt/model.py, CausalSelfAttention.qkv: v is a view of it"),
            "head": Default("own", "litgpt/model.py, GPT: lm_head is a Linear of its own"),
            "loss": Default("logits, kept", "thunder/benchmarks/benchmark_litgpt.py: cross_entropy of logits, which stay bound"),
        },
    ),
    Framework(
        name="LitGPT with thunder",
        sources=("Lightning-AI/litgpt extensions/thunder",),
        defaults={
            "torch": Default("2.4", "extensions/thunder/README.md: a nightly build of 2.4"),
            "implementation llama": Default("norm=chain, grouped=repeat", "litgpt/model.py: RMSNorm in float32; repeat_interleave of k and v"),
            "implementation decoder": Default("norm=chain, grouped=repeat, softmax=float32", "litgpt/model.py: the same, and scaled_dot_product_attention of capped scores"),
            "qkv": Default("fused", "litgpt/model.py, CausalSelfAttention.qkv: v is a view of it"),
            "head": Default("own", "litgpt/model.py, GPT: lm_head is a Linear of its own"),
            "loss": Default("logits, kept", "extensions/thunder/pretrain.py: chunk_size=0, and logits stay bound"),
        },
    ),
    Framework(
        name="LitGPT",
        sources=("Lightning-AI/litgpt",),
        defaults={
            "sync": Default("last", "litgpt/pretrain.py: fabric.no_backward_sync but for the last micro batch"),
            "implementation llama": Default("norm=chain, grouped=repeat", "litgpt/model.py: RMSNorm in float32; repeat_interleave of k and v"),
            "implementation decoder": Default("norm=chain, grouped=repeat, softmax=float32", "litgpt/model.py: the same, and scaled_dot_product_attention of capped scores"),
            "qkv": Default("fused", "litgpt/model.py, CausalSelfAttention.qkv: v is a view of it"),
            "head": Default("own", "litgpt/model.py, GPT: lm_head is a Linear of its own"),
            "loss": Default("chunked", "litgpt/utils.py: chunked_cross_entropy, chunk_size=128"),
            "quantised": Default(
                "head, input",
                "BitsandbytesPrecision converts every linear layer; MatMul4Bit of bitsandbytes before 0.43.2 keeps its input",
            ),
            "lora_dropout": Default("0.05", "finetune/lora.py: lora_dropout = 0.05"),
            "lora_targets": Default("query-value", "finetune/lora.py: lora_query and lora_value"),
            "adapters": Default("litgpt", "litgpt/lora.py: in the dtype of the weights; zero_pad takes index_copy"),
        },
    ),
    Framework(
        name="torchtitan of spring 2024",
        sources=("pytorch/torchtitan PR #165",),
        defaults=_TORCHTRAIN
        | {"loss": Default("float32, kept", "train.py before pull request 391: logits are not dropped before backward")},
    ),
    Framework(
        name="torchtitan of summer 2024",
        sources=("pytorch/torchtitan PR #382",),
        defaults=_TORCHTRAIN
        | {
            "loss": Default(
                "float32 output",
                "its logs are of July 2024: train.py drops logits since pull request 391 (12 June 2024); "
                "models/llama/model.py ends in float()",
            ),
            "fsdp units": Default("separate root", "pull request 382 wraps tok_embeddings, and norm with output, by themselves"),
        },
    ),
    Framework(
        name="torchtitan",
        sources=("pytorch/torchtitan", "pytorch/ao torchao/prototype/float8nocompile"),
        defaults=_TORCHTITAN,
    ),
    Framework(
        name="torchtitan of 2025",
        sources=("pytorch/ao docs/source/eager_tutorials", "pytorch/torchtitan benchmarks/llama3-8b_h200_2025"),
        defaults=_TORCHTITAN_2025,
    ),
    Framework(
        name="torchtitan of early 2025",
        sources=("pytorch/ao docs/source/workflows/training.md H100",),
        defaults=_TORCHTITAN
        | {
            "torch": Default("2.7", "the page's table for H100: 2.7.0a0+gitb98af95"),
            "loss": Default("float32", "torchtitan 0.0.2: from pull request 859 (20 February) to 1033 (2 April 2025) the loss is not compiled"),
        },
    ),
    Framework(
        name="torchtitan of August 2025",
        sources=("pytorch/ao docs/source/workflows",),
        defaults=_TORCHTITAN_2025
        | {
            "torch": Default("2.9", "the page's tables for MI300X and B200: 2.9.0.dev202508"),
            "fsdp units": Default("separate root", "pull request 1094 (28 July 2025), models/llama3/infra/parallelize.py, apply_fsdp"),
        },
    ),
    Framework(
        name="torchtune of late 2024",
        sources=("pytorch/torchtune README.md",),
        defaults={
            "torch": Default("2.5", "the newest release when the table was published"),
            "fsdp": Default("2", "recipes/full_finetune_distributed.py: fully_shard"),
            "loss": Default("head in 8 chunks", "recipes/configs: torchtune.modules.loss.CEWithChunkedOutputLoss"),
        },
    ),
    Framework(
        name="torchtune",
        sources=("pytorch/torchtune",),
        defaults={
            "torch": Default("2.5", "the newest release when the table was published"),
            "implementation llama": Default("norm=python, grouped=repeat, rotary=complex", "torchtune/modules: rms_norm.py; attention.py expands k and v; position_embeddings.py turns float32 pairs"),
            "fsdp": Default("2", "recipes/full_finetune_distributed.py: fully_shard"),
        },
    ),
    Framework(
        name="PyTorch's tutorials of 2021",
        sources=("pytorch/tutorials recipes_source/zero_redundancy_optimizer",),
        defaults={
            "torch": Default("1.12", "the page came with torch 1.8; 1.12 is the oldest release memcalc knows"),
            "optimizer_kind": Default("for-loop", "torch.optim of 1.12 takes foreach only when told to"),
        },
    ),
    Framework(
        name="timm's benchmark of 2022",
        sources=("huggingface/pytorch-image-models results/benchmark",),
        defaults={
            "torch": Default("1.12", "the file's name: pt112"),
            "attention": Default("eager", "timm 0.6, vision_transformer.py, Attention: q @ k, softmax, @ v"),
        },
    ),
    Framework(
        name="mmaction2 0.x",
        sources=("open-mmlab/mmaction2",),
        defaults={"torch": Default("1.12", "torch 1.3 and later; 1.12 is the oldest release memcalc knows")},
    ),
    Framework(
        name="GPUMemNet's training loops",
        sources=("itu-rad/GPUMemNet",),
        defaults={
            "context": Default("1229-1536", "the project's own notes: 1.2 to 1.5 GiB on its A100"),
        },
    ),
)  # fmt: skip
