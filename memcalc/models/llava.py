"""LLaVA on the tape: a vision tower, a projector and a text model that reads image places among its tokens.

Source: transformers/models/llava/modeling_llava.py (Liu et al. 2023). The text model's numbers are the Model's own, those
of the tower are its ``vision``; ``tokens`` counts the places of the image, too. Blocks of the tower whose output nobody
reads run and are dropped, and they and the tower's last norm never get a gradient.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from memcalc import ops
from memcalc.errors import PlanError
from memcalc.graph import Gradient, Node, Tensor
from memcalc.models import clip, decoder, decoder_weights
from memcalc.models.checks import positive
from memcalc.models.family import Block, Family
from memcalc.models.vit import places
from memcalc.spec import Model, Weight
from memcalc.tape import Tape

if TYPE_CHECKING:
    from memcalc.plan import Plan

__all__ = ["LLAVA", "image_tokens", "parts"]

TOWER, PROJECTOR = "vision.", "projector."


def check(model: Model, plan: Plan) -> None:
    vision = tower_of(model)
    clip.check_numbers(vision)
    positive(model, "vision_layers")
    if model.vision_layers > vision.layers:
        raise PlanError(f"model {model.name}: {model.vision_layers} layers of a vision tower that has {vision.layers}")
    decoder.check(model, plan)
    if plan.tokens < image_tokens(model):
        raise PlanError(
            f"{plan.tokens} tokens: one image alone takes {image_tokens(model)} of {model.name}; give a longer sequence"
        )
    if plan.checkpoint_every > 1:
        raise PlanError(f"checkpoints of {plan.checkpoint_every} blocks: {model.name} has two kinds; take full")
    if plan.reentrant:
        raise PlanError(f"reentrant: blocks of {model.name} are of two models; leave --reentrant out")


def tower_of(model: Model) -> Model:
    if model.vision is None:
        raise PlanError(f"model {model.name}: the llava family needs a vision tower")
    return model.vision


def image_tokens(model: Model) -> int:
    """Places of the text that an image takes: its patches, and the class token where that is kept."""
    return places(tower_of(model)) - (not model.class_place)


def weights(model: Model) -> list[Weight]:
    """Those of the tower, of the projector's two products, and of the text model."""
    vision, h = tower_of(model), model.hidden
    found = []
    unread = tuple(f"{TOWER}layers.{layer}." for layer in range(model.vision_layers, vision.layers))
    for weight in clip.weights(vision, TOWER):
        read = not weight.name.startswith((*unread, f"{TOWER}post_layernorm."))
        found.append(weight if read else dataclasses.replace(weight, trainable=False))
    for index, inputs in enumerate((vision.hidden, h), start=1):
        found.append(Weight(f"{PROJECTOR}linear_{index}.weight", (h, inputs)))
        found.append(Weight(f"{PROJECTOR}linear_{index}.bias", (h,)))
    return found + decoder_weights.weights(model)


def parts(model: Model) -> dict[str, int]:
    """Parameters of each part.

    >>> tower = Model(
    ...     name="tower", family="clip", layers=24, hidden=1024, heads=16, kv_heads=16, ffn=4096, image=336, channels=3,
    ...     patch=14, features=3 * 336**2, activation="quick_gelu",
    ... )
    >>> parts(Model(
    ...     name="llava-1.5-7b", family="llava", layers=32, hidden=4096, heads=32, kv_heads=32, ffn=11008, vocab=32064,
    ...     context=4096, vision=tower, vision_layers=23,
    ... ))
    {'text': 6738939904, 'vision': 303507456, 'projector': 20979712}
    """
    found = {"text": 0, "vision": 0, "projector": 0}
    for weight in weights(model):
        part = weight.name.split(".")[0]
        found[part if part in found else "text"] += weight.numel
    return found


def rows(model: Model, tokens: int, weight: Weight) -> float:
    """The tower sees every place of the image, the projector those that the text model gets."""
    if weight.name.startswith(TOWER):
        return clip.rows(tower_of(model), 0, dataclasses.replace(weight, name=weight.name.removeprefix(TOWER)))
    if weight.name.startswith(PROJECTOR):
        return image_tokens(model) if len(weight.shape) > 1 else 0
    return decoder.rows(model, tokens, weight)


