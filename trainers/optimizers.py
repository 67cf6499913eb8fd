"""The classes behind memcalc's optimizer names."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from memcalc.errors import PlanError
from memcalc.hyperparameters import SCALING, read_coefficients, read_scaling
from memcalc.plan import Plan
from memcalc.training import Training

__all__ = ["CLASSES", "arguments", "make", "scaler_options", "set_coefficients"]

CLASSES: dict[str, tuple[type[Optimizer], dict[str, Any]]] = {
    "adadelta": (torch.optim.Adadelta, {}),
    "adafactor": (torch.optim.Adafactor, {}),
    "adagrad": (torch.optim.Adagrad, {}),
    "adam": (torch.optim.Adam, {}),
    "adamax": (torch.optim.Adamax, {}),
    "adamw": (torch.optim.AdamW, {}),
    "amsgrad": (torch.optim.Adam, {"amsgrad": True}),
    "asgd": (torch.optim.ASGD, {}),
    "nadam": (torch.optim.NAdam, {}),
    "radam": (torch.optim.RAdam, {}),
    "rmsprop": (torch.optim.RMSprop, {}),
    "rmsprop-centered": (torch.optim.RMSprop, {"centered": True}),
    "rmsprop-momentum": (torch.optim.RMSprop, {"momentum": 0.9}),
    "rprop": (torch.optim.Rprop, {}),
    "sgd": (torch.optim.SGD, {}),
    "sgd-momentum": (torch.optim.SGD, {"momentum": 0.9}),
    "sgd-nesterov": (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
}
_L2 = 1e-2  # a usual weight decay; only that it is not 0 changes memory
_KINDS = {"foreach": {"foreach": True}, "for-loop": {"foreach": False}, "fused": {"fused": True}}


def arguments(plan: Plan) -> tuple[type[Optimizer], dict[str, Any]]:
    """The plan's optimizer class and its keyword arguments. Raises PlanError where torch has none."""
    if plan.optimizer not in CLASSES:
        known = ", ".join(sorted(CLASSES))
        raise PlanError(
            f"{plan.optimizer} can be estimated but not trained: torch has no such optimizer; trainable: {known}"
        )
    kind, fixed = CLASSES[plan.optimizer]
    decay = {"weight_decay": _L2} if plan.update.l2 else {}
    return kind, fixed | decay | _KINDS[plan.optimizer_kind]


def make(parameters: Iterable[Tensor], plan: Plan) -> Optimizer:
    """The plan's optimizer. Its learning rate is set before every step, by the loop's schedule."""
    kind, options = arguments(plan)
    return kind(parameters, **options)


def set_coefficients(optimizer: Any, settings: Training) -> None:
    """Give an optimizer, whatever wraps it, the numbers that the run is said to take; they stand in its groups."""
    if settings.coefficients:
        for group in optimizer.param_groups:
            group.update(read_coefficients(settings.coefficients))


def scaler_options(settings: Training) -> dict[str, Any]:
    """What a GradScaler is made with: DeepSpeed's ``initial_scale_power`` and ``loss_scale_window`` in torch's words.

    Without a word of them torch's own defaults stand.

    >>> scaler_options(Training(scaling='{"initial_scale_power": 8}'))
    {'init_scale': 256.0, 'growth_interval': 1000}
    """
    if not settings.scaling:
        return {}
    said = {**SCALING, **read_scaling(settings.scaling)}
    return {"init_scale": 2.0 ** said["initial_scale_power"], "growth_interval": said["loss_scale_window"]}
