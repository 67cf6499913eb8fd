"""One small config of each decoder, and what the ledger keeps of its forward pass."""

from __future__ import annotations

from typing import Any

import numpy as np

from memcalc.hf.decoders import DECODERS
from memcalc.hf.gpts import GPTS
from memcalc.hf.later_decoders import LATER_DECODERS
from memcalc.hf.mixtures import MIXTURES
from memcalc.hf.open_gpts import OPEN_GPTS
from memcalc.hf.record import HfModel
from memcalc.implementation import Implementation
from memcalc.ledger import ledger
from memcalc.plan import Plan
from memcalc.timeline import CATEGORIES, MOMENTS

__all__ = ["ROWS", "SIZED", "TOKENS", "activations", "kept", "sized"]

ROWS, TOKENS = 2, 64
SIZED = sorted({row.name for row in [*DECODERS, *GPTS, *OPEN_GPTS, *MIXTURES, *LATER_DECODERS]} - {"phi-msft"})
_EXPERTS = {"moe_intermediate_size": 24, "num_experts": 4, "num_experts_per_tok": 2}
_DEEPSEEK = {
    "moe_intermediate_size": 24, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1,
    "kv_lora_rank": 16, "q_lora_rank": 20, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 12,
    "first_k_dense_replace": 1, "num_key_value_heads": 4,
}  # fmt: skip
# Beside sizes that all have: what keeps each small, and without dropout.
_OWN: dict[str, dict[str, Any]] = {
    "qwen3": {"head_dim": 16}, "gemma": {"head_dim": 16}, "gemma2": {"head_dim": 16}, "gemma3_text": {"head_dim": 16},
    "opt": {"ffn_dim": 160, "dropout": 0.0}, "bloom": {"n_layer": 2, "n_head": 4}, "gptj": {"rotary_dim": 8},
    "gpt_neo": {"num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]]},
    "mpt": {"d_model": 64, "n_layers": 2, "n_heads": 4, "max_seq_len": TOKENS}, "mixtral": {"num_local_experts": 4}, "qwen2_moe": {**_EXPERTS, "shared_expert_intermediate_size": 40},
    "qwen3_moe": {**_EXPERTS, "head_dim": 16}, "deepseek_v2": _DEEPSEEK, "deepseek_v3": _DEEPSEEK,
}  # fmt: skip
_LLAMA_SIZES = {
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 160,
    "max_position_embeddings": TOKENS,
}  # fmt: skip
_GPT_SIZES = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": TOKENS, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}  # fmt: skip


def sized(model_type: str) -> dict[str, Any]:
    sizes = _GPT_SIZES if model_type in ("gpt2", "gptj", "gpt_bigcode") else _LLAMA_SIZES
    ends = {"vocab_size": 50, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    return {"model_type": model_type, **sizes, **ends, **_OWN.get(model_type, {})}


def kept(read: HfModel, attention: str, precision: str) -> int:
    """The same of the ledger, with the code written as transformers has it."""
    plan = Plan(
        model=read.model, tokens=TOKENS, micro_batch=ROWS, precision=precision, device="cpu",
        implementation=Implementation.suited(read.model, read.written),
        attention="eager" if attention == "eager" and not read.model.written_out else "auto",
    )  # fmt: skip
    return activations(plan)


def activations(plan: Plan) -> int:
    """Bytes of activations when the forward pass is done."""
    timeline = ledger(plan)
    done = np.flatnonzero(timeline.moment == MOMENTS.index("forward"))[-1] + 1
    activations = timeline.category[:done] == CATEGORIES.index("activations")
    return int(timeline.delta[:done][activations].sum())
