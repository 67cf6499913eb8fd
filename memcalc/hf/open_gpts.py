"""Decoders with blocks like GPT's that others published, one row a ``model_type``: GPT-NeoX, Falcon, OPT, BLOOM."""

from __future__ import annotations

from typing import Any

from memcalc.errors import PlanError
from memcalc.hf.common import (
    AS_HEADS,
    EVERYWHERE,
    FOUR_TIMES,
    as_written,
    biases,
    decoder_fields,
    gpt_fields,
    gpt_sizes,
    rotated,
)  # fmt: skip
from memcalc.hf.keys import Derived, Values, chance, count, flag, share, text
from memcalc.hf.record import ModelType

__all__ = ["OPEN_GPTS"]

_OF_LLAMA = "hidden_size, num_hidden_layers, num_attention_heads, max_position_embeddings"
_OF_BLOOM = "hidden_size n_embed, n_layer num_hidden_layers, n_head num_attention_heads, seq_length"
_TIED = {"tied": flag("tie_word_embeddings", True)}


def _megatron(block: str, attention: str) -> dict[str, str]:
    """Names of Megatron's blocks, as GPT-NeoX, BLOOM and Falcon have them."""
    return {
        "layers.#.input_layernorm": f"{block}.#.input_layernorm",
        "layers.#.post_attention_layernorm": f"{block}.#.post_attention_layernorm",
        "layers.#.self_attn.qkv_proj": f"{block}.#.{attention}.query_key_value",
        "layers.#.self_attn.o_proj": f"{block}.#.{attention}.dense",
        "layers.#.mlp.up_proj": f"{block}.#.mlp.dense_h_to_4h",
        "layers.#.mlp.down_proj": f"{block}.#.mlp.dense_4h_to_h",
    }


_NEOX = {
    "embed_tokens": "gpt_neox.embed_in",
    **_megatron("gpt_neox.layers", "attention"),
    "norm": "gpt_neox.final_layer_norm",
    "lm_head": "lm_head",
}
_BLOOM = {
    "embed_tokens": "transformer.word_embeddings",
    "embed_norm": "transformer.word_embeddings_layernorm",
    **_megatron("transformer.h", "self_attention"),
    "norm": "transformer.ln_f",
    "lm_head": "lm_head",
}
_FALCON_40B = {
    **_BLOOM,
    "layers.#.input_layernorm": "transformer.h.#.ln_attn",
    "layers.#.post_attention_layernorm": "transformer.h.#.ln_mlp",
}
_OPT = {
    "embed_tokens": "model.decoder.embed_tokens",
    "embed_positions": "model.decoder.embed_positions",
    "project_in": "model.decoder.project_in",
    "project_out": "model.decoder.project_out",
    "layers.#.input_layernorm": "model.decoder.layers.#.self_attn_layer_norm",
    **{f"layers.#.self_attn.{part}_proj": f"model.decoder.layers.#.self_attn.{part}_proj" for part in "qkv"},
    "layers.#.self_attn.o_proj": "model.decoder.layers.#.self_attn.out_proj",
    "layers.#.post_attention_layernorm": "model.decoder.layers.#.final_layer_norm",
    "layers.#.mlp.up_proj": "model.decoder.layers.#.fc1",
    "layers.#.mlp.down_proj": "model.decoder.layers.#.fc2",
    "norm": "model.decoder.final_layer_norm",
    "lm_head": "lm_head",
}


def _falcon(values: Values, head: str) -> dict[str, Any]:
    new, parallel = values["new"], values["parallel"]
    norms = (values["norms"] or (2 if new else 1)) if parallel else 0
    if norms > 2 or (norms == 2 and not new) or (new and not parallel):
        raise PlanError(
            f"num_ln_in_parallel_attn {values['norms']}, parallel_attn {parallel} and new_decoder_architecture {new} "
            "make no Falcon that transformers runs"
        )
    kv_heads = values["kv_heads"] if new else 1 if values["multi_query"] else values["heads"]
    return decoder_fields(
        values, kv_heads=kv_heads, norm="layer", fused_qkv=True, side_by_side=norms,
        positions="alibi" if values["alibi"] else "rotary", biases=(*biases(values, bias="qkv out mlp"), "norm"),
    )  # fmt: skip


def _attends(values: Values) -> list[str]:
    """transformers/models/falcon/modeling_falcon.py, FalconAttention: a mask is always given, and one key/value head alone
    is fewer than queries have, so that scaled_dot_product_attention takes neither flash nor, with one, any fused kernel."""
    if values["alibi"]:
        return []
    one = not values["new"] and values["multi_query"] and values["heads"] > 1
    which = "math" if one else "efficient"
    return [f"transformers' own Falcon attends by the {which} kernel; --attention {which} counts what that keeps"]


