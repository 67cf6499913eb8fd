"""Words shared by the tests of published figures: units, sizes of named tensors, shares of a timeline."""

from __future__ import annotations

import dataclasses
from typing import Any

from memcalc.ledger import ledger
from memcalc.models import MODELS, Model
from memcalc.plan import Plan
from memcalc.timeline import Timeline

__all__ = ["GB", "GIB", "MB", "MIB", "kept_by_a_layer", "largest", "parameters", "peak", "sized", "trained"]

KIB, MIB, GIB = 2**10, 2**20, 2**30
MB, GB = 10**6, 10**9


def sized(count: int, layers: int = 0) -> Model:
    """A model known by its parameter count alone."""
    return Model(name=f"{count:,} parameters", family="size", parameters=count, layers=layers)


def trained(model: Model | str, **fields: Any) -> Plan:
    """A plan of one sample of the model's context unless said otherwise."""
    model = MODELS[model] if isinstance(model, str) else model
    defaults = {"tokens": model.context} if model.context else {}
    return Plan(model=model, **{"micro_batch": 1} | defaults | fields)


def parameters(plan: Plan) -> int:
    return sum(weight.numel for weight in plan.family.weights(plan.model))


def peak(plan: Plan) -> int:
    return ledger(plan).peak().bytes


def largest(timeline: Timeline, name: str) -> int:
    """Bytes of the largest tensor of that name."""
    sizes = [int(timeline.delta[timeline.ident == i].max()) for i, n in enumerate(timeline.names) if n == name]
    return max(sizes)


def kept_by_a_layer(plan: Plan, moment: str = "loss") -> int:
    """Activation bytes that one more layer keeps from forward to backward."""
    count = plan.model.layers
    fewer, more = (
        dataclasses.replace(plan, model=dataclasses.replace(plan.model, layers=n)) for n in (count, count + 1)
    )
    kept = [ledger(each).at_moment(moment, "activations") for each in (fewer, more)]
    return kept[1] - kept[0]
