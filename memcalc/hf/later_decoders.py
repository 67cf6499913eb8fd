"""Decoders after Llama that differ from it in more than a bias, one row a ``model_type``: Granite, SmolLM 3, StarCoder 2, MPT."""

from __future__ import annotations

from typing import Any

from memcalc.errors import PlanError
from memcalc.hf.common import EVEN_WIDTH, LLAMA, as_written, biases, decoder_fields, gpt_fields, gpt_sizes, sizes
from memcalc.hf.keys import NEEDED, Values, count, flag, text
from memcalc.hf.record import ModelType

__all__ = ["LATER_DECODERS"]

_STARCODER2 = {
    **LLAMA,
    "layers.#.mlp.up_proj": "model.layers.#.mlp.c_fc",
    "layers.#.mlp.down_proj": "model.layers.#.mlp.c_proj",
}
_MPT = {
    "embed_tokens": "transformer.wte",
    "norm": "transformer.norm_f",
    "lm_head": "lm_head",
    "layers.#.input_layernorm": "transformer.blocks.#.norm_1",
    "layers.#.post_attention_layernorm": "transformer.blocks.#.norm_2",
    "layers.#.self_attn.qkv_proj": "transformer.blocks.#.attn.Wqkv",
    "layers.#.self_attn.o_proj": "transformer.blocks.#.attn.out_proj",
    "layers.#.mlp.up_proj": "transformer.blocks.#.ffn.up_proj",
    "layers.#.mlp.down_proj": "transformer.blocks.#.ffn.down_proj",
}


def _mpt(values: Values, head: str) -> dict[str, Any]:
    """An MLP is 4 times as wide, whatever expansion_ratio says (MptMLP)."""
    if not values["alibi"]:
        raise PlanError("attn_config.alibi is false; transformers' MPT has no other positions")
    return gpt_fields(
        {**values, "act": "gelu"},
        ffn=4 * values["hidden"],
        positions="alibi",
        fused_qkv=True,
        norm="layer",
    )


LATER_DECODERS = [
    ModelType(
        name="granite",
        config="GraniteConfig",
        blocks=("GraniteDecoderLayer",),
        heads=("GraniteForCausalLM",),
        keys={
            **sizes(4096, 32, 32, None, 11008, 32000, 2048),
            "head_dim": count("head_dim", EVEN_WIDTH),
            "attention_bias": flag("attention_bias", False),
            "mlp_bias": flag("mlp_bias", False),
            "tied": flag("tie_word_embeddings", False),
            "act": text("hidden_act", "silu"),
        },
        # Its multipliers are applied whatever their numbers are, 1 among them.
        fields=lambda values, head: decoder_fields(
            values,
            gated=True,
            scaled=("embedding", "residual", "logits"),
            biases=biases(values, attention_bias="qkv out", mlp_bias="mlp"),
        ),
        written=as_written("python"),
        names=lambda model: LLAMA,
    ),
    ModelType(
        name="smollm3",
        config="SmolLM3Config",
        blocks=("SmolLM3DecoderLayer",),
        heads=("SmolLM3ForCausalLM",),
        keys={
            **sizes(2048, 36, 16, 4, 11008, 128256, 32768),
            "head_dim": count("head_dim", EVEN_WIDTH),
            "attention_bias": flag("attention_bias", False),
            "mlp_bias": flag("mlp_bias", False),
            "tied": flag("tie_word_embeddings", True),
            "act": text("hidden_act", "silu"),
        },
        fields=lambda values, head: decoder_fields(
            values, gated=True, biases=biases(values, attention_bias="qkv out", mlp_bias="mlp")
        ),
        written=as_written("python"),
        names=lambda model: LLAMA,
        notes=lambda values: [
            "layers without rotary positions (no_rope_layers) are counted as those with; what is kept is the same"
        ],
    ),
    ModelType(
        name="starcoder2",
        config="Starcoder2Config",
        blocks=("Starcoder2DecoderLayer",),
        heads=("Starcoder2ForCausalLM",),
        keys={
            **sizes(3072, 30, 24, 2, 12288, 49152, 4096, kv_null=NEEDED),
            "head_dim": count("head_dim", EVEN_WIDTH),
            "window": count("sliding_window", None, null=None),
            "bias": flag("use_bias", True),
            "tied": flag("tie_word_embeddings", True),
            "act": text("hidden_act", "gelu_pytorch_tanh"),
        },
        fields=lambda values, head: decoder_fields(
            values, norm="layer", biases=(*biases(values, bias="qkv out mlp"), "norm")
        ),
        written=as_written(),
        names=lambda model: _STARCODER2,
    ),
    ModelType(
        name="mpt",
        config="MptConfig",
        blocks=("MptBlock",),
        heads=("MptForCausalLM",),
        keys={
            **gpt_sizes(
                "d_model hidden_size, n_layers num_hidden_layers, n_heads num_attention_heads, max_seq_len",
                2048,
                24,
                16,
                50368,
                2048,
            ),
            "alibi": flag("attn_config.alibi", True),
            "tied": flag("tie_word_embeddings", True),
        },
        fields=_mpt,
        written=as_written(),
        names=lambda model: _MPT,
    ),
]
