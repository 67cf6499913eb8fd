"""Encoders with a decoder, one row a ``model_type``: T5, mT5, Whisper, mBART, BART."""

from __future__ import annotations

from typing import Any

from memcalc.errors import PlanError
from memcalc.hf.common import activation, activation_notes
from memcalc.hf.keys import Derived, Key, Values, chance, count, flag, text
from memcalc.hf.names import Names
from memcalc.hf.record import ModelType
from memcalc.spec import Model

__all__ = ["ENCODER_DECODERS"]

_AS_ENCODER = Derived(said="num_layers", of=lambda values: values["layers"])
_T5_ATTENTION = ("q", "k", "v", "o")


def _t5_keys(vocab: int, ffn: int, layers: int, heads: int, act: str) -> dict[str, Key]:
    return {
        "vocab": count("vocab_size", vocab),
        "hidden": count("d_model hidden_size", 512),
        "head_dim": count("d_kv head_dim", 64),
        "ffn": count("d_ff", ffn),
        "layers": count("num_layers num_hidden_layers", layers, most=10**4),
        "decoder_layers": count("num_decoder_layers", None, _AS_ENCODER, most=10**4),
        "heads": count("num_heads num_attention_heads", heads),
        "buckets": count("relative_attention_num_buckets", 32),
        "dropout": chance("dropout_rate", 0.1),
        "act": text("feed_forward_proj", act),
        "tied": flag("tie_word_embeddings", True),
    }


T5_CONTEXT = 512
"""T5 has no table of positions; it was trained on this many tokens (Raffel et al. 2020, section 3.1.1)."""


def _t5(values: Values, head: str) -> dict[str, Any]:
    *gate, act = values["act"].split("-")
    if gate not in ([], ["gated"]):
        raise PlanError(f"feed_forward_proj {values['act']} is not known; write relu or gated-gelu")
    if not gate and activation(act) != "relu":
        raise PlanError(f"feed_forward_proj {values['act']}: without a gate only relu is known")
    numbers = ("vocab", "hidden", "head_dim", "ffn", "layers", "decoder_layers", "heads", "buckets", "tied")
    found = {name: values[name] for name in numbers}
    if found["heads"] * found["head_dim"] == found["hidden"]:
        found["head_dim"] = 0
    found |= {"family": "t5", "kv_heads": values["heads"], "gated": bool(gate), "context": T5_CONTEXT}
    return {**found, "activation": "silu"} if gate and activation(act) == "silu" else found


def _t5_notes(values: Values) -> list[str]:
    notes = [f"T5 has no longest sequence; taken are {T5_CONTEXT} tokens, those it was trained on"]
    if not values["tied"]:
        notes.append(
            "tie_word_embeddings is false: the head is a matrix of its own, as in the published weights; transformers 5 "
            "builds one table for both and parts them when the weights are loaded"
        )
    notes.append("attention is written out, as transformers did up to 5.0; scaled_dot_product_attention keeps less")
    return notes


def _t5_written(values: Values) -> dict[str, str]:
    """T5LayerNorm is an RMSNorm in Python."""
    return {"norm": "python"} | ({"gelu": "python"} if values["act"] == "gated-gelu" else {})


def _t5_names(model: Model) -> Names:
    """Encoder and decoder blocks stand in one list here; the number that is told apart is said in full."""
    inner = ("wi_0", "wi_1", "wo") if model.gated else ("wi", "wo")
    names = {
        "shared": "shared",
        "lm_head": "lm_head",
        **{
            f"{side}_bias": f"{side}.block.0.layer.0.SelfAttention.relative_attention_bias"
            for side in ("encoder", "decoder")
        },
        **{f"{side}_norm": f"{side}.final_layer_norm" for side in ("encoder", "decoder")},
    }
    for layer in range(model.layers + model.decoder_layers):
        decodes = layer >= model.layers
        ours = f"blocks.{layer}"
        theirs = f"{'decoder' if decodes else 'encoder'}.block.{layer - model.layers * decodes}.layer"
        for part, index, name in (
            ("attention", 0, "SelfAttention"),
            *([("cross", 1, "EncDecAttention")] if decodes else []),
        ):
            names |= {f"{ours}.{part}.{each}": f"{theirs}.{index}.{name}.{each}" for each in _T5_ATTENTION}
            names[f"{ours}.{part}_norm"] = f"{theirs}.{index}.layer_norm"
        last = f"{theirs}.{1 + decodes}"
        names |= {f"{ours}.mlp.{each}": f"{last}.DenseReluDense.{each}" for each in inner}
        names[f"{ours}.mlp_norm"] = f"{last}.layer_norm"
    return names


def _side_keys(hidden: int, layers: int, heads: int, ffn: int, vocab: int) -> dict[str, Key]:
    """Sizes under the names that Whisper and mBART share."""
    return {
        "vocab": count("vocab_size", vocab),
        "hidden": count("d_model hidden_size", hidden),
        "layers": count("encoder_layers num_hidden_layers", layers, most=10**4),
        "decoder_layers": count("decoder_layers", layers, most=10**4),
        "heads": count("encoder_attention_heads num_attention_heads", heads),
        "decoder_heads": count("decoder_attention_heads", heads),
        "ffn": count("encoder_ffn_dim", ffn),
        "decoder_ffn": count("decoder_ffn_dim", ffn),
        "act": text("activation_function", "gelu"),
        "scale": flag("scale_embedding", False),
        "tied": flag("tie_word_embeddings", True),
    }


