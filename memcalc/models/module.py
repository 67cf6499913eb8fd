"""A module of the user's own: its weights are known one by one, what it computes is not.

The ledger plays its states, gradients and what a strategy does with them; activations come from a rehearsal of the
module's own code (``memcalc/rehearsal.py``) and are missing here.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from math import prod
from typing import TYPE_CHECKING

from memcalc.errors import PlanError, shorten
from memcalc.graph import Edge, Gradient, Node, Tensor
from memcalc.models.checks import no_attention
from memcalc.models.family import Block, Family
from memcalc.precision import DTYPE_BYTES
from memcalc.spec import ROOT, Model
from memcalc.tape import Tape

if TYPE_CHECKING:
    from memcalc.plan import Plan

__all__ = ["MODULE", "TOKEN_MODULE"]


def check(model: Model, plan: Plan) -> None:
    no_attention(model, plan)
    module = model.module
    if not module.factory:
        raise PlanError(f"model {model.name}: family {model.family} needs the factory of its module; give --module")
    if plan.compute.compile:
        raise PlanError(f"{model.name} is rehearsed as its code is written, not compiled; leave --compile out")
    if plan.dropout:
        raise PlanError(f"dropout {plan.dropout}: {model.name} has what its code says; leave --dropout out")
    for weight in (*module.weights, *module.buffers):
        if min(weight.shape, default=1) < 0 or (weight.dtype and weight.dtype not in DTYPE_BYTES):
            raise PlanError(f"model {model.name}: {weight.name} of shape {list(weight.shape)}, dtype {weight.dtype}")
    names = [weight.name for weight in module.weights]
    if len(set(names)) < len(names):
        raise PlanError(f"model {model.name}: a weight stands twice in its list")
    if not any(weight.trainable and weight.numel for weight in module.weights):
        raise PlanError(f"model {model.name}: none of its {len(names)} weights is trained")
    if model.layers != len({weight.group for weight in module.weights} - {ROOT}):
        raise PlanError(f"model {model.name}: {model.layers} layers are not the groups of its weights")
    if model.features != prod(module.shape) * bool(module.shape) and not module.sample:
        raise PlanError(f"model {model.name}: {model.features} features are not {shorten(list(module.shape))}")
    if plan.checkpoint_every > 1 or plan.reentrant:
        raise PlanError(
            f"{model.name}: blocks of a module are checkpointed one by one, in the form that is not reentrant"
        )
    if plan.micro_batch < 1 and (model.features or plan.tokens or module.sample):
        raise PlanError(f"micro batch {plan.micro_batch} must be at least 1")
    if (plan.tokens > 0) != (model.family == "token-module"):
        raise PlanError(f"tokens {plan.tokens}: a module that reads tokens needs a number of them, others none")


def buffers(plan: Plan) -> list[tuple[str, tuple[int, ...], str]]:
    low = plan.precision_row.weights
    return [(buffer.name, buffer.shape, buffer.dtype or low) for buffer in plan.model.module.buffers]


def work(t: Tape, plan: Plan, group: str, x: Tensor) -> Tensor:
    """Uses every weight of a group once; what comes out holds nothing."""
    weights = [weight for weight in t.weights.values() if weight.group == group]
    if not weights:
        return x

    def backward(node: Node, grads: list[Gradient]) -> list[Gradient]:
        made: list[Gradient] = [t.allocate(f"{group} input gradient", (0,), t.compute_dtype, "temporary")]
        for place, weight in enumerate(weights, 1):
            wanted = node.wants(place)
            made.append(
                t.allocate(f"{weight.name} gradient", weight.shape, t.dtype_of(weight), "gradients", batched=False)
                if wanted
                else None
            )
        return made

    edges: list[Edge] = [None if x.node is None else (x.node, x.slot), *weights]
    return t.output(f"{group} output", (0,), t.compute_dtype, t.node(edges, backward))


def blocks(t: Tape, plan: Plan) -> list[Block]:
    groups = dict.fromkeys(weight.group for weight in plan.model.module.weights if weight.group != ROOT)
    return [(group, partial(work, t, plan, group)) for group in groups]


MODULE = Family(
    name="module",
    summary="a module of the user's own",
    reads="features",
    drops=False,
    fields=("module", "layers", "features", "classes", "vocab", "context"),
    check=check,
    buffers=buffers,
    unplayed=True,
    weights=lambda model: list(model.module.weights),
    enter=lambda t, plan, x: work(t, plan, ROOT, x),
    blocks=blocks,
    leave=lambda t, plan, x: x,
)
TOKEN_MODULE = dataclasses.replace(MODULE, name="token-module", summary="a module of the user's own", reads="tokens")