def _opt(values: Values, head: str) -> dict[str, Any]:
    if not values["affine"]:
        raise PlanError("layer_norm_elementwise_affine is false; LayerNorm without weights is not known")
    if values["no_last_norm"] and not values["norm_before"]:
        raise PlanError("_remove_final_layer_norm is true where there is no last norm")
    width = values["embedding"]
    return gpt_fields(
        values, context=values["context"] + 2, positions="learned", norm="layer", norm_after=not values["norm_before"],
        embedding_dim=0 if width == values["hidden"] else width, biases=(*biases(values, bias="qkv out mlp"), "norm"),
    )  # fmt: skip


OPEN_GPTS = [
    ModelType(
        name="gpt_neox",
        config="GPTNeoXConfig",
        blocks=("GPTNeoXLayer",),
        heads=("GPTNeoXForCausalLM",),
        keys={
            **gpt_sizes(_OF_LLAMA, 6144, 44, 64, 50432, 2048),
            "ffn": count("intermediate_size", 24576),
            "rotary_share": share(
                "rope_parameters.partial_rotary_factor rope_scaling.partial_rotary_factor rotary_pct", 0.25
            ),
            "parallel": flag("use_parallel_residual", True),
            "bias": flag("attention_bias", True),
            "tied": flag("tie_word_embeddings", False),
            "act": text("hidden_act", "gelu"),
        },
        fields=lambda values, head: gpt_fields(
            values,
            norm="layer",
            fused_qkv=True,
            side_by_side=2 if values["parallel"] else 0,
            rotary_dim=rotated(values),
            head_major=True,
            biases=(*biases(values, bias="qkv out"), "mlp", "norm"),
        ),
        written=as_written(),
        names=lambda model: _NEOX,
    ),
    ModelType(
        name="falcon",
        config="FalconConfig",
        blocks=("FalconDecoderLayer",),
        heads=("FalconForCausalLM",),
        keys={
            **gpt_sizes(_OF_LLAMA, 4544, 32, 71, 65024, 2048),
            "kv_heads": count("num_kv_heads", None, AS_HEADS),
            "ffn": count("ffn_hidden_size", None, FOUR_TIMES),
            "alibi": flag("alibi", False, null=False),
            "new": flag("new_decoder_architecture", False, null=False),
            "multi_query": flag("multi_query", True, null=False),
            "parallel": flag("parallel_attn", True, null=False),
            "norms": count("num_ln_in_parallel_attn", None, null=None),
            "bias": flag("bias", False, null=False),
            **_TIED,
            "act": text("activation", "gelu"),
        },
        fields=_falcon,
        written=as_written(softmax=""),
        names=lambda model: _FALCON_40B if model.side_by_side == 2 else _BLOOM,
        notes=_attends,
    ),
    ModelType(
        name="opt",
        config="OPTConfig",
        blocks=("OPTDecoderLayer",),
        heads=("OPTForCausalLM",),
        keys={
            **gpt_sizes(_OF_LLAMA, 768, 12, 12, 50272, 2048),
            "ffn": count("ffn_dim", 3072),
            "embedding": count(
                "word_embed_proj_dim", None, Derived(said="hidden_size", of=lambda values: values["hidden"])
            ),
            "norm_before": flag("do_layer_norm_before", True),
            "no_last_norm": flag("_remove_final_layer_norm", False),
            "affine": flag("layer_norm_elementwise_affine", True),
            "bias": flag("enable_bias", True),
            "dropout": chance("dropout", 0.1),
            **_TIED,
            "act": text("activation_function", "relu"),
        },
        fields=_opt,
        written=as_written(),
        names=lambda model: _OPT,
    ),
    ModelType(
        name="bloom",
        config="BloomConfig",
        blocks=("BloomBlock",),
        heads=("BloomForCausalLM",),
        # The class has no longest sequence; files say what theirs was trained on, BLOOM's own 2048.
        keys={**gpt_sizes(_OF_BLOOM, 64, 2, 8, 250880, 2048), **_TIED},
        fields=lambda values, head: gpt_fields(
            {**values, "act": "gelu"},
            ffn=4 * values["hidden"],
            positions="alibi",
            fused_qkv=True,
            embedding_norm=True,
            norm="layer",
            biases=EVERYWHERE,
        ),
        written=as_written(),
        names=lambda model: _BLOOM,
    ),
]
