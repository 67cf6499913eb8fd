"""A stack of layers of equal width on the tape, nearly line by line ``trainers/models/mlp.py``."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from memcalc import ops
from memcalc.errors import PlanError
from memcalc.models.checks import no_attention, no_dropout, positive
from memcalc.models.family import Block, Family
from memcalc.spec import HEAD, Model, Weight
from memcalc.tape import Tape, Tensor

if TYPE_CHECKING:
    from memcalc.plan import Plan

__all__ = ["MLP"]


def check(model: Model, plan: Plan) -> None:
    no_dropout(model, plan)
    no_attention(model, plan)
    positive(model, "layers", "hidden", "features", "classes")
    if plan.micro_batch < 1:
        raise PlanError(f"micro batch {plan.micro_batch} must be at least 1")
    if plan.tokens:
        raise PlanError(f"tokens {plan.tokens}: {model.name} reads {model.features} features a sample, not tokens")


def weights(model: Model) -> list[Weight]:
    """A matrix and a bias per layer, and for the classifier."""
    widths = [model.features, *[model.hidden] * model.layers]
    found = []
    for layer, (inputs, width) in enumerate(zip(widths, widths[1:], strict=False)):
        unit = f"layers.{layer}"
        found += [Weight(f"{unit}.linear.weight", (width, inputs), unit), Weight(f"{unit}.linear.bias", (width,), unit)]
    return [
        *found,
        Weight("head.weight", (model.classes, model.hidden), HEAD),
        Weight("head.bias", (model.classes,), HEAD),
    ]


def enter(t: Tape, plan: Plan, x: Tensor) -> Tensor:
    return x


def blocks(t: Tape, plan: Plan) -> list[Block]:
    return [(f"layers.{layer}", partial(block, t, f"layers.{layer}")) for layer in range(plan.model.layers)]


def leave(t: Tape, plan: Plan, x: Tensor) -> Tensor:
    return ops.linear(t, x, "head")


def block(t: Tape, name: str, x: Tensor) -> Tensor:
    return ops.relu(t, ops.linear(t, x, f"{name}.linear"), f"{name}.relu")


MLP = Family(
    name="mlp",
    summary="layers of equal width with ReLU, and a classifier on top",
    reads="features",
    check=check,
    weights=weights,
    enter=enter,
    blocks=blocks,
    leave=leave,
)
