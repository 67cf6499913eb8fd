"""A stack of layers on the tape, nearly line by line ``trainers/models/mlp.py``."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from memcalc import ops
from memcalc.convolution import batch_norm
from memcalc.errors import PlanError, UnknownNameError
from memcalc.graph import Tensor
from memcalc.models.checks import no_attention, positive
from memcalc.models.family import Block, Family
from memcalc.spec import HEAD, Model, Weight
from memcalc.tape import Tape

if TYPE_CHECKING:
    from memcalc.plan import Plan

__all__ = ["MLP"]


# What autograd keeps of each: its output, its input, or nothing (tools/autograd/derivatives.yaml).
_KEEPS = {
    "relu": "output", "tanh": "output", "sigmoid": "output", "gelu": "input", "silu": "input", "elu": "input",
    "selu": "input", "leaky_relu": "input", "softplus": "input", "mish": "input", "identity": "",
}  # fmt: skip


def check(model: Model, plan: Plan) -> None:
    no_attention(model, plan)
    positive(model, "layers", "hidden", "features", "classes")
    if model.activation and model.activation not in _KEEPS:
        raise UnknownNameError(f"model {model.name}: activation", model.activation, _KEEPS)
    if model.widths and (len(model.widths) != model.layers or min(model.widths) < 1):
        raise PlanError(
            f"model {model.name}: {len(model.widths)} widths are not {model.layers} layers, each at least 1"
        )
    if plan.micro_batch < 1:
        raise PlanError(f"micro batch {plan.micro_batch} must be at least 1")
    if plan.tokens:
        raise PlanError(f"tokens {plan.tokens}: {model.name} reads {model.features} features a sample, not tokens")


def widths(model: Model) -> list[int]:
    """What goes into the first layer, and what comes out of each."""
    return [model.features, *(model.widths or [model.hidden] * model.layers)]


def weights(model: Model) -> list[Weight]:
    """A matrix and a bias per layer, and for the classifier; batch norm has two vectors more."""
    found, sizes = [], widths(model)
    for layer, (inputs, width) in enumerate(zip(sizes, sizes[1:], strict=False)):
        unit = f"layers.{layer}"
        found += [Weight(f"{unit}.linear.weight", (width, inputs), unit), Weight(f"{unit}.linear.bias", (width,), unit)]
        if model.batch_norm:
            found += [Weight(f"{unit}.norm.{part}", (width,), unit) for part in ("weight", "bias")]
    return [
        *found,
        Weight("head.weight", (model.classes, sizes[-1]), HEAD),
        Weight("head.bias", (model.classes,), HEAD),
    ]


def buffers(plan: Plan) -> list[tuple[str, tuple[int, ...], str]]:
    """Running mean and variance of each batch norm, and how many batches it has seen."""
    found: list[tuple[str, tuple[int, ...], str]] = []
    for layer, width in enumerate(widths(plan.model)[1:] if plan.model.batch_norm else []):
        name = f"layers.{layer}.norm"
        found += [(f"{name}.{part}", (width,), plan.precision_row.weights) for part in ("mean", "variance")]
        found.append((f"{name}.batches", (), "int64"))
    return found


def enter(t: Tape, plan: Plan, x: Tensor) -> Tensor:
    return x


def blocks(t: Tape, plan: Plan) -> list[Block]:
    return [(f"layers.{layer}", partial(block, t, plan, f"layers.{layer}")) for layer in range(plan.model.layers)]


def leave(t: Tape, plan: Plan, x: Tensor) -> Tensor:
    return ops.linear(t, x, "head")


def block(t: Tape, plan: Plan, name: str, x: Tensor) -> Tensor:
    x = ops.linear(t, x, f"{name}.linear")
    if plan.model.batch_norm:
        x = batch_norm(t, x, f"{name}.norm")
    kind = plan.model.activation or "relu"
    if _KEEPS[kind]:
        x = (ops.relu if _KEEPS[kind] == "output" else ops.pointwise)(t, x, f"{name}.{kind}")
    return ops.dropout(t, x, f"{name}.dropout", plan.dropout)


MLP = Family(
    name="mlp",
    summary="layers of equal width with ReLU, and a classifier on top; other widths, activations, batch norm, dropout",
    reads="features",
    fields=("layers", "hidden", "widths", "activation", "batch_norm", "features", "classes"),
    check=check,
    buffers=buffers,
    weights=weights,
    enter=enter,
    blocks=blocks,
    leave=leave,
)
