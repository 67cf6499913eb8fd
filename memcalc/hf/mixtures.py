"""Decoders with a mixture of experts, one row a ``model_type``: Mixtral, Qwen 2 and 3 MoE, DeepSeek V2 and V3."""

from __future__ import annotations

from typing import Any

from memcalc.errors import PlanError
from memcalc.hf.common import EVEN_WIDTH, LLAMA, as_written, biases, sizes
from memcalc.hf.keys import NEEDED, Key, Values, count, flag, text, wholes
from memcalc.hf.record import ModelType
from memcalc.spec import Model

__all__ = ["MIXTURES"]

_UNTIED = {"tied": flag("tie_word_embeddings", False)}
_SILU = {"act": text("hidden_act", "silu")}
_TOP = "num_experts_per_tok"


def _mixture(values: Values, **fields: Any) -> dict[str, Any]:
    """Fields of the family moe; what was read under the name of a field goes in as it is."""
    if values["act"] not in ("silu", "swish"):
        raise PlanError(f"hidden_act {values['act']}: only mixtures of experts with silu are known")
    found = {field: values[field] for field in Model.__dataclass_fields__ if field in values} | fields
    if found["top_k"] > found["experts"]:
        raise PlanError(f"{_TOP} {found['top_k']}: there are only {found['experts']} experts")
    if "head_dim" in values["derived"] and found["heads"] * found["head_dim"] == found["hidden"]:
        found["head_dim"] = 0
    return {"family": "moe", "stacked": True, **found}


def _sparse(values: Values, **fields: Any) -> dict[str, Any]:
    """Qwen's: every ``decoder_sparse_step``-th block has experts, but for those listed (Qwen2MoeDecoderLayer)."""
    alone = tuple(
        block
        for block in range(values["layers"])
        if block in values["only_mlp"] or (block + 1) % values["every"] or not values["experts"]
    )
    return _mixture(
        values, ffn=values["expert_ffn"], dense_layers=alone, dense_ffn=values["ffn"] * bool(alone), **fields
    )


def _deepseek(values: Values, head: str) -> dict[str, Any]:
    """The first blocks have one MLP; attention is latent, with keys of every head (DeepseekV3Attention)."""
    if values.get("mlp_bias"):
        raise PlanError("mlp_bias is true; a DeepSeek with biases in its MLPs is not known")
    alone = tuple(range(min(values["first"], values["layers"])))
    return _mixture(
        values, kv_heads=values["heads"], ffn=values["expert_ffn"], shared_ffn=values["expert_ffn"] * values["shared"],
        dense_layers=alone, dense_ffn=values["ffn"] * bool(alone), head_dim=values["nope"] + values["rotary_dim"],
        q_lora=values["q_lora"] or 0, biases=biases(values, attention_bias="qkv out"), wide_router=True, head_major=True,
    )  # fmt: skip


def _names(shared: str) -> dict[str, str]:
    block = "model.layers.#.mlp"
    return {
        **LLAMA,
        **{
            f"layers.#.self_attn.{part}": f"model.layers.#.self_attn.{part}"
            for part in ("q_a_proj", "q_a_layernorm", "q_b_proj", "kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj")
        },
        "layers.#.mlp.gate": f"{block}.gate",
        "layers.#.mlp.experts": f"{block}.experts",
        **{f"layers.#.mlp.shared.{part}_proj": f"{block}.{shared}.{part}_proj" for part in ("gate", "up", "down")},
        "layers.#.mlp.shared_gate": f"{block}.{shared}_gate",
    }


_OF_QWEN = {
    "every": count("decoder_sparse_step", 1),
    "only_mlp": wholes("mlp_only_layers", None, null=()),
    **_UNTIED,
    **_SILU,
}


def _latent(experts: str, shared: int, first: int, top_k: Any, n_experts: int, expert_ffn: int) -> dict[str, Key]:
    return {
        "experts": count(experts, n_experts),
        "expert_ffn": count("moe_intermediate_size", expert_ffn),
        "shared": count("n_shared_experts", shared),
        "first": count("first_k_dense_replace", first, least=0),
        "top_k": count(_TOP, top_k),
        "q_lora": count("q_lora_rank", 1536, null=None),
        "kv_lora": count("kv_lora_rank", 512),
        "nope": count("qk_nope_head_dim", 128),
        "rotary_dim": count("qk_rope_head_dim", 64),
        "value_dim": count("v_head_dim", 128),
        "attention_bias": flag("attention_bias", False),
        **_UNTIED,
        **_SILU,
    }


