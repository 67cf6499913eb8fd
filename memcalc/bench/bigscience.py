"""What bigscience's scripts of three times say: value and where it stands, by the keys of memcalc/bench/defaults.py."""

from __future__ import annotations

__all__ = ["DEEPSPEED", "GPT2", "GPT2_DEEPSPEED"]

_ADAM = ("fused", "megatron/optimizer/__init__.py: apex.optimizers.FusedAdam")
_TORCH = ("1.12", "torch 1.8 to 1.11; memcalc's oldest")
_PIPE = {
    "zero": ("deepspeed", "megatron/training.py: deepspeed.initialize"),
    "pipeline_engine": ("yes", "megatron/model/gpt_model.py: GPTModelPipe, a PipelineModule"),
    "loss": ("made float32 by the model", "megatron/model/gpt_model.py, GPTModelPipe: float16_to_fp32"),
}

# tr3m and tr11, July 2021 to February 2022.
DEEPSPEED = {
    **_PIPE,
    "stage": ("first", "chronicles-prequel.md: nvidia-smi on a node with an embedding"),
    "contiguous": ("no", "deepspeed/runtime/engine.py, 0.4.4 to 0.12: not in stage 1"),
    "optimizer_kind": _ADAM,
    "torch": _TORCH,
}
# May 2021: experiments/gpt2-meg, Megatron-LM's own trainer.
GPT2 = {
    "zero": ("megatron", "experiments/gpt2-meg/meg_gpt2_base_n16.slurm: pretrain_gpt.py"),
    "heads": ("32", "experiments/gpt2-meg: NHEADS=32"),
    "kv_heads": ("32", "one for each of NHEADS=32"),
    "param_dtype": ("fp16+fp32 master", "experiments/gpt2-meg: --fp16"),
    "attention": ("eager", "megatron/model/transformer.py, CoreAttention: scores are written out"),
    "optimizer_kind": _ADAM,
    "torch": _TORCH,
}
# The same with DeepSpeed: experiments/gpt2-meg-ds-3d, which says ZERO_STAGE=0.
GPT2_DEEPSPEED = GPT2 | _PIPE
