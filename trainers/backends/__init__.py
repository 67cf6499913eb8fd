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
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.optim import Optimizer

from memcalc.plan import Plan

__all__ = ["Prepared", "device_of", "hybrid_mesh", "prepare"]


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
    divided = "tensor_parallel" if plan.layout.tensor > 1 else plan.strategy_row.backend
    name = "fsdp_1" if plan.strategy_row.gathers and plan.fsdp.version == "1" else divided
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


def hybrid_mesh(mesh: DeviceMesh, plan: Plan) -> DeviceMesh:
    """The same ranks in groups: shards lie within one, and every group has all of them."""
    shape = (plan.ranks // plan.shards, plan.shards)
    return init_device_mesh(mesh.device_type, shape, mesh_dim_names=("replicate", "shard"))