def pairs(model: Model, tokens: int) -> tuple[int, int]:
    return model.layers * tokens * tokens, clip.pairs(tower_of(model), 0)[1]


def enter(t: Tape, plan: Plan, ids: Tensor) -> Tensor:
    assert t.sensed is not None
    x = decoder.enter(t, plan, ids)
    t.shared = {"text": {"words": x}}
    return clip.embed(t, tower_of(plan.model), t.sensed, TOWER)


def between(t: Tape, plan: Plan, name: str, x: Tensor) -> Tensor:
    """At the text model's first block: the image's places through the projector into those kept for them."""
    if name != "layers.0":
        return x
    x = image_places(t, x, image_tokens(plan.model))
    x = ops.linear(t, x, f"{PROJECTOR}linear_1")
    x = clip.activation(t, x, PROJECTOR.rstrip("."), "gelu")
    x = ops.linear(t, x, f"{PROJECTOR}linear_2")
    t.returned.append(x.storage)
    return scattered(t, t.shared.pop("text").pop("words"), x)


def image_places(t: Tape, x: Tensor, count: int) -> Tensor:
    """``x[:, 1:]``: a view, whose gradient is padded with zeros; the whole where no place is left out."""
    shape, dtype = x.shape, x.dtype
    if count == shape[0]:
        return x

    def backward(node: Node, grads: list[Gradient]) -> list[Gradient]:
        return [t.allocate("image places gradient among zeros", shape, dtype, "temporary")]

    return Tensor(x.storage, (count, *shape[1:]), dtype, t.node([ops.edge(x)], backward))


def scattered(t: Tape, words: Tensor, image: Tensor) -> Tensor:
    """``words.masked_scatter(mask, image)``: keeps a mask of one byte a token and makes a gradient for each side."""
    shape, dtype, of_image = words.shape, words.dtype, image.shape
    image = ops.cast(t, image, dtype, "image features")

    def backward(node: Node, grads: list[Gradient]) -> list[Gradient]:
        sizes = (("words", shape), ("image features", of_image))
        return [
            t.allocate(f"{name} gradient", size, dtype, "temporary") if node.wants(index) else None
            for index, (name, size) in enumerate(sizes)
        ]

    node = t.node([ops.edge(words), ops.edge(image)], backward)
    t.save(node, t.allocate("mask of image places", shape[:1], "bool", "activations"))
    return t.output("words and image", shape, dtype, node)


def blocks(t: Tape, plan: Plan) -> list[Block]:
    tower = clip.tower(t, plan, tower_of(plan.model), TOWER)
    read = plan.model.vision_layers
    seen = [(name, partial(run_and_return, t, block)) for name, block in tower[:read]]
    unread = [(name, partial(run_in_vain, t, name, block)) for name, block in tower[read:]]
    return [*seen, *unread, *decoder.blocks(t, plan)]


def run_and_return(t: Tape, block: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """The model returns the hidden states of its tower, too."""
    y = block(x)
    t.returned.append(y.storage)
    return y


def run_in_vain(t: Tape, name: str, block: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """What autograd recorded of a block goes with its output; where the tower is trained, as of a trained block."""
    mine = {key: weight for key, weight in t.weights.items() if key.startswith(f"{name}.")}
    if x.node is not None:
        t.weights |= {key: dataclasses.replace(weight, trainable=True) for key, weight in mine.items()}
    with t.unread():
        t.returned.append(block(x).storage)
    t.weights |= mine
    return x


LLAVA = Family(
    name="llava",
    summary="LLaVA: CLIP's vision tower, two linear layers, and a Llama that reads image places among its tokens",
    reads="tokens",
    encodes=True,
    beside_tokens=lambda model: (tower_of(model).channels, *[tower_of(model).image] * 2),
    untrained=lambda model: "models of the family llava",
    assumption="each sample has one image, whose places count among the tokens of the sequence",
    fields=(*(field for field in decoder.FIELDS if field != "gated"), "vision", "vision_layers", "class_place"),
    check=check,
    weights=weights,
    rows=rows,
    pairs=pairs,
    enter=enter,
    between=between,
    blocks=blocks,
    leave=decoder.leave,
)
