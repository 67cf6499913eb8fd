"""Small random config.json files of encoders, of encoders with a decoder, and of models that see."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hypothesis import strategies as st

__all__ = ["MAKERS"]

Draw = Callable[[st.SearchStrategy[Any]], Any]
Config = dict[str, Any]


def _sometimes(draw: Draw, **keys: list[Any]) -> Config:
    """Each key or not."""
    return {key: draw(st.sampled_from(values)) for key, values in keys.items() if draw(st.booleans())}


def _labels(draw: Draw) -> Config:
    """Labels by name, by number, or none; the names are keyed by their place."""
    names = {"id2label": {str(place): f"LABEL_{place}" for place in range(draw(st.integers(2, 5)))}}
    return draw(st.sampled_from([{}, names, {"num_labels": 3}, {"id2label": None}]))


def _berts(brand: str, *others: str) -> Callable[[Draw], Config]:
    endings = ("ForMaskedLM", "ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering", "Model")

    def made(draw: Draw) -> Config:
        heads = draw(st.sampled_from([1, 2, 3]))
        return {
            "architectures": [brand + draw(st.sampled_from([*endings, *others]))],
            "hidden_size": heads * draw(st.sampled_from([4, 8])), "num_hidden_layers": draw(st.integers(1, 3)),
            "num_attention_heads": heads, "intermediate_size": draw(st.integers(1, 40)),
            "vocab_size": draw(st.integers(3, 60)), "max_position_embeddings": draw(st.sampled_from([12, 16, 33])),
            **_labels(draw),
            **_sometimes(draw, hidden_act=["gelu", "relu", "gelu_new"], hidden_dropout_prob=[0.0, 0.1],
                         tie_word_embeddings=[True]),
        }  # fmt: skip

    return made


def _bert(draw: Draw) -> Config:
    return {
        **_berts("Bert", "ForPreTraining")(draw),
        **_sometimes(draw, type_vocab_size=[1, 3], pad_token_id=[None, 0]),
    }


def _roberta(draw: Draw) -> Config:
    return {**_berts("Roberta")(draw), **_sometimes(draw, type_vocab_size=[1, 3], pad_token_id=[0, 2])}


def _electra(draw: Draw) -> Config:
    config = _berts("Electra", "ForPreTraining")(draw)
    return {**config, "embedding_size": draw(st.sampled_from([5, config["hidden_size"]]))}


def _distilbert(draw: Draw) -> Config:
    config = _berts("DistilBert")(draw)
    if config["architectures"] == ["DistilBertForQuestionAnswering"]:  # which takes no other number of labels
        config = {key: value for key, value in config.items() if key not in ("id2label", "num_labels")}
    spelled = {"hidden_size": "dim", "num_hidden_layers": "n_layers", "num_attention_heads": "n_heads"}
    renamed = {"intermediate_size": "hidden_dim", "hidden_act": "activation", "hidden_dropout_prob": "dropout"}
    if draw(st.booleans()):
        renamed |= spelled
    return {renamed.get(key, key): value for key, value in config.items()}


def _t5(draw: Draw) -> Config:
    forms = ["relu", "gated-gelu", "gated-silu"]
    return {
        "d_model": draw(st.sampled_from([8, 12])), "d_kv": draw(st.sampled_from([3, 4])), "d_ff": draw(st.integers(1, 40)),
        "num_layers": draw(st.integers(1, 3)), "num_heads": draw(st.sampled_from([1, 2, 3])),
        "vocab_size": draw(st.integers(3, 60)),
        **_sometimes(draw, num_decoder_layers=[None, 1, 2], relative_attention_num_buckets=[4, 32], feed_forward_proj=forms,
                     tie_word_embeddings=[True], dropout_rate=[0.0, 0.2]),
    }  # fmt: skip


def _sides(draw: Draw) -> Config:
    heads = draw(st.sampled_from([1, 2]))
    return {
        "d_model": heads * draw(st.sampled_from([4, 8])), "encoder_layers": draw(st.integers(1, 2)),
        "decoder_layers": draw(st.integers(1, 2)), "encoder_attention_heads": heads, "decoder_attention_heads": 2 * heads,
        "encoder_ffn_dim": draw(st.integers(1, 40)), "decoder_ffn_dim": draw(st.integers(1, 40)),
        "vocab_size": draw(st.integers(8, 60)), "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
        "decoder_start_token_id": 1,
        **_sometimes(draw, activation_function=["gelu", "relu"], scale_embedding=[True, False], tie_word_embeddings=[True],
                     dropout=[0.0, 0.1]),
    }  # fmt: skip


def _whisper(draw: Draw) -> Config:
    lengths = {
        "max_source_positions": draw(st.sampled_from([8, 20])),
        "max_target_positions": draw(st.sampled_from([8, 16])),
    }
    return {**_sides(draw), **lengths, "num_mel_bins": draw(st.sampled_from([4, 80])), "begin_suppress_tokens": [1]}


def _barts(brand: str) -> Callable[[Draw], Config]:
    def made(draw: Draw) -> Config:
        which = draw(st.sampled_from([f"{brand}ForConditionalGeneration", f"{brand}ForCausalLM"]))
        config = {**_sides(draw), "max_position_embeddings": draw(st.sampled_from([8, 16])), "forced_eos_token_id": 2}
        return {**config, "architectures": [which]}

    return made


def _seeing(draw: Draw) -> Config:
    heads, patch = draw(st.sampled_from([1, 2])), draw(st.sampled_from([2, 4]))
    return {
        "hidden_size": heads * draw(st.sampled_from([4, 8])), "num_hidden_layers": draw(st.integers(1, 3)),
        "num_attention_heads": heads, "intermediate_size": draw(st.integers(1, 40)), "patch_size": patch,
        "image_size": patch * draw(st.integers(1, 2)), **_sometimes(draw, num_channels=[1, 3]),
    }  # fmt: skip


def _vit(draw: Draw) -> Config:
    architecture = draw(st.sampled_from(["ViTForImageClassification", "ViTModel"]))
    keys = _sometimes(draw, hidden_act=["gelu", "relu"], qkv_bias=[True], hidden_dropout_prob=[0.1])
    return {**_seeing(draw), **_labels(draw), **keys, "architectures": [architecture]}


def _clip(draw: Draw) -> Config:
    return {**_seeing(draw), **_sometimes(draw, hidden_act=["quick_gelu", "gelu"])}


def _llava(draw: Draw) -> Config:
    kv_heads = draw(st.sampled_from([1, 2]))
    heads = kv_heads * draw(st.sampled_from([1, 2]))
    text = {
        "model_type": draw(st.sampled_from(["llama", "mistral", "qwen2"])), "hidden_size": heads * 4, "num_hidden_layers": 2,
        "num_attention_heads": heads, "num_key_value_heads": kv_heads, "intermediate_size": draw(st.integers(1, 40)),
        "vocab_size": draw(st.integers(3, 60)), "max_position_embeddings": 33, "pad_token_id": 0, "bos_token_id": 1,
        "eos_token_id": 2, **_sometimes(draw, tie_word_embeddings=[True, False]),
    }  # fmt: skip
    if text["model_type"] == "llama" and draw(st.booleans()):
        del text["model_type"]
    vision = {**_clip(draw), "model_type": "clip_vision_model", "num_hidden_layers": draw(st.integers(2, 3))}
    keys = _sometimes(
        draw,
        vision_feature_layer=[-1, -2, 2],
        vision_feature_select_strategy=["default", "full"],
        tie_word_embeddings=[True],
    )
    return {"text_config": text, "vision_config": vision, "image_token_index": 2, **keys}


MAKERS: dict[str, Callable[[Draw], Config]] = {
    "bert": _bert, "roberta": _roberta, "distilbert": _distilbert, "electra": _electra, "t5": _t5, "mt5": _t5,
    "whisper": _whisper, "mbart": _barts("MBart"), "bart": _barts("Bart"), "vit": _vit, "clip_vision_model": _clip, "llava": _llava,
}  # fmt: skip
"""How a config of each ``model_type`` is drawn."""
