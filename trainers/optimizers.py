"""The classes behind memcalc's optimizer names."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from memcalc.errors import PlanError
from memcalc.plan import Plan

__all__ = ["arguments", "make"]

_CLASSES: dict[str, tuple[type[Optimizer], dict[str, Any]]] = {
    "adafactor": (torch.optim.Adafactor, {}),
    "adagrad": (torch.optim.Adagrad, {}),
    "adam": (torch.optim.Adam, {}),
    "adamw": (torch.optim.AdamW, {}),
    "amsgrad": (torch.optim.Adam, {"amsgrad": True}),
    "rmsprop": (torch.optim.RMSprop, {}),
    "sgd": (torch.optim.SGD, {}),
    "sgd-momentum": (torch.optim.SGD, {"momentum": 0.9}),
}
_KINDS = {"foreach": {"foreach": True}, "for-loop": {"foreach": False}, "fused": {"fused": True}}


def arguments(plan: Plan) -> tuple[type[Optimizer], dict[str, Any]]:
    """The plan's optimizer class and its keyword arguments. Raises PlanError where torch has none."""
    if plan.optimizer not in _CLASSES:
        known = ", ".join(sorted(_CLASSES))
        raise PlanError(
            f"{plan.optimizer} can be estimated but not trained: torch has no such optimizer; trainable: {known}"
        )
    kind, fixed = _CLASSES[plan.optimizer]
    return kind, fixed | _KINDS[plan.optimizer_kind]


def make(parameters: Iterable[Tensor], plan: Plan) -> Optimizer:
    """The plan's optimizer. Its learning rate is set before every step, by the loop's schedule."""
    kind, options = arguments(plan)
    return kind(parameters, **options)
