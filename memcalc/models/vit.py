"""Vision Transformer on the tape, nearly line by line ``trainers/models/vit.py`` (Dosovitskiy et al. 2021)."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from memcalc import norms, ops
from memcalc.attention import attention as attend
from memcalc.convolution import conv
from memcalc.errors import PlanError, UnknownNameError
from memcalc.graph import Gradient, Node, Tensor
from memcalc.models.checks import activation_is, full_heads, heads_divide, positive, reads_images
from memcalc.models.family import Block, Family
from memcalc.spec import HEAD, Model, Weight
from memcalc.tape import Tape

if TYPE_CHECKING:
    from memcalc.plan import Plan

__all__ = ["VIT", "first_place", "patches_divide", "places", "with_class_token"]

_NUMBERS = ("layers", "hidden", "heads", "ffn", "image", "channels", "patch")


def check(model: Model, plan: Plan) -> None:
    if model.head not in ("", "pooled"):
        raise UnknownNameError(f"model {model.name}: head", model.head, ["pooled"])
    positive(model, *_NUMBERS, *(() if model.head else ("classes",)))
    heads_divide(model)
    full_heads(model)
    activation_is(model, "gelu", "relu")
    reads_images(model, plan)
    patches_divide(model)


def patches_divide(model: Model) -> None:
    if model.image % model.patch:
        raise PlanError(f"model {model.name}: patches of {model.patch} do not divide an image of {model.image}")


def places(model: Model) -> int:
    """Patches of an image, and one place for the class token."""
    return (model.image // model.patch) ** 2 + 1


def weights(model: Model) -> list[Weight]:
    """Twelve tensors a block, the class token, positions, and a convolution whose kernel is one patch.

    >>> from memcalc.models import MODELS
    >>> sum(weight.numel for weight in weights(MODELS["vit-base-16"]))
    86567656
    """
    h, f, p = model.hidden, model.ffn, model.patch
    found = [
        Weight("cls_token", (1, 1, h)),
        Weight("pos_embed", (1, places(model), h)),
        Weight("patch_embed.weight", (h, model.channels, p, p)),
        Weight("patch_embed.bias", (h,)),
    ]
    for layer in range(model.layers):
        block = f"blocks.{layer}"
        qkv = {f"attn.{part}": (h, h) for part in "qkv"} if model.separate_qkv else {"attn.qkv": (3 * h, h)}
        for name, shape in (
            ("norm1", (h,)), *qkv.items(), ("attn.proj", (h, h)),
            ("norm2", (h,)), ("mlp.fc1", (f, h)), ("mlp.fc2", (h, f)),
        ):  # fmt: skip
            found.append(Weight(f"{block}.{name}.weight", shape, block))
            found.append(Weight(f"{block}.{name}.bias", shape[:1], block))
    found += [Weight("norm.weight", (h,), HEAD), Weight("norm.bias", (h,), HEAD)]
    name, outputs = ("pooler", h) if model.head == "pooled" else ("head", model.classes)
    return [*found, Weight(f"{name}.weight", (outputs, h), HEAD), Weight(f"{name}.bias", (outputs,), HEAD)]


def rows(model: Model, tokens: int, weight: Weight) -> float:
    """Every place meets a block's matrices, every patch the embedding, and the class token alone the head."""
    if len(weight.shape) < 2 or weight.name in ("cls_token", "pos_embed"):
        return 0
    alone = {"patch_embed.weight": places(model) - 1, "head.weight": 1, "pooler.weight": 1}
    return alone.get(weight.name, places(model))


def pairs(model: Model, tokens: int) -> tuple[int, int]:
    return 0, model.layers * places(model) ** 2


def enter(t: Tape, plan: Plan, images: Tensor) -> Tensor:
    model = plan.model
    pixels = Tensor(images.storage, (model.channels, model.image, model.image), images.dtype, None)
    x = conv(t, pixels, "patch_embed", stride=model.patch, transposed_after=True)
    x = with_class_token(t, x, "cls_token", (places(model), model.hidden))
    x = with_positions(t, x, "pos_embed")
    return ops.dropout(t, x, "embedding dropout", plan.dropout)


