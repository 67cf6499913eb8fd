"""Llama and the decoders whose code was copied from it, one row a ``model_type``."""

from __future__ import annotations

from typing import Any

from memcalc.hf.common import (
    AS_HEADS,
    EVEN_WIDTH,
    EVERYWHERE,
    FOUR_TIMES,
    LLAMA,
    as_written,
    biases,
    decoder_fields,
    rotated,
    sizes,
)  # fmt: skip
from memcalc.hf.keys import NEEDED, Values, count, flag, number, share, text
from memcalc.hf.record import ModelType

__all__ = ["DECODERS"]

_ACT = text("hidden_act", "silu")
_SHARE = "rope_parameters.partial_rotary_factor rope_scaling.partial_rotary_factor partial_rotary_factor"
_GEMMA2 = {
    **LLAMA,
    "layers.#.self_attn_norm": "model.layers.#.post_attention_layernorm",
    "layers.#.post_attention_layernorm": "model.layers.#.pre_feedforward_layernorm",
    "layers.#.mlp_norm": "model.layers.#.post_feedforward_layernorm",
}
_PHI = {
    **LLAMA,
    "norm": "model.final_layernorm",
    "layers.#.self_attn.o_proj": "model.layers.#.self_attn.dense",
    "layers.#.self_attn.q_norm": "model.layers.#.self_attn.q_layernorm",
    "layers.#.self_attn.k_norm": "model.layers.#.self_attn.k_layernorm",
    "layers.#.mlp.up_proj": "model.layers.#.mlp.fc1",
    "layers.#.mlp.down_proj": "model.layers.#.mlp.fc2",
}


def _gemma(values: Values, head: str, **fields: Any) -> dict[str, Any]:
    return decoder_fields(
        values, gated=True, scaled=("embedding",), biases=biases(values, attention_bias="qkv out"), **fields
    )


def _gemma2(values: Values, head: str, **fields: Any) -> dict[str, Any]:
    capped = tuple(part for part in ("attention", "logits") if values[f"{part}_cap"])
    return _gemma(values, head, post_norm=True, capped=capped, **fields)


def _phi(values: Values, head: str) -> dict[str, Any]:
    turned = rotated(values) if "rotary_share" in values else values["rotary_dim"]
    return decoder_fields(
        values, norm="layer", side_by_side=1, biases=(*EVERYWHERE, "head"), rotary_dim=turned, head_major=True
    )


def _caps(attention: float | None, logits: float | None) -> dict[str, Any]:
    return {
        "attention_cap": number("attn_logit_softcapping", attention, null=None),
        "logits_cap": number("final_logit_softcapping", logits, null=None),
    }


