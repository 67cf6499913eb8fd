"""Batches for a module of the user's own: what its sample callable makes, or memcalc's data in the shape it takes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from memcalc.data import Samples
from memcalc.errors import InputError, shorten
from memcalc.plan import Plan
from trainers.factories import call

__all__ = ["called_with", "counted", "pair", "sampled", "tensors", "zeros"]

_STEPS = 1000  # an epoch's length of what has no end


def counted(plan: Plan) -> Samples:
    """As many samples as there is no end to: the callable makes each batch anew."""

    def take(indices: NDArray[np.int64]) -> Any:
        raise AssertionError("batches come from the callable")

    return Samples(count=plan.global_batch * _STEPS, take=take, source=plan.model.module.sample)


def sampled(plan: Plan, count: int, device: torch.device) -> tuple[Any, Any]:
    """A batch that the plan's callable makes of ``count`` samples, on a device; float32 inputs in the dtype of the weights.

    Raises MemcalcError.
    """
    sample = plan.model.module.sample
    inputs, targets = pair(call(sample, count))
    if not any(count in tensor.shape[:2] for tensor in tensors(inputs)):  # in the second place where time comes first
        shapes = ", ".join(shorten(tuple(tensor.shape)) for tensor in tensors(inputs)[:4])
        raise InputError(f"{sample} was asked for {count} samples and gave tensors of {shapes}, which are not so many")
    return to(inputs, device, getattr(torch, plan.precision_row.weights)), to(targets, device)


def called_with(plan: Plan, inputs: NDArray[Any], targets: NDArray[np.int64]) -> tuple[NDArray[Any], NDArray[np.int64]]:
    """memcalc's samples in the shape a module takes; one class of those it has where it gives one score a class.

    A model that takes labels itself shifts them itself, as those of transformers do: it gets what it reads.
    """
    own, classes = plan.model.module, plan.model.classes
    if own.shape:
        return inputs.reshape(len(inputs), *own.shape), targets
    if classes:
        return inputs, targets[:, -1] % classes
    return inputs, inputs if own.arguments else targets


def zeros(plan: Plan, count: int, device: torch.device) -> tuple[Any, Any]:
    """A batch of ``count`` samples of the plan's shapes, all zeros; of a sample callable, what it makes."""
    own, model = plan.model.module, plan.model
    if own.sample:
        return sampled(plan, count, device)
    if model.family == "token-module":
        inputs = torch.zeros(count, plan.tokens, dtype=torch.int64, device=device)
        targets = torch.zeros(inputs.shape[: 2 - bool(model.classes)], dtype=torch.int64, device=device)
    else:
        dtype = getattr(torch, plan.precision_row.weights)
        inputs = torch.zeros(count, *own.shape, dtype=dtype, device=device)
        targets = torch.zeros(count, dtype=torch.int64, device=device)
    return (dict(zip(own.arguments, (inputs, targets), strict=True)), None) if own.arguments else (inputs, targets)


def pair(batch: Any) -> tuple[Any, Any]:
    """Inputs and targets of what a sample callable returned: a pair, or inputs alone. Raises InputError.

    >>> pair({"x": torch.zeros(2)})
    ({'x': tensor([0., 0.])}, None)
    """
    if isinstance(batch, tuple | list) and len(batch) == 2:
        batch, targets = batch
    else:
        targets = None
    if not tensors(batch):
        raise InputError(f"the sample holds no tensor to call the module with; it is of type {type(batch).__name__}")
    return batch, targets


def tensors(value: Any) -> list[Tensor]:
    """Every tensor in a batch."""
    if isinstance(value, Tensor):
        return [value]
    parts = value.values() if isinstance(value, Mapping) else value if isinstance(value, tuple | list) else ()
    return [tensor for part in parts for tensor in tensors(part)]


def to(value: Any, device: torch.device, dtype: torch.dtype = torch.float32) -> Any:
    """A batch on a device; what is float32 in it becomes ``dtype``."""
    if isinstance(value, Tensor):
        return value.to(device, dtype if value.dtype == torch.float32 else value.dtype)
    if isinstance(value, Mapping):
        return {key: to(part, device, dtype) for key, part in value.items()}
    return type(value)(to(part, device, dtype) for part in value) if isinstance(value, tuple | list) else value
