"""GPT-2 and decoders of its time, one row a ``model_type``: GPT-J, GPT-Neo, GPT-NeoX, StarCoder, Falcon, OPT, BLOOM, MPT."""

from __future__ import annotations

from typing import Any

from memcalc.errors import PlanError
from memcalc.hf.common import (
    EVERYWHERE,
    FOUR_TIMES,
    as_written,
    gpt_fields,
    gpt_sizes,
)  # fmt: skip
from memcalc.hf.keys import Values, chance, count, flag, text
from memcalc.hf.record import ModelType

__all__ = ["GPTS"]

_TIED = {"tied": flag("tie_word_embeddings", True)}
_OF_GPT2 = (
    "n_embd hidden_size, n_layer num_hidden_layers, n_head num_attention_heads, n_positions max_position_embeddings"
)
_GELU_NEW = {"act": text("activation_function", "gelu_new")}
_NORMED = {"norm": "layer", "biases": EVERYWHERE}

_ENDS = {
    "embed_tokens": "transformer.wte",
    "embed_positions": "transformer.wpe",
    "norm": "transformer.ln_f",
    "lm_head": "lm_head",
}
_GPT_J = {
    **_ENDS,
    "layers.#.input_layernorm": "transformer.h.#.ln_1",
    **{f"layers.#.self_attn.{part}_proj": f"transformer.h.#.attn.{part}_proj" for part in "qkv"},
    "layers.#.self_attn.o_proj": "transformer.h.#.attn.out_proj",
    "layers.#.mlp.up_proj": "transformer.h.#.mlp.fc_in",
    "layers.#.mlp.down_proj": "transformer.h.#.mlp.fc_out",
}
_STARCODER = {
    **_ENDS,
    "layers.#.input_layernorm": "transformer.h.#.ln_1",
    "layers.#.post_attention_layernorm": "transformer.h.#.ln_2",
    "layers.#.self_attn.qkv_proj": "transformer.h.#.attn.c_attn",
    "layers.#.self_attn.o_proj": "transformer.h.#.attn.c_proj",
    "layers.#.mlp.up_proj": "transformer.h.#.mlp.c_fc",
    "layers.#.mlp.down_proj": "transformer.h.#.mlp.c_proj",
}
_GPT_NEO = {
    **_STARCODER,
    **{f"layers.#.self_attn.{part}_proj": f"transformer.h.#.attn.attention.{part}_proj" for part in "qkv"},
    "layers.#.self_attn.o_proj": "transformer.h.#.attn.attention.out_proj",
}
# The family gpt2 has the published names; untied, a GPT-2 is of the family decoder. transformers' Conv1D holds matrices
# transposed.
_GPT2 = {
    **{ours: f"{theirs}.T" if "_proj" in ours else theirs for ours, theirs in _STARCODER.items()},
    **{name: f"transformer.{name}" for name in ("wte", "wpe", "ln_f", "h.#.ln_1", "h.#.ln_2")},
    **{f"h.#.{name}": f"transformer.h.#.{name}.T" for name in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")},
}


def _gpt2(values: Values, head: str) -> dict[str, Any]:
    if values["cross_attention"]:
        raise PlanError("add_cross_attention is true; a GPT-2 that reads an encoder is not known")
    fields = gpt_fields(values, positions="learned", fused_qkv=True, **_NORMED)
    if not values["tied"] or fields["activation"] != "gelu":
        return fields
    plain = ("norm", "biases", "positions", "fused_qkv", "activation")  # which all GPT-2 have
    return {field: value for field, value in fields.items() if field not in plain} | {"family": "gpt2"}


GPTS = [
    ModelType(
        name="gpt2",
        config="GPT2Config",
        blocks=("GPT2Block",),
        heads=("GPT2LMHeadModel",),
        keys={
            **gpt_sizes(_OF_GPT2, 768, 12, 12, 50257, 1024),
            "ffn": count("n_inner", None, FOUR_TIMES),
            "cross_attention": flag("add_cross_attention", False),
            "dropout": chance("resid_pdrop", 0.1),
            "dropout_embedding": chance("embd_pdrop", 0.1),
            "dropout_attention": chance("attn_pdrop", 0.1),
            **_TIED,
            **_GELU_NEW,
        },
        fields=_gpt2,
        written=as_written(softmax=""),
        names=lambda model: _GPT2,
    ),
    ModelType(
        name="gptj",
        config="GPTJConfig",
        blocks=("GPTJBlock",),
        heads=("GPTJForCausalLM",),
        keys={
            **gpt_sizes(_OF_GPT2, 4096, 28, 16, 50400, 2048),
            "ffn": count("n_inner", None, FOUR_TIMES),
            "rotary_dim": count("rotary_dim", 64),
            "tied": flag("tie_word_embeddings", False),
            **_GELU_NEW,
        },
        fields=lambda values, head: gpt_fields(
            values, norm="layer", side_by_side=1, biases=("mlp", "head", "norm"), wide_scores=True
        ),
        written=as_written(),
        names=lambda model: _GPT_J,
    ),
    ModelType(
        name="gpt_neo",
        config="GPTNeoConfig",
        blocks=("GPTNeoBlock",),
        heads=("GPTNeoForCausalLM",),
        keys={
            **gpt_sizes(
                "hidden_size, num_layers num_hidden_layers, num_heads num_attention_heads, max_position_embeddings",
                2048,
                24,
                16,
                50257,
                2048,
            ),
            "ffn": count("intermediate_size", None, FOUR_TIMES),
            **_TIED,
            **_GELU_NEW,
        },
        fields=lambda values, head: gpt_fields(
            values, norm="layer", positions="learned", biases=("out", "mlp", "norm"), wide_scores=True
        ),
        written=as_written(),
        names=lambda model: _GPT_NEO,
    ),
    ModelType(
        name="gpt_bigcode",
        config="GPTBigCodeConfig",
        blocks=("GPTBigCodeBlock",),
        heads=("GPTBigCodeForCausalLM",),
        keys={
            **gpt_sizes(_OF_GPT2, 768, 12, 12, 50257, 1024),
            "ffn": count("n_inner", None, FOUR_TIMES),
            "multi_query": flag("multi_query", True),
            "dropout": chance("resid_pdrop", 0.1),
            "dropout_embedding": chance("embd_pdrop", 0.1),
            "dropout_attention": chance("attn_pdrop", 0.1),
            **_TIED,
            "act": text("activation_function", "gelu_pytorch_tanh"),
        },
        fields=lambda values, head: gpt_fields(
            values,
            kv_heads=1 if values["multi_query"] else values["heads"],
            positions="learned",
            fused_qkv=True,
            **_NORMED,
        ),
        written=as_written(),
        names=lambda model: _STARCODER,
    ),
]
