"""Numbers of the update that change no sizes: an optimizer's coefficients, and how a 16-bit loss is scaled.

Both are kept as DeepSpeed's files say them, in JSON, and used by memcalc's own runs with any strategy that has the same
thing; what a strategy has not is refused before a run starts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from memcalc.errors import FileError, InputError, PlanError, UnknownNameError, shorten
from memcalc.files import read_json

if TYPE_CHECKING:
    from memcalc.plan import Plan

__all__ = ["COEFFICIENTS", "SCALING", "check_coefficients", "check_scaling", "read_coefficients", "read_scaling"]

_BETAS = ("adam", "adamax", "adamw", "amsgrad", "nadam", "radam")
_EPS = (*_BETAS, "adadelta", "adagrad", "rmsprop", "rmsprop-centered", "rmsprop-momentum")
_MOMENTUM = ("rmsprop-momentum", "sgd-momentum", "sgd-nesterov")
COEFFICIENTS: Mapping[str, tuple[str, ...]] = {
    "betas": _BETAS,
    "eps": _EPS,
    "weight_decay": (*_EPS, *_MOMENTUM[1:], "adafactor", "asgd", "sgd"),
    "momentum": _MOMENTUM,
}
"""By coefficient the optimizers that have it: the keys of their ``param_groups`` in torch.optim."""

SCALING: Mapping[str, Any] = {
    "loss_scale": 0, "initial_scale_power": 16, "loss_scale_window": 1000, "hysteresis": 2,
    "consecutive_hysteresis": False, "min_loss_scale": 1,
}  # fmt: skip
"""Keys of the block ``fp16`` with DeepSpeed's defaults (deepspeed/runtime/precision_config.py); ``loss_scale`` 0 is a
scale that follows the gradients."""
_OF_TORCH = ("initial_scale_power", "loss_scale_window")
"""What GradScaler has as well, as ``init_scale`` and ``growth_interval``."""


def read_coefficients(text: str) -> dict[str, Any]:
    """Coefficients by name. Raises InputError.

    >>> read_coefficients('{"betas": [0.9, 0.95], "weight_decay": 0.1}')
    {'betas': (0.9, 0.95), 'weight_decay': 0.1}
    """
    found = _read(text, "coefficients", COEFFICIENTS)
    for name, value in found.items():
        said = f"coefficients: {name} {shorten(value)}"
        if name == "betas":
            if not isinstance(value, list) or len(value) != 2 or not all(_number(each) and each < 1 for each in value):
                raise InputError(f"{said} must be two numbers from 0 to below 1, like [0.9, 0.999]")
            found[name] = tuple(map(float, value))
        elif not _number(value) or (name == "momentum" and value == 0):
            raise InputError(f"{said} must be a number {'above' if name == 'momentum' else 'of at least'} 0")
    return found


def check_coefficients(plan: Plan, text: str) -> None:
    """Raises PlanError for what the plan's optimizer has not, or what would change the memory that was counted."""
    found = read_coefficients(text) if text else {}
    for name in found:
        if plan.optimizer not in COEFFICIENTS[name]:
            raise PlanError(f"{plan.optimizer} has no {name}; of those named it has: {_known(plan.optimizer)}")
    decay = found.get("weight_decay")
    if decay is not None and not plan.optimizer_row.decoupled and bool(decay) != plan.update.l2:
        cure = "add --l2" if decay else "leave out --l2"
        raise PlanError(
            f"weight_decay {decay} of {plan.optimizer} is {'' if decay else 'not '}added to gradients; {cure}"
        )


def read_scaling(text: str) -> dict[str, Any]:
    """Keys of DeepSpeed's block ``fp16`` that are given. Raises InputError.

    >>> read_scaling('{"initial_scale_power": 12}')
    {'initial_scale_power': 12}
    """
    found = _read(text, "scaling", SCALING)
    for name, value in found.items():
        said = f"scaling: {name} {shorten(value)}"
        if isinstance(SCALING[name], bool):
            if not isinstance(value, bool):
                raise InputError(f"{said} is not true or false")
        elif not _number(value):
            raise InputError(f"{said} is not a number of at least 0")
        elif name != "loss_scale" and name != "min_loss_scale" and value != int(value):
            raise InputError(f"{said} is not a whole number")
    return found


def check_scaling(plan: Plan, text: str) -> None:
    """Raises PlanError where no loss is scaled, or torch's GradScaler would scale it in another way."""
    found = read_scaling(text) if text else {}
    if not found:
        return
    if not plan.precision_row.loss_scaling:
        raise PlanError(f"{plan.precision} scales no losses; leave out scaling {', '.join(found)}")
    if plan.strategy_row.zero_stage is None:
        for name, value in found.items():
            if name not in _OF_TORCH and value != SCALING[name]:
                raise PlanError(
                    f"scaling: {name} {value} is DeepSpeed's alone; torch's GradScaler, which {plan.strategy} takes, has "
                    f"{' and '.join(_OF_TORCH)}"
                )


def _known(optimizer: str) -> str:
    return ", ".join(name for name, having in COEFFICIENTS.items() if optimizer in having) or "none"


def _read(text: str, what: str, known: Mapping[str, Any]) -> dict[str, Any]:
    try:
        found = read_json(text, what)
    except FileError as error:
        raise InputError(str(error)) from None
    if not isinstance(found, dict):
        raise InputError(f"{what} {shorten(text)} is not a JSON object")
    for name in found:
        if name not in known:
            raise InputError(f"{what}: {UnknownNameError('key', name, known)}")
    return found


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value >= 0