MIXTURES = [
    ModelType(
        name="mixtral",
        config="MixtralConfig",
        blocks=("MixtralDecoderLayer",),
        heads=("MixtralForCausalLM",),
        keys={
            **sizes(4096, 32, 32, 8, 14336, 32000, 131072, kv_null=NEEDED),
            "head_dim": count("head_dim", None, EVEN_WIDTH),
            "experts": count("num_local_experts num_experts", 8),
            "top_k": count(_TOP, 2),
            "window": count("sliding_window", None, null=None),
            **_UNTIED,
            **_SILU,
        },
        fields=lambda values, head: _mixture(values),
        written=as_written("python"),
        names=lambda model: _names("shared_expert"),
    ),
    ModelType(
        name="qwen2_moe",
        config="Qwen2MoeConfig",
        blocks=("Qwen2MoeDecoderLayer",),
        heads=("Qwen2MoeForCausalLM",),
        keys={
            **sizes(2048, 24, 16, 16, 5632, 151936, 32768, kv_null=NEEDED),
            "head_dim": count("head_dim", EVEN_WIDTH),
            **_OF_QWEN,
            "top_k": count(_TOP, 4),
            "experts": count("num_experts", 60),
            "expert_ffn": count("moe_intermediate_size", 1408),
            "shared_ffn": count("shared_expert_intermediate_size", 5632),
            "qkv_bias": flag("qkv_bias", True),
        },
        fields=lambda values, head: _sparse(values, shared_gate=True, biases=biases(values, qkv_bias="qkv")),
        written=as_written("python"),
        names=lambda model: _names("shared_expert"),
    ),
    ModelType(
        name="qwen3_moe",
        config="Qwen3MoeConfig",
        blocks=("Qwen3MoeDecoderLayer",),
        heads=("Qwen3MoeForCausalLM",),
        keys={
            **sizes(2048, 24, 32, 4, 6144, 151936, 32768, kv_null=NEEDED),
            "head_dim": count("head_dim", EVEN_WIDTH),
            **_OF_QWEN,
            "top_k": count(_TOP, 8),
            "experts": count("num_experts num_local_experts", 128),
            "expert_ffn": count("moe_intermediate_size", 768),
            "attention_bias": flag("attention_bias", False),
        },
        fields=lambda values, head: _sparse(values, qk_norm=True, biases=biases(values, attention_bias="qkv out")),
        written=as_written("python"),
        names=lambda model: _names("shared_expert"),
    ),
    ModelType(
        name="deepseek_v2",
        config="DeepseekV2Config",
        blocks=("DeepseekV2DecoderLayer",),
        heads=("DeepseekV2ForCausalLM",),
        keys={
            **sizes(4096, 32, 32, None, 11008, 102400, 2048),
            # Without a number of experts a token takes its router cannot work: the class's default is None.
            **_latent("n_routed_experts num_experts", 2, 0, NEEDED, 64, 1407),
            "mlp_bias": flag("mlp_bias", False),
        },
        fields=_deepseek,
        written=as_written("python"),
        names=lambda model: _names("shared_experts"),
    ),
    ModelType(
        name="deepseek_v3",
        config="DeepseekV3Config",
        blocks=("DeepseekV3DecoderLayer",),
        heads=("DeepseekV3ForCausalLM",),
        keys={
            **sizes(7168, 61, 128, 128, 18432, 129280, 4096),
            **_latent("n_routed_experts num_local_experts", 1, 3, 8, 256, 2048),
            "predicting": count("num_nextn_predict_layers num_mtp_layers", 1, least=0),
        },
        fields=_deepseek,
        written=as_written("python"),
        names=lambda model: _names("shared_experts"),
        notes=lambda values: (
            ["layers that predict further tokens are no part of DeepseekV3ForCausalLM, and not counted"]
            * bool(values["predicting"])
        ),
    ),
]