def with_class_token(t: Tape, patches: Tensor, name: str, shape: tuple[int, ...]) -> Tensor:
    """``cat`` of the class token and the patches, which are transposed views of the convolution's output."""
    w = t.weights[name]
    patches = ops.cast(t, patches, t.weight_dtype, "patches")  # under autocast, cat takes the widest dtype

    def backward(node: Node, grads: list[Gradient]) -> list[Gradient]:
        return [grads[0], t.allocate(f"{name} gradient", w.shape, t.weight_dtype, "gradients", batched=False)]

    node = t.node([ops.edge(patches), w], backward)
    return t.output("patches with class token", shape, t.weight_dtype, node)


def with_positions(t: Tape, x: Tensor, name: str) -> Tensor:
    """``x + positions``, whose gradient is a sum over the batch."""
    w = t.weights[name]

    def backward(node: Node, grads: list[Gradient]) -> list[Gradient]:
        return [grads[0], t.allocate(f"{name} gradient", w.shape, t.weight_dtype, "gradients", batched=False)]

    node = t.node([ops.edge(x), w], backward)
    return t.output("embeddings output", x.shape, x.dtype, node)


def blocks(t: Tape, plan: Plan) -> list[Block]:
    return [(f"blocks.{layer}", partial(block, t, plan, f"blocks.{layer}")) for layer in range(plan.model.layers)]


def leave(t: Tape, plan: Plan, x: Tensor) -> Tensor:
    x = first_place(t, norms.layer_norm(t, x, "norm"))
    if plan.model.head == "pooled":
        return ops.relu(t, ops.linear(t, x, "pooler"), "pooler.tanh")
    return ops.linear(t, x, "head")


def first_place(t: Tape, x: Tensor) -> Tensor:
    """``x[:, 0]``: a view, whose gradient is padded with zeros."""
    shape, dtype = x.shape, x.dtype

    def backward(node: Node, grads: list[Gradient]) -> list[Gradient]:
        return [t.allocate("class token gradient among zeros", shape, dtype, "temporary")]

    return Tensor(x.storage, shape[1:], dtype, t.node([ops.edge(x)], backward))


def block(t: Tape, plan: Plan, name: str, x: Tensor) -> Tensor:
    x = ops.add(t, x, attention(t, plan, norms.layer_norm(t, x, f"{name}.norm1"), f"{name}.attn"), f"{name}.residual_1")
    return ops.add(t, x, mlp(t, plan, norms.layer_norm(t, x, f"{name}.norm2"), f"{name}.mlp"), f"{name}.residual_2")


def attention(t: Tape, plan: Plan, x: Tensor, name: str) -> Tensor:
    if plan.model.separate_qkv:
        q, k, v = (ops.linear(t, x, f"{name}.{part}") for part in "qkv")
    else:
        q, k, v = ops.split(t, ops.linear(t, x, f"{name}.qkv"), [plan.model.hidden] * 3, f"{name}.qkv split")
    del x
    wide = plan.implementation.softmax == "float32"
    x = attend(
        t, q, k, v, name, kind=plan.kernel, heads=plan.model.heads, dropout=plan.dropout, causal=False, wide=wide
    )
    return ops.dropout(t, ops.linear(t, x, f"{name}.proj"), f"{name}.dropout", plan.dropout)


def mlp(t: Tape, plan: Plan, x: Tensor, name: str) -> Tensor:
    x = ops.linear(t, x, f"{name}.fc1")
    if plan.model.activation == "relu":
        x = ops.relu(t, x, f"{name}.relu")
    else:
        x = ops.gelu(t, x, f"{name}.gelu", plan.implementation.gelu)
    return ops.dropout(t, ops.linear(t, x, f"{name}.fc2"), f"{name}.dropout", plan.dropout)


VIT = Family(
    name="vit",
    summary="Vision Transformer: patches by convolution, class token, learned positions, LayerNorm, one QKV matrix, GELU",
    reads="images",
    untrained=lambda model: (
        "a ViT as transformers has it" if model.separate_qkv or model.head or model.activation == "relu" else ""
    ),
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
        "separate_qkv",
        "activation",
        "head",
        "classes",
    ),  # fmt: skip
    check=check,
    weights=weights,
    rows=rows,
    pairs=pairs,
    enter=enter,
    blocks=blocks,
    leave=leave,
)
