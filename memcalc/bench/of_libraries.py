"""Defaults of trainers on libraries: transformers, DeepSpeed, Megatron-LM, Composer and what builds on them."""

from __future__ import annotations

from memcalc.bench import bigscience
from memcalc.bench.framework import Default, Framework

__all__ = ["OF_LIBRARIES"]

# What the layers of transformers are written like.
_TRANSFORMERS = {
    "sync": Default("last", "accelerate/accelerator.py, accumulate: no_sync but for the last micro batch"),
    "policy": Default("compute", "transformers/training_args.py hands bf16 to accelerate, whose FSDP casts by policy"),
    "reentrant": Default("yes", "transformers/modeling_utils.py, gradient_checkpointing_enable: use_reentrant=True"),
    "adapters": Default("peft", "peft: adapters are float32 (autocast_adapter_dtype)"),
    "quantisation": Default("double", "fms-acceleration, framework_plugin_bnb.py: bnb_4bit_use_double_quant=True"),
    "dropout bert": Default("0.1", "configuration_bert.py: hidden_dropout_prob, attention_probs_dropout_prob"),
    "dropout gpt2": Default("0.1", "configuration_gpt2.py: resid_pdrop, embd_pdrop, attn_pdrop"),
    "dropout gpt_bigcode": Default("0.1", "configuration_gpt_bigcode.py: resid_pdrop, embd_pdrop, attn_pdrop"),
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
    "implementation gpt_bigcode": Default(
        "softmax=scripted", "modeling_gpt_bigcode.py: upcast_masked_softmax, which TorchScript differentiates"
    ),
    "implementation opt": Default(
        "softmax=clamped", "modeling_opt.py up to 4.49: torch.max of the scores and the lowest number"
    ),
    "implementation moe": Default(
        "norm=python, grouped=repeat, softmax=float32", "modeling_mixtral.py: MixtralRMSNorm, repeat_kv"
    ),
    "implementation t5": Default("norm=python", "modeling_t5.py: T5LayerNorm"),
}

OF_LIBRARIES = (
    Framework(
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
            "torch": Default("1.10", "the page is of early 2022; 1.11 came in March"),
            "optimizer_kind": Default("for-loop", "transformers/optimization.py, AdamW, one weight after the other"),
            "context": Default("1343-1343", "the page: 1343 MB when the kernels are loaded"),
            **_TRANSFORMERS,
        },
    ),
    Framework(
        name="Hugging Face's blog of 2021 and 2022",
        sources=("huggingface/blog",),
        defaults={
            "torch": Default("1.10", "torch 1.7 to 1.11 by its posts; 1.10 is the oldest release memcalc knows"),
            "optimizer_kind": Default("for-loop", "transformers/optimization.py, AdamW, one weight after the other"),
            "loss": Default("shifted", "modeling_gpt2.py of its day: shift_logits = lm_logits[..., :-1, :].contiguous()"),
            **_TRANSFORMERS,
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
)  # fmt: skip
