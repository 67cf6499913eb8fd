"""What a blank cell means: the defaults of the framework a row's source used, each with where it is documented.

Keys are columns of the file, and what the file has no column for: ``torch`` (release), ``optimizer_kind``, ``loss`` (how
its logits are held), ``fsdp`` (1 or 2), ``allocator`` (PYTORCH_CUDA_ALLOC_CONF), ``context`` (MiB outside of torch,
lowest-highest), ``dropout FAMILY``, ``implementation FAMILY`` (fields of Implementation), ``qkv`` (one ``fused`` product),
``head`` (its ``own`` matrix, even where the config ties it) and ``flash`` (takes queries as they are ``grouped``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from memcalc.bench import bigscience

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
    """Beginnings of the column ``source``, a blank and ``gpu_type`` that mean this framework; the longest that fits wins.
    A page that was measured on each card with another version is told apart by the card."""
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
    "fsdp units": Default("", "blocks and the root, as in all examples of torch"),
    "fsdp": Default("1", "FullyShardedDataParallel; fully_shard became public in torch 2.6"),
    "grad_accum": Default("1", "torch accumulates only when zero_grad is not called"),
    "loss": Default("float32", "memcalc's own: cross_entropy on float32 logits"),
    "offload": Default("none", "torch keeps tensors where they were made"),
    "adapters": Default("", "torch has none"),
    "policy": Default("", "FullyShardedDataParallel casts where it is given a MixedPrecision"),
    "reentrant": Default("", "torch.utils.checkpoint is told which form to take"),
    "quantised": Default("", "the blocks' linear layers, by a MatMul4Bit that keeps no input"),
    "lora_dropout": Default("", "not stated"),
    "lora_targets": Default("", "not stated"),
    "quantisation": Default("", "as the cell says"),
    "selective": Default("op", "torchtitan's word without another: by operation"),
    "optimizer_kind": Default("foreach", "torch.optim, _default_to_fused_or_foreach: foreach for CUDA parameters"),
    "sync": Default("each", "torch/distributed/fsdp reduces gradients in every backward that is not in no_sync"),
    "compiled loss": Default("", "torch.compile acts only where it is called"),
    "torch": Default("2.13", "memcalc's own"),
}

# What the layers of transformers are written like.
_TRANSFORMERS = {
    "sync": Default("last", "accelerate/accelerator.py, accumulate: no_sync but for the last micro batch"),
    "policy": Default("compute", "transformers/training_args.py hands bf16 to accelerate, whose FSDP casts by policy"),
    "reentrant": Default("yes", "transformers/modeling_utils.py, gradient_checkpointing_enable: use_reentrant=True"),
    "adapters": Default("peft", "peft: adapters are float32 (autocast_adapter_dtype)"),
    "quantisation": Default("double", "fms-acceleration, framework_plugin_bnb.py: bnb_4bit_use_double_quant=True"),
    "dropout bert": Default("0.1", "configuration_bert.py: hidden_dropout_prob, attention_probs_dropout_prob"),
    "dropout gpt2": Default("0.1", "configuration_gpt2.py: resid_pdrop, embd_pdrop, attn_pdrop"),
    "dropout t5": Default("0.1", "configuration_t5.py: dropout_rate"),
    "flash": Default("grouped", "modeling_llama.py, LlamaFlashAttention2: k and v are not repeated"),
    "implementation gpt2": Default(
        "gelu=python", "configuration_gpt2.py: activation_function gelu_new, which is written out"
    ),
    "implementation llama": Default(
        "norm=python, grouped=repeat, softmax=float32",
        "modeling_llama.py: LlamaRMSNorm, repeat_kv, eager softmax in float32",
    ),
    "implementation decoder": Default(
        "norm=python, softmax=float32", "modeling_granite.py: GraniteRMSNorm; softmax in float32"
    ),
    "implementation moe": Default(
        "norm=python, grouped=repeat, softmax=float32", "modeling_mixtral.py: MixtralRMSNorm, repeat_kv"
    ),
    "implementation t5": Default("norm=python", "modeling_t5.py: T5LayerNorm"),
}

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

FRAMEWORKS = (    Framework(
        name="DeepSpeed",
        sources=("deepspeedai/DeepSpeed", "microsoft/DeepSpeed "),
        defaults={"optimizer_kind": Default("fused", "deepspeed/runtime/engine.py: Adam is deepspeed.ops.adam.FusedAdam")},
    ),
    Framework(
        name="DeepSpeed-Chat",
        sources=("deepspeedai/DeepSpeedExamples",),
        defaults=_TRANSFORMERS
        | {
            "torch": Default("2.0", "the newest release when most of the threads were opened"),
            "loss": Default("shifted", "modeling_opt.py, modeling_bloom.py: shift_logits are copied"),
            "optimizer_kind": Default("fused", "deepspeed/runtime/engine.py: Adam is deepspeed.ops.adam.FusedAdam"),
            "adapters": Default(
                "deepspeed-chat",
                "dschat/utils/module/lora.py: the adapted matrices are frozen, all else only with --only_optimize_lora",
            ),
            "lora_targets": Default("all-linear", "training_scripts: --lora_module_name decoder.layers., every layer of a block"),
        },
    ),
    Framework(
        name="DeepSpeed's example of all-gathers by copy engines",
        sources=("deepspeedai/DeepSpeed examples/sdma_allgather",),
        defaults=_TRANSFORMERS
        | {
            "optimizer_kind": Default("fused", "deepspeed/runtime/engine.py: Adam is deepspeed.ops.adam.FusedAdam"),
            "attention used": Default(
                "sdpa", "train_qwen3_zero3.py sets cfg.attn_implementation, but transformers reads _attn_implementation"
            ),
            "zero_sizes": Default(
                "reduce_bucket_size=50000000, sub_group_size=1000000000000", "examples/sdma_allgather/ds_config_zero3.json"
            ),
        },
    ),
    Framework(
        name="DeepSpeed through transformers",
        sources=("hiyouga/LLaMA-Factory", "haotian-liu/LLaVA", "allenai/open-instruct", "QwenLM/Qwen"),
        defaults=_TRANSFORMERS
        | {
            "zero_sizes": Default("auto", "the project's ZeRO-3 file says auto for buckets and thresholds"),
            "loss": Default("float32", "modeling_llama.py: logits.float()"),
            "torch": Default("2.0", "the newest release when the thread was opened"),
        },
    ),
    Framework(
        name="LLaMA-Factory",
        sources=("hiyouga/LLaMA-Factory issue", "hiyouga/LlamaFactory issue"),
        defaults=_TRANSFORMERS
        | {
            "seq_len": Default("1024", "src/llmtuner/hparams/data_args.py: cutoff_len"),
            "zero_sizes": Default("auto", "examples/deepspeed/ds_z3_config.json: auto for buckets and thresholds"),
            "optimizer_kind": Default("for-loop", "README.md asks for torch 1.13.1; foreach is the default from 2.0 on"),
            "loss": Default("float32, shifted", "modeling_llama.py of 2023: logits.float(), copied shifted"),
            "torch": Default("1.13", "README.md: PyTorch 1.13.1"),
        },
    ),
    Framework(
        name="Hugging Face Trainer of 2023",
        sources=(
            "lm-sys/FastChat", "huggingface/accelerate", "huggingface/transformers issue", "tloen/alpaca-lora",
            "zai-org/ChatGLM2-6B", "lqtrung1998/mwp_ReFT", "yangjianxin1/Firefly", "axolotl-ai-cloud/axolotl",
            "FlagOpen/FlagEmbedding",
        ),
        defaults=_TRANSFORMERS
        | {
            "torch": Default("2.0", "the newest release when most of the threads were opened"),
            "loss": Default("shifted", "modeling_llama.py, modeling_gpt2.py: shift_logits are copied"),
        },
    ),
    Framework(
        name="Axolotl",
        sources=("axolotl-ai-cloud/axolotl PR",),
        defaults=_TRANSFORMERS
        | {
            "optimizer": Default("adamw (fused)", "axolotl's config reference: optimizer is OptimizerNames.ADAMW_TORCH_FUSED"),
            "optimizer_kind": Default("fused", "axolotl's config reference: optimizer is OptimizerNames.ADAMW_TORCH_FUSED"),
            "torch": Default("2.12", "the pull requests' own"),
        },
    ),
    Framework(
        name="Stanford Alpaca",
        sources=("tatsu-lab/stanford_alpaca",),
        defaults=_TRANSFORMERS
        | {
            "grad_accum": Default("8", "README.md: --gradient_accumulation_steps 8"),
            "torch": Default("1.13", "requirements.txt: torch without a version, of March 2023"),
            "loss": Default("shifted", "modeling_llama.py: shift_logits are copied"),
        },
    ),
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
        name="Hugging Face Trainer",
        sources=("foundation-model-stack/fms-acceleration", "huggingface/transformers", "microsoft/DeepSpeedExamples"),
        defaults={
            "torch": Default("2.4", "fms-acceleration scripts/benchmarks/refs: torch 2.4"),
            "optimizer_kind": Default("foreach", "TrainingArguments.optim: adamw_torch, torch.optim.AdamW as it is"),
            "loss": Default(
                "shifted", "transformers/loss/loss_utils.py of 4.48, ForCausalLMLoss: float32 logits, shifted and copied"
            ),
            **_TRANSFORMERS,
        },
    ),
    Framework(
        name="Hugging Face Trainer of 2024",
        sources=(
            "foundation-model-stack/fms-acceleration scripts/benchmarks/refs/a100_80gb_granite",
            "foundation-model-stack/fms-acceleration scripts/benchmarks/refs/a100_80gb_liger",
        ),
        defaults={
            "torch": Default("2.4", "fms-acceleration scripts/benchmarks/refs/requirements_granite.txt: torch 2.4.1"),
            "optimizer_kind": Default("foreach", "TrainingArguments.optim: adamw_torch, torch.optim.AdamW as it is"),
            "loss": Default(
                "float32, shifted",
                "requirements_granite.txt: transformers 4.45, whose models end in logits.float(), and copy them shifted",
            ),
            **_TRANSFORMERS,
        },
    ),
    Framework(
        name="Hugging Face Trainer of 2022",
        sources=("huggingface/transformers docs/source/performance",),
        defaults={
            "torch": Default("1.12", "the page is of early 2022, and 1.12 the oldest release memcalc knows"),
            "optimizer_kind": Default("for-loop", "transformers/optimization.py, AdamW; torch 1.12 takes foreach only when told to"),
            "context": Default("1343-1343", "the page: 1343 MB when the kernels are loaded"),
            **_TRANSFORMERS,
        },
    ),
    Framework(
        name="Hugging Face's blog of 2021 and 2022",
        sources=("huggingface/blog",),
        defaults={
            "torch": Default("1.12", "torch 1.7 to 1.11 by its posts; 1.12 is the oldest release memcalc knows"),
            "optimizer_kind": Default("for-loop", "transformers/optimization.py, AdamW; torch 1.12 takes foreach only when told to"),
            "loss": Default("shifted", "modeling_gpt2.py of its day: shift_logits = lm_logits[..., :-1, :].contiguous()"),
            **_TRANSFORMERS,
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
        name="ColossalAI's BERT benchmark",
        sources=("hpcaitech/ColossalAI examples/language/bert",),
        defaults={
            "torch": Default("1.13", "requirements of ColossalAI 0.3: torch 1.12 or 1.13"),
            "optimizer_kind": Default("fused", "colossalai/nn/optimizer/hybrid_adam.py: FusedAdam's multi-tensor kernel on the GPU"),
            **_TRANSFORMERS,
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
        name="llm-foundry on a model of transformers",
        sources=("mosaicml/llm-foundry issue",),
        defaults={
            "loss": Default("float32", "scripts/train/yamls/finetune: hf_causal_lm, whose modeling_mpt.py takes F.cross_entropy"),
            "optimizer_kind": Default("for-loop", "composer/optim/decoupled_weight_decay.py"),
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
        defaults={key: Default(*said) for key, said in bigscience.DEEPSPEED.items()},
    ),
    Framework(
        name="Megatron-LM of bigscience, May 2021",
        sources=("bigscience-workshop/bigscience experiments/gpt2.md",),
        defaults={key: Default(*said) for key, said in bigscience.GPT2.items()},
    ),
    Framework(
        name="Megatron-DeepSpeed of bigscience, May 2021",
        sources=("bigscience-workshop/bigscience experiments/gpt2.md (Megatron+DeepSpeed 3D)",),
        defaults={key: Default(*said) for key, said in bigscience.GPT2_DEEPSPEED.items()},
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
