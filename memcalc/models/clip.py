"""CLIP's vision tower on the tape (transformers/models/clip/modeling_clip.py, CLIPVisionModel; Radford et al. 2021).

Alone it ends in its pooled first place; LLaVA (memcalc/models/llava.py) takes an inner block's output instead.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from memcalc import norms, ops
from memcalc.attention import attention as attend
from memcalc.convolution import conv
from memcalc.errors import UnknownNameError
from memcalc.graph import Tensor
from memcalc.models.checks import full_heads, heads_divide, no_dropout, positive, reads_images
from memcalc.models.family import Block, Family
from memcalc.models.vit import first_place, patches_divide, places, with_class_token
from memcalc.positions import positions
from memcalc.spec import HEAD, Model, Weight
from memcalc.tape import Tape

if TYPE_CHECKING:
    from memcalc.plan import Plan

__all__ = ["CLIP", "activation", "check_numbers", "embed", "tower", "weights"]

ACTIVATIONS = ("quick_gelu", "gelu", "silu", "relu")


def check(model: Model, plan: Plan) -> None:
    check_numbers(model)
    no_dropout(model, plan)
    reads_images(model, plan)


def check_numbers(model: Model) -> None:
    positive(model, "layers", "hidden", "heads", "ffn", "image", "channels", "patch")
    heads_divide(model)
    full_heads(model)
    patches_divide(model)
    if model.activation not in ACTIVATIONS:
        raise UnknownNameError(f"model {model.name}: activation", model.activation, ACTIVATIONS)


def weights(model: Model, prefix: str = "") -> list[Weight]:
    """Sixteen tensors a block, a convolution without a bias, and norms before and after all blocks.

    >>> large = Model(
    ...     name="clip-large-336", family="clip", layers=24, hidden=1024, heads=16, kv_heads=16, ffn=4096, image=336,
    ...     channels=3, patch=14, features=3 * 336**2, activation="quick_gelu", head="pooled",
    ... )
    >>> sum(weight.numel for weight in weights(large))
    303507456
    """
    h, f, p = model.hidden, model.ffn, model.patch
    found = [
        Weight(f"{prefix}class_embedding", (h,)),
        Weight(f"{prefix}patch_embedding.weight", (h, model.channels, p, p)),
        Weight(f"{prefix}position_embedding.weight", (places(model), h)),
        *_pair(f"{prefix}pre_layrnorm", (h,)),
    ]
    for layer in range(model.layers):
        block = f"{prefix}layers.{layer}"
        for name, shape in (
            ("layer_norm1", (h,)), *((f"self_attn.{part}_proj", (h, h)) for part in ("q", "k", "v", "out")),
            ("layer_norm2", (h,)), ("mlp.fc1", (f, h)), ("mlp.fc2", (h, f)),
        ):  # fmt: skip
            found += _pair(f"{block}.{name}", shape, block)
    return [*found, *_pair(f"{prefix}post_layernorm", (h,), "root" if prefix else HEAD)]


def _pair(name: str, shape: tuple[int, ...], group: str = "root") -> list[Weight]:
    return [Weight(f"{name}.weight", shape, group), Weight(f"{name}.bias", shape[:1], group)]


def rows(model: Model, tokens: int, weight: Weight) -> float:
    """Every place meets a block's matrices, and every patch the convolution."""
    if len(weight.shape) < 2 or weight.name == "position_embedding.weight":
        return 0
    return places(model) - (weight.name == "patch_embedding.weight")


def pairs(model: Model, tokens: int) -> tuple[int, int]:
    return 0, model.layers * places(model) ** 2


def enter(t: Tape, plan: Plan, images: Tensor) -> Tensor:
    return embed(t, plan.model, images)


def embed(t: Tape, model: Model, images: Tensor, prefix: str = "") -> Tensor:
    """Patches of the image beside the class token, with positions, normalised."""
    pixels = Tensor(images.storage, (model.channels, model.image, model.image), images.dtype, None)
    x = conv(t, pixels, f"{prefix}patch_embedding", stride=model.patch, transposed_after=True)
    x = with_class_token(t, x, f"{prefix}class_embedding", (places(model), model.hidden))
    x = ops.add(t, x, positions(t, f"{prefix}position_embedding", places(model)), f"{prefix}embeddings")
    return norms.layer_norm(t, x, f"{prefix}pre_layrnorm")


def blocks(t: Tape, plan: Plan) -> list[Block]:
    return tower(t, plan, plan.model)


def tower(t: Tape, plan: Plan, model: Model, prefix: str = "") -> list[Block]:
    """The blocks of a tower that may be a part of the plan's model."""
    names = [f"{prefix}layers.{layer}" for layer in range(model.layers)]
    return [(name, partial(block, t, plan, model, name)) for name in names]


def leave(t: Tape, plan: Plan, x: Tensor) -> Tensor:
    return norms.layer_norm(t, first_place(t, x), "post_layernorm")


def block(t: Tape, plan: Plan, model: Model, name: str, x: Tensor) -> Tensor:
    y = attention(t, plan, model, norms.layer_norm(t, x, f"{name}.layer_norm1"), f"{name}.self_attn")
    x = ops.add(t, x, y, f"{name}.residual_1")
    del y
    y = ops.linear(t, norms.layer_norm(t, x, f"{name}.layer_norm2"), f"{name}.mlp.fc1")
    y = activation(t, y, f"{name}.mlp", model.activation)
    return ops.add(t, x, ops.linear(t, y, f"{name}.mlp.fc2"), f"{name}.residual_2")


def attention(t: Tape, plan: Plan, model: Model, x: Tensor, name: str) -> Tensor:
    q, k, v = (ops.linear(t, x, f"{name}.{part}_proj") for part in "qkv")
    del x
    wide = plan.implementation.softmax == "float32"
    y = attend(t, q, k, v, name, kind=plan.kernel, heads=model.heads, dropout=0.0, causal=False, wide=wide)
    del q, k, v
    return ops.linear(t, y, f"{name}.out_proj")


def activation(t: Tape, x: Tensor, name: str, kind: str) -> Tensor:
    """``quick_gelu`` is ``x * sigmoid(1.702 x)`` in three operations (transformers/activations.py)."""
    if kind != "quick_gelu":
        return (ops.relu if kind == "relu" else ops.pointwise)(t, x, f"{name}.{kind}")
    gate = ops.relu(t, ops.scale(t, x, f"{name}.share"), f"{name}.sigmoid")  # like ReLU, sigmoid keeps its output
    return ops.multiply(t, x, gate, f"{name}.{kind}")


CLIP = Family(
    name="clip",
    summary="CLIP's vision tower: patches by convolution, class token, LayerNorm before and after, quick GELU",
    reads="images",
    drops=False,
    untrained=lambda model: "models of the family clip",
    fields=(
        "layers",
        "hidden",
        "heads",
        "kv_heads",
        "ffn",
        "image",
        "channels",
        "patch",
        "features",
        "activation",
        "head",
    ),  # fmt: skip
    check=check,
    weights=weights,
    rows=rows,
    pairs=pairs,
    enter=enter,
    blocks=blocks,
    leave=leave,
)
