"""Models that see: ViT, CLIP's vision tower, and LLaVA, which has a text model beside one."""

from __future__ import annotations

import dataclasses
from typing import Any

from memcalc.errors import PlanError
from memcalc.hf.common import LLAMA, activation, activation_notes, as_written
from memcalc.hf.keys import Derived, Key, Values, chance, count, flag, text
from memcalc.hf.names import Names
from memcalc.hf.record import ModelType
from memcalc.models.llava import parts
from memcalc.spec import Model

__all__ = ["VISION"]

_CLIP = {
    "class_embedding": "embeddings.class_embedding",
    "patch_embedding": "embeddings.patch_embedding",
    "position_embedding": "embeddings.position_embedding",
    "pre_layrnorm": "pre_layrnorm",
    "post_layernorm": "post_layernorm",
    **{f"layers.#.self_attn.{part}_proj": f"encoder.layers.#.self_attn.{part}_proj" for part in ("q", "k", "v", "out")},
    **{f"layers.#.{part}": f"encoder.layers.#.{part}" for part in ("layer_norm1", "layer_norm2", "mlp.fc1", "mlp.fc2")},
}
_LLAVA = {
    **{f"vision.{ours}": f"model.vision_tower.{theirs}" for ours, theirs in _CLIP.items()},
    **{f"projector.linear_{index}": f"model.multi_modal_projector.linear_{index}" for index in (1, 2)},
    **{ours: theirs.replace("model.", "model.language_model.") for ours, theirs in LLAMA.items()},
}
_TOWER = ("layers", "hidden", "heads", "ffn", "image", "channels", "patch")


def _sizes(patch: int, act: str) -> dict[str, Key]:
    return {
        "hidden": count("hidden_size", 768),
        "layers": count("num_hidden_layers", 12, most=10**4),
        "heads": count("num_attention_heads", 12),
        "ffn": count("intermediate_size", 3072),
        "image": count("image_size", 224, most=10**5),
        "patch": count("patch_size", patch),
        "channels": count("num_channels", 3, most=10**4),
        "act": text("hidden_act", act),
    }


def _tower(values: Values) -> dict[str, Any]:
    found = {name: values[name] for name in _TOWER}
    return {**found, "kv_heads": values["heads"], "features": values["channels"] * values["image"] ** 2}


def _vit(values: Values, head: str) -> dict[str, Any]:
    if not values["qkv_bias"]:
        raise PlanError("qkv_bias is false; a ViT without biases of its queries is not known")
    if head == "ViTModel" and values["pooled"] != values["hidden"]:
        raise PlanError(
            f"pooler_output_size {values['pooled']} is not hidden_size {values['hidden']}, which alone is known"
        )
    found = {**_tower(values), "family": "vit", "separate_qkv": True, "classes": values.get("labels", 0)}
    if head == "ViTModel":
        found["head"] = "pooled"
    return {**found, "activation": "relu"} if activation(values["act"]) == "relu" else found


def _vit_names(model: Model) -> Names:
    prefix = "" if model.head == "pooled" else "vit."
    block, attended = f"{prefix}layers.#", {"q": "q_proj", "k": "k_proj", "v": "v_proj", "proj": "o_proj"}
    return {
        "cls_token": f"{prefix}embeddings.cls_token",
        "pos_embed": f"{prefix}embeddings.position_embeddings",
        "patch_embed": f"{prefix}embeddings.patch_embeddings.projection",
        **{f"blocks.#.attn.{ours}": f"{block}.attention.{theirs}" for ours, theirs in attended.items()},
        "blocks.#.norm1": f"{block}.layernorm_before",
        "blocks.#.norm2": f"{block}.layernorm_after",
        "blocks.#.mlp.fc1": f"{block}.mlp.fc1",
        "blocks.#.mlp.fc2": f"{block}.mlp.fc2",
        "norm": f"{prefix}layernorm",
        "head": "classifier",
        "pooler": "pooler.dense",
    }


def _clip(values: Values, head: str) -> dict[str, Any]:
    act = values["act"] if values["act"] == "quick_gelu" else activation(values["act"])
    return {**_tower(values), "family": "clip", "head": "pooled", "activation": act}


def _llava(values: Values, head: str) -> dict[str, Any]:
    text_model, vision = values["text_config"], values["vision_config"]
    if text_model.family != "llama":
        raise PlanError(f"text_config: a LLaVA over the family {text_model.family} is not known; over llama it is")
    if not values["projector_bias"] or values["projector_act"] != "gelu":
        raise PlanError("multimodal_projector_bias and projector_hidden_act: only true and gelu are known")
    if values["strategy"] not in ("default", "full"):
        raise PlanError(f"vision_feature_select_strategy {values['strategy']} is neither default nor full")
    layer = values["layer"]
    read = layer if layer >= 0 else vision.layers + 1 + layer
    if not 1 <= read <= vision.layers:
        raise PlanError(f"vision_feature_layer {layer} is not the output of one of {vision.layers} layers")
    skipped = ("name", "family", "notes", "tied")
    found = {
        field.name: getattr(text_model, field.name)
        for field in dataclasses.fields(text_model)
        if field.name not in skipped
    }
    return {
        **found,
        "family": "llava",
        "tied": values["tied"] or text_model.tied,
        "vision": dataclasses.replace(vision, head="", notes=()),
        "vision_layers": read,
        "class_place": values["strategy"] == "full",
    }


def _llava_notes(values: Values) -> list[str]:
    model = Model(name="llava", **_llava(values, ""))
    said = ", ".join(f"{part} {size:,}" for part, size in parts(model).items())
    unread = model.vision.layers - model.vision_layers if model.vision is not None else 0
    notes = [f"parameters by part: {said}"]
    if unread:
        notes.append(
            f"vision_feature_layer {values['layer']}: the tower's last {unread} of {unread + model.vision_layers} layers and "
            "its last norm have no gradient, for nothing reads them"
        )
    return [*notes, "no part is frozen unless --freeze says so, such as --freeze vision"]


VISION = [
    ModelType(
        name="vit",
        config="ViTConfig",
        blocks=("ViTLayer",),
        heads=("ViTForImageClassification", "ViTModel"),
        keys={
            **_sizes(16, "gelu"),
            "qkv_bias": flag("qkv_bias", True),
            "dropout": chance("hidden_dropout_prob", 0.0),
            "pooled": count(
                "pooler_output_size", None, Derived(said="hidden_size", of=lambda values: values["hidden"])
            ),
        },
        fields=_vit,
        names=_vit_names,
        written=as_written(),
        notes=activation_notes,
    ),
    ModelType(
        name="clip_vision_model",
        config="CLIPVisionConfig",
        blocks=("CLIPEncoderLayer",),
        heads=("CLIPVisionModel",),
        keys=_sizes(32, "quick_gelu"),
        fields=_clip,
        names=lambda model: _CLIP,
        written=lambda values: {"softmax": "float32"},
    ),
    ModelType(
        name="llava",
        config="LlavaConfig",
        heads=("LlavaForConditionalGeneration",),
        keys={
            "layer": count("vision_feature_layer", -2, least=-(10**4), most=10**4),
            "strategy": text("vision_feature_select_strategy", "default"),
            "projector_act": text("projector_hidden_act", "gelu"),
            "projector_bias": flag("multimodal_projector_bias", True),
            "tied": flag("tie_word_embeddings", False),
        },
        parts={"text_config": "llama", "vision_config": "clip_vision_model"},
        fields=_llava,
        names=lambda model: _LLAVA,
        written=lambda values: {"norm": "python", "softmax": "float32"},
        notes=_llava_notes,
    ),
]
