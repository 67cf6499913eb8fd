"""ResNet on the tape, nearly line by line ``trainers/models/resnet.py`` (He et al. 2016)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from memcalc import convolution as conv
from memcalc import ops
from memcalc.errors import PlanError
from memcalc.graph import Tensor
from memcalc.models.checks import no_attention, no_dropout, positive, reads_images
from memcalc.models.family import Block, Family
from memcalc.spec import HEAD, Model, Weight
from memcalc.tape import Tape

if TYPE_CHECKING:
    from memcalc.plan import Plan

__all__ = ["RESNET"]

EXPANSION = 4
"""Channels a bottleneck block gives, over those inside it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Unit:
    """One residual block: channels in, inside and out, and its stride."""

    name: str
    inputs: int
    inside: int
    outputs: int
    stride: int
    size: int
    """Height and width of its input."""

    @property
    def projects(self) -> bool:
        """The shortcut is a convolution because shapes differ."""
        return self.stride > 1 or self.inputs != self.outputs


def units(model: Model) -> Iterator[Unit]:
    """The blocks in order; each stage but the first halves height and width and doubles the channels."""
    index, inputs, size = 0, model.hidden, halved(halved(model.image))
    for stage, count in enumerate(model.stages):
        inside = model.hidden * 2**stage
        outputs = inside * (EXPANSION if model.bottleneck else 1)
        for number in range(count):
            stride = 2 if stage and not number else 1
            yield Unit(name=f"blocks.{index}", inputs=inputs, inside=inside, outputs=outputs, stride=stride, size=size)
            index, inputs, size = index + 1, outputs, halved(size) if stride == 2 else size


def halved(size: int) -> int:
    """Height or width after a convolution or pooling of stride 2 with its usual padding."""
    return (size - 1) // 2 + 1


def convolutions(model: Model, unit: Unit) -> list[tuple[str, int, int, int, int]]:
    """Name, outputs, inputs, kernel and stride of a block's convolutions, the shortcut's last."""
    i, m, o, s = unit.inputs, unit.inside, unit.outputs, unit.stride
    if model.bottleneck:
        found = [("1", m, i, 1, 1), ("2", m, m, 3, s), ("3", o, m, 1, 1)]
    else:
        found = [("1", m, i, 3, s), ("2", o, m, 3, 1)]
    return [*found, ("_shortcut", o, i, 1, s)] if unit.projects else found


def check(model: Model, plan: Plan) -> None:
    no_dropout(model, plan)
    no_attention(model, plan)
    positive(model, "hidden", "image", "channels", "classes")
    if not model.stages or min(model.stages) < 1:
        raise PlanError(f"model {model.name}: stages {list(model.stages)} must be numbers of blocks, each at least 1")
    if sum(model.stages) > 10**4 or len(model.stages) > 10:
        raise PlanError(f"model {model.name}: more than 10 stages or 10000 blocks must be a slip")
    reads_images(model, plan)


def weights(model: Model) -> list[Weight]:
    """A kernel without bias and two vectors for each convolution, and the classifier.

    >>> from memcalc.models import MODELS
    >>> sum(weight.numel for weight in weights(MODELS["resnet-50"]))
    25557032
    """
    found = [Weight("conv1.weight", (model.hidden, model.channels, 7, 7)), *_norm("bn1", model.hidden)]
    outputs = model.hidden
    for unit in units(model):
        for name, out, inputs, kernel, _ in convolutions(model, unit):
            found.append(Weight(f"{unit.name}.conv{name}.weight", (out, inputs, kernel, kernel), unit.name))
            found += _norm(f"{unit.name}.bn{name}", out, unit.name)
        outputs = unit.outputs
    return [*found, Weight("fc.weight", (model.classes, outputs), HEAD), Weight("fc.bias", (model.classes,), HEAD)]


def _norm(name: str, channels: int, group: str = "root") -> list[Weight]:
    return [Weight(f"{name}.{part}", (channels,), group) for part in ("weight", "bias")]


def buffers(plan: Plan) -> list[tuple[str, tuple[int, ...], str]]:
    """Running mean and variance of each batch norm, and how many batches it has seen."""
    found: list[tuple[str, tuple[int, ...], str]] = []
    for weight in weights(plan.model):
        if ".bn" in f".{weight.name}" and weight.name.endswith(".weight"):
            name = weight.name.removesuffix(".weight")
            found += [(f"{name}.{part}", weight.shape, plan.precision_row.weights) for part in ("mean", "variance")]
            found.append((f"{name}.batches", (), "int64"))
    return found


def rows(model: Model, tokens: int, weight: Weight) -> float:
    """A kernel meets every pixel of its output; the classifier one row."""
    if weight.name == "fc.weight":
        return 1
    if len(weight.shape) < 2:
        return 0
    if weight.name == "conv1.weight":
        return halved(model.image) ** 2
    return _pixels(model)[weight.name]


def _pixels(model: Model) -> dict[str, int]:
    found = {}
    for unit in units(model):
        size = unit.size
        for name, _, _, _, stride in convolutions(model, unit):
            start = unit.size if name == "_shortcut" else size
            size = halved(start) if stride == 2 else start
            found[f"{unit.name}.conv{name}.weight"] = size**2
    return found


def enter(t: Tape, plan: Plan, images: Tensor) -> Tensor:
    model = plan.model
    pixels = Tensor(images.storage, (model.channels, model.image, model.image), images.dtype, None)
    x = conv.batch_norm(t, conv.conv(t, pixels, "conv1", stride=2, padding=3), "bn1")
    return conv.max_pool(t, conv.relu_in_place(t, x, "relu"), "pool", kernel=3, stride=2, padding=1)


def blocks(t: Tape, plan: Plan) -> list[Block]:
    return [(unit.name, partial(block, t, plan.model, unit)) for unit in units(plan.model)]


def leave(t: Tape, plan: Plan, x: Tensor) -> Tensor:
    return ops.linear(t, conv.mean_of_pixels(t, x, "average"), "fc")


def block(t: Tape, model: Model, unit: Unit, x: Tensor) -> Tensor:
    y = x
    main = [entry for entry in convolutions(model, unit) if entry[0] != "_shortcut"]
    for name, _, _, kernel, stride in main:
        y = conv.conv(t, y, f"{unit.name}.conv{name}", stride=stride, padding=kernel // 2)
        y = conv.batch_norm(t, y, f"{unit.name}.bn{name}")
        if name != main[-1][0]:
            y = conv.relu_in_place(t, y, f"{unit.name}.relu{name}")
    if unit.projects:
        x = conv.conv(t, x, f"{unit.name}.conv_shortcut", stride=unit.stride)
        x = conv.batch_norm(t, x, f"{unit.name}.bn_shortcut")
    return conv.relu_in_place(t, conv.add_in_place(t, y, x, f"{unit.name}.residual"), f"{unit.name}.relu")


RESNET = Family(
    name="resnet",
    summary="ResNet: convolutions with batch norm and ReLU in place, basic or bottleneck blocks, max and average pooling",
    reads="images",
    drops=False,
    convolves=True,
    assumption="workspaces of convolution algorithms are not counted",
    fields=("stages", "bottleneck", "hidden", "image", "channels", "features", "classes"),
    check=check,
    buffers=buffers,
    weights=weights,
    rows=rows,
    pairs=lambda model, tokens: (0, 0),
    enter=enter,
    blocks=blocks,
    leave=leave,
)