def _sides(values: Values, family: str, **fields: Any) -> dict[str, Any]:
    numbers = ("vocab", "hidden", "layers", "decoder_layers", "heads", "decoder_heads", "ffn", "decoder_ffn", "tied")
    found = {name: values[name] for name in numbers} | {"family": family} | fields
    if activation(values["act"]) == "relu":
        found["activation"] = "relu"
    return {**found, "scaled": ("embedding",)} if values["scale"] else found


def _whisper(values: Values, head: str) -> dict[str, Any]:
    # Its decoder never multiplies the embedding by the scale that the encoder's class takes of the file.
    return _sides(
        {**values, "scale": False},
        "whisper",
        context=values["context"],
        channels=values["channels"],
        encoder_tokens=values["sources"],
    )


def _mbart(values: Values, head: str) -> dict[str, Any]:
    # modeling_mbart.py, MBartLearnedPositionalEmbedding: the table has two rows before the first position.
    fields = _sides(values, "mbart", context=values["context"] + 2, position_offset=2, embedding_norm=True)
    return {**fields, "layers": 0} if head.endswith("ForCausalLM") else fields


def _bart(values: Values, head: str) -> dict[str, Any]:
    """mBART with its norms after what is added, and none at the end."""
    return {**_mbart(values, head), "norm_after": True}


def _side_names(model: Model) -> Names:
    names = {"proj_out": "proj_out" if model.family == "whisper" else "lm_head"}
    names["shared"] = "model.decoder.embed_tokens" if model.family == "whisper" or not model.layers else "model.shared"
    for side in ("encoder", "decoder"):
        whole = ("conv1", "conv2", "embed_positions", "layernorm_embedding", "layer_norm")
        names |= {f"{side}.{part}": f"model.{side}.{part}" for part in whole}
        for attended in ("self_attn", "encoder_attn"):
            for part in ("k_proj", "v_proj", "q_proj", "out_proj"):
                names[f"{side}.layers.#.{attended}.{part}"] = f"model.{side}.layers.#.{attended}.{part}"
            names[f"{side}.layers.#.{attended}_layer_norm"] = f"model.{side}.layers.#.{attended}_layer_norm"
        for part in ("fc1", "fc2", "final_layer_norm"):
            names[f"{side}.layers.#.{part}"] = f"model.{side}.layers.#.{part}"
    return names


def _side_notes(values: Values) -> list[str]:
    return activation_notes(values)


ENCODER_DECODERS = [
    ModelType(
        name="t5",
        config="T5Config",
        blocks=("T5Block",),
        heads=("T5ForConditionalGeneration",),
        keys=_t5_keys(32128, 2048, 6, 8, "relu"),
        fields=_t5,
        names=_t5_names,
        written=_t5_written,
        notes=_t5_notes,
    ),
    ModelType(
        name="mt5",
        config="MT5Config",
        blocks=("MT5Block",),
        heads=("MT5ForConditionalGeneration",),
        keys=_t5_keys(250112, 1024, 8, 6, "gated-gelu"),
        fields=_t5,
        names=_t5_names,
        written=_t5_written,
        notes=_t5_notes,
    ),
    ModelType(
        name="whisper",
        config="WhisperConfig",
        blocks=("WhisperEncoderLayer", "WhisperDecoderLayer"),
        heads=("WhisperForConditionalGeneration",),
        keys={
            **_side_keys(384, 4, 6, 1536, 51865),
            "channels": count("num_mel_bins", 80, most=10**4),
            "sources": count("max_source_positions", 1500),
            "context": count("max_target_positions", 448),
            "dropout": chance("dropout", 0.0),
        },
        fields=_whisper,
        names=_side_names,
        notes=_side_notes,
    ),
    ModelType(
        name="mbart",
        config="MBartConfig",
        blocks=("MBartEncoderLayer", "MBartDecoderLayer"),
        heads=("MBartForConditionalGeneration", "MBartForCausalLM"),
        keys={
            **_side_keys(1024, 12, 16, 4096, 50265),
            "context": count("max_position_embeddings", 1024),
            "dropout": chance("dropout", 0.1),
        },
        fields=_mbart,
        names=_side_names,
        notes=_side_notes,
    ),
    ModelType(
        name="bart",
        config="BartConfig",
        blocks=("BartEncoderLayer", "BartDecoderLayer"),
        heads=("BartForConditionalGeneration", "BartForCausalLM"),
        keys={
            **_side_keys(1024, 12, 16, 4096, 50265),
            "context": count("max_position_embeddings", 1024),
            "dropout": chance("dropout", 0.1),
        },
        fields=_bart,
        names=_side_names,
        notes=_side_notes,
    ),
]