DECODERS = [
    ModelType(
        name="llama",
        config="LlamaConfig",
        blocks=("LlamaDecoderLayer",),
        heads=("LlamaForCausalLM",),
        keys={
            **sizes(4096, 32, 32, None, 11008, 32000, 2048),
            "head_dim": count("head_dim", None, EVEN_WIDTH),
            "attention_bias": flag("attention_bias", False),
            "mlp_bias": flag("mlp_bias", False),
            "tied": flag("tie_word_embeddings", False),
            "act": _ACT,
        },
        fields=lambda values, head: decoder_fields(
            values, gated=True, biases=biases(values, attention_bias="qkv out", mlp_bias="mlp")
        ),
        written=as_written("python"),
        names=lambda model: LLAMA,
    ),
    ModelType(
        name="mistral",
        config="MistralConfig",
        blocks=("MistralDecoderLayer",),
        heads=("MistralForCausalLM",),
        keys={
            **sizes(4096, 32, 32, 8, 14336, 32000, 131072, kv_null=NEEDED),
            "head_dim": count("head_dim", None, EVEN_WIDTH),
            "window": count("sliding_window", 4096, null=None),
            "tied": flag("tie_word_embeddings", False),
            "act": _ACT,
        },
        fields=lambda values, head: decoder_fields(values, gated=True),
        written=as_written("python"),
        names=lambda model: LLAMA,
    ),
    ModelType(
        name="qwen2",
        config="Qwen2Config",
        blocks=("Qwen2DecoderLayer",),
        heads=("Qwen2ForCausalLM",),
        keys={
            **sizes(4096, 32, 32, 32, 22016, 151936, 32768),
            "head_dim": count("head_dim", EVEN_WIDTH),
            "tied": flag("tie_word_embeddings", False),
            "act": _ACT,
        },
        fields=lambda values, head: decoder_fields(values, gated=True, biases=("qkv",)),
        written=as_written("python"),
        names=lambda model: LLAMA,
    ),
    ModelType(
        name="qwen3",
        config="Qwen3Config",
        blocks=("Qwen3DecoderLayer",),
        heads=("Qwen3ForCausalLM",),
        keys={
            **sizes(4096, 32, 32, 32, 22016, 151936, 32768),
            "head_dim": count("head_dim", 128),
            "attention_bias": flag("attention_bias", False),
            "tied": flag("tie_word_embeddings", False),
            "act": _ACT,
        },
        fields=lambda values, head: decoder_fields(
            values, gated=True, qk_norm=True, biases=biases(values, attention_bias="qkv out")
        ),
        written=as_written("python"),
        names=lambda model: LLAMA,
    ),
    ModelType(
        name="gemma",
        config="GemmaConfig",
        blocks=("GemmaDecoderLayer",),
        heads=("GemmaForCausalLM",),
        keys={
            **sizes(3072, 28, 16, 16, 24576, 256000, 8192, kv_null=NEEDED),
            "head_dim": count("head_dim", 256),
            "attention_bias": flag("attention_bias", False),
            "tied": flag("tie_word_embeddings", True),
            "act": text("hidden_act", "gelu_pytorch_tanh"),
        },
        fields=_gemma,
        written=as_written("chain"),
        names=lambda model: LLAMA,
    ),
    ModelType(
        name="gemma2",
        config="Gemma2Config",
        blocks=("Gemma2DecoderLayer",),
        heads=("Gemma2ForCausalLM",),
        keys={
            **sizes(2304, 26, 8, 4, 9216, 256000, 8192, kv_null=NEEDED),
            "head_dim": count("head_dim", 256),
            "attention_bias": flag("attention_bias", False),
            "window": count("sliding_window", 4096, null=None),
            "tied": flag("tie_word_embeddings", True),
            "act": text("hidden_activation", "gelu_pytorch_tanh"),
            **_caps(50.0, 30.0),
        },
        fields=_gemma2,
        written=as_written("chain"),
        names=lambda model: _GEMMA2,
    ),
    ModelType(
        name="gemma3_text",
        config="Gemma3TextConfig",
        blocks=("Gemma3DecoderLayer",),
        heads=("Gemma3ForCausalLM",),
        keys={
            **sizes(2304, 26, 8, 4, 9216, 262208, 131072, kv_null=NEEDED),
            "head_dim": count("head_dim", 256),
            "attention_bias": flag("attention_bias", False),
            "window": count("sliding_window", 4096, null=None),
            "tied": flag("tie_word_embeddings", True),
            "act": text("hidden_activation", "gelu_pytorch_tanh"),
            **_caps(None, None),
        },
        fields=lambda values, head: _gemma2(values, head, qk_norm=True),
        written=as_written("chain"),
        names=lambda model: _GEMMA2,
    ),
    ModelType(
        name="phi",
        config="PhiConfig",
        blocks=("PhiDecoderLayer",),
        heads=("PhiForCausalLM",),
        keys={
            **sizes(2048, 24, 32, None, 8192, 51200, 2048),
            "head_dim": count("head_dim", EVEN_WIDTH),
            "rotary_share": share(_SHARE, 0.5),
            "qk_norm": flag("qk_layernorm", False),
            "tied": flag("tie_word_embeddings", False),
            "act": text("hidden_act", "gelu_new"),
        },
        fields=_phi,
        written=as_written(),
        names=lambda model: _PHI,
    ),
    ModelType(
        # As the first files of microsoft/phi-1_5 and phi-2 had it, whose own configuration_phi.py took GPT's names.
        name="phi-msft",
        config="PhiConfig",
        blocks=("PhiDecoderLayer",),
        heads=("PhiForCausalLM",),
        keys={
            "hidden": count("n_embd", 1024),
            "layers": count("n_layer", 20, most=10**4),
            "heads": count("n_head", 16),
            "kv_heads": count("n_head_kv", None, AS_HEADS),
            "ffn": count("n_inner", None, FOUR_TIMES),
            "vocab": count("vocab_size", 50304),
            "context": count("n_positions", 2048),
            "rotary_dim": count("rotary_dim", 32),
            "tied": flag("tie_word_embeddings", False),
            "act": text("activation_function", "gelu_new"),
        },
        fields=_phi,
        written=as_written(),
        names=lambda model: _PHI,
    ),
    ModelType(
        name="phi3",
        config="Phi3Config",
        blocks=("Phi3DecoderLayer",),
        heads=("Phi3ForCausalLM",),
        keys={
            **sizes(3072, 32, 32, None, 8192, 32064, 4096),
            "head_dim": count("head_dim", EVEN_WIDTH),
            "rotary_share": share(_SHARE, 1.0),
            "window": count("sliding_window", None, null=None),
            "tied": flag("tie_word_embeddings", False),
            "act": _ACT,
        },
        fields=lambda values, head: decoder_fields(
            values, gated=True, fused_qkv=True, fused_gate_up=True, rotary_dim=rotated(values), head_major=True
        ),
        written=as_written("python"),
        names=lambda model: LLAMA,
    ),
]
