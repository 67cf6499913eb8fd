"""Every model family beside its torch twin: the same weights. test_knobs.py has the real runs."""

from __future__ import annotations

import dataclasses

import pytest

from memcalc.models import FAMILIES, MODELS
from memcalc.plan import Plan
from trainers.models import build, units


@pytest.mark.parametrize(
    "name",
    [name for name, model in MODELS.items() if model.parameters == 0 and not FAMILIES[model.family].untrained(model)],
)
def test_the_twin_has_the_same_weights(name: str) -> None:
    """By shape and order, and by name: of the blocks to the letter."""
    model = MODELS[name]
    if model.layers > 24:
        model = dataclasses.replace(model, layers=2)
    made = Plan(model=model, tokens=model.context and 8, micro_batch=1, device="cpu")
    twin = build(made)
    weights = FAMILIES[model.family].weights(model)
    assert [(n, tuple(p.shape)) for n, p in twin.named_parameters()] == [(w.name, w.shape) for w in weights]
    groups = list(dict.fromkeys(w.group for w in weights if "." in w.group))
    assert len(units(twin, made)) == len(groups)
