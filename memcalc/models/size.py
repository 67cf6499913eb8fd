"""A model of which only the size is known: parameters, and perhaps layers and what one keeps."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from memcalc import ops
from memcalc.errors import PlanError
from memcalc.graph import Tensor
from memcalc.models.checks import no_attention, no_dropout, positive
from memcalc.models.family import Block, Family
from memcalc.spec import HEAD, Model, Weight
from memcalc.tape import Tape
from memcalc.units import things

if TYPE_CHECKING:
    from memcalc.plan import Plan

__all__ = ["SIZE"]


def check(model: Model, plan: Plan) -> None:
    no_dropout(model, plan)
    no_attention(model, plan)
    positive(model, "parameters")
    if model.layers > model.parameters - outside(model):
        raise PlanError(
            f"{things(model.layers, 'layer')}, but {things(model.parameters - outside(model), 'parameter')} for them"
        )
    if (model.features or model.layer_bytes) and plan.micro_batch < 1:
        raise PlanError(f"micro batch {plan.micro_batch} must be at least 1 when inputs or activations are given")
    if model.layer_bytes and not model.layers:
        raise PlanError("activation bytes per layer are given, but not how many layers there are")


def outside(model: Model) -> int:
    """Parameters of embeddings and head, which no layer has; none when vocabulary or width are unknown."""
    return 2 * model.vocab * model.hidden


def weights(model: Model) -> list[Weight]:
    """One tensor a layer, as equal as whole parameters allow; one tensor in all when layers are unknown.

    >>> [weight.numel for weight in weights(Model(name="ten", family="size", parameters=10, layers=3))]
    [4, 3, 3]
    """
    layers, rest = max(model.layers, 1), outside(model)
    share, left = divmod(model.parameters - rest, layers)
    found = [Weight(f"layers.{i}.weight", (share + (i < left),), f"layers.{i}") for i in range(layers)]
    if not rest:
        return found
    return [Weight("embeddings.weight", (rest // 2,)), *found, Weight("head.weight", (rest // 2,), HEAD)]


def enter(t: Tape, plan: Plan, x: Tensor) -> Tensor:
    return ops.opaque(t, x, "embeddings", (plan.model.features,), 0) if outside(plan.model) else x


def blocks(t: Tape, plan: Plan) -> list[Block]:
    return [(f"layers.{i}", partial(block, t, plan, f"layers.{i}")) for i in range(max(plan.model.layers, 1))]


def block(t: Tape, plan: Plan, name: str, x: Tensor) -> Tensor:
    """A layer keeps its stated bytes, or one output of the sample's size: L × N × S × bytes."""
    return ops.opaque(t, x, name, (plan.model.features,), plan.model.layer_bytes)


def leave(t: Tape, plan: Plan, x: Tensor) -> Tensor:
    return ops.opaque(t, x, "head", (plan.model.features,), 0) if outside(plan.model) else x


SIZE = Family(
    name="size",
    summary="known by its parameter count alone",
    reads="features",
    drops=False,
    opaque=True,
    unplayed=True,
    fields=("parameters", "layers", "layer_bytes", "features", "vocab", "hidden"),
    check=check,
    weights=weights,
    rows=lambda model, tokens, weight: 1,
    enter=enter,
    blocks=blocks,
    leave=leave,
)
