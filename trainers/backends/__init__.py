"""How each strategy is applied to a model from outside: one file, one function ``prepare``, each.

    prepare(model, plan, mesh, seed) -> Prepared

``model`` is on meta; what comes back has its memory, its first values and its optimizer.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from memcalc.plan import Plan

__all__ = ["Prepared", "device_of", "prepare"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Prepared:
    """A model ready to train, and the few things in which strategies differ."""

    model: nn.Module
    """What to call."""
    optimizer: Optimizer
    """What to step."""
    states: Optimizer
    """The optimizer that holds this rank's states; another one only where they are divided by tensors."""
    accumulate: Callable[[], AbstractContextManager[object]] = contextlib.nullcontext
    """Wraps all micro batches of a step but the last: gradients stay on the rank."""
    reshard: Callable[[], None] = lambda: None
    """Gives back what a forward pass without backward left gathered."""
    casts_itself: bool = False
    """The wrapper casts to the compute dtype, so autocast must stay off."""


def prepare(model: nn.Module, plan: Plan, mesh: DeviceMesh, seed: int) -> Prepared:
    """Apply the plan's strategy with the backend its row names."""
    name = "tensor_parallel" if plan.layout.tensor > 1 else plan.strategy_row.backend
    backend = importlib.import_module(f"{__name__}.{name}")
    prepared = backend.prepare(model, plan, mesh, seed)
    assert isinstance(prepared, Prepared)
    return prepared


def device_of(mesh: DeviceMesh) -> torch.device:
    """This rank's device."""
    return (
        torch.device("cuda", torch.cuda.current_device())
        if mesh.device_type == "cuda"
        else torch.device(mesh.device_type)
    )
