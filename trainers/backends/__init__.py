"""How each strategy is applied to a model from outside: one file, one function ``prepare``, each.

    prepare(model, plan, mesh, seed) -> Prepared

``model`` is on meta; what comes back has its memory, its first values and its optimizer.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.optim import Optimizer

from memcalc.plan import Plan
from memcalc.spec import Weight
from memcalc.training import Training

__all__ = ["Prepared", "composed_mesh", "device_of", "prepare", "sharding_mesh"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Prepared:
    """A model ready to train, and the few things in which strategies differ."""

    model: nn.Module
    """What to call."""
    optimizer: Any
    """What to step: an optimizer, or what looks like one."""
    states: Optimizer
    """The optimizer that holds this rank's states; another one only where they are divided by tensors."""
    accumulate: Callable[[], AbstractContextManager[object]] = contextlib.nullcontext
    """Wraps all micro batches of a step but the last: gradients stay on the rank."""
    reshard: Callable[[], None] = lambda: None
    """Gives back what a forward pass without backward left gathered."""
    casts_itself: bool = False
    """The wrapper casts to the compute dtype, so autocast must stay off."""
    scales_itself: bool = False
    """The wrapper scales 16-bit losses."""
    divides_silently: bool = False
    """Gradients are plain tensors of which each rank has a part, so that ranks must agree whether one is infinite."""
    weights: Sequence[Weight] | None = None
    """The weights of ``model`` in its order, where it is a part of the plan's model; None are all."""
    run_step: Callable[[Tensor, Tensor, Callable[[str], None]], Tensor] | None = None
    """``(inputs, targets, mark)``: forward and backward of all micro batches of a step by a schedule of its own, which says
    ``mark`` when a moment begins. Gives the mean loss on the ranks that have it, and 0 on the others."""
    loss: Callable[[Tensor, Tensor], Tensor] | None = None
    """The mean loss of a batch without backward, where it is not that of ``model``'s output."""
    backward: Callable[[Tensor], object] = Tensor.backward
    """Runs backward from a loss."""
    state: Callable[[], dict[str, Any]] | None = None
    """What a checkpoint holds of this rank by name, ``{"model": ..., "optimizer": ...}``; None is what ``model`` and
    ``states`` hold, whose parameters then are the plan's weights."""
    restore: Callable[[dict[str, Any]], object] | None = None
    """Takes back what ``state`` gave, filled from a checkpoint; None where that is the tensors themselves."""
    part_of: Callable[[Tensor, Tensor], Tensor] = lambda parameter, tensor: tensor
    """``(parameter, tensor of its shape)``: that tensor as a part of the whole one, where parameters are plain tensors of
    which each rank has a part."""
    wake: Callable[[], object] | None = None
    """Lets the optimizer make its states; None is a step of length 0."""
    whole: Callable[[str], Tensor] | None = None
    """One weight in full, on the first rank at least; all ranks ask for the same. None is a parameter of ``model``."""
    clip: Callable[[float], object] | None = None
    """Scales gradients down to a norm; None is ``clip_grad_norm_``."""
    holds: Callable[[], dict[str, list[Tensor]]] = dict
    """By category (parameters, gradients, optimizer) the tensors that a meter shall count in the place of the model's
    parameters, their gradients, and the tensors in ``states``; a category that is not among them is those."""


def prepare(model: nn.Module, plan: Plan, mesh: DeviceMesh, seed: int, *, settings: Training | None = None) -> Prepared:
    """Apply the plan's strategy with the backend its row names, or let accelerate do it where ``settings`` say so."""
    name = "accelerated" if settings is not None and settings.accelerate else _backend(plan)
    backend = importlib.import_module(f"{__name__}.{name}")
    # Only these two take more of how a run is trained than its seed: how losses are scaled, and where NVMe is.
    told = {"settings": settings} if settings is not None and name in ("accelerated", "deepspeed") else {}
    prepared = backend.prepare(model, plan, mesh, seed, **told)
    assert isinstance(prepared, Prepared)
    return prepared


def _backend(plan: Plan) -> str:
    if plan.layout.pipeline > 1:
        return "pipeline"
    if plan.strategy_row.gathers:
        return "fsdp_1" if plan.fsdp.version == "1" else "fsdp"
    return "tensor_parallel" if plan.layout.tensor > 1 else plan.strategy_row.backend


def device_of(mesh: DeviceMesh) -> torch.device:
    """This rank's device."""
    return (
        torch.device("cuda", torch.cuda.current_device())
        if mesh.device_type == "cuda"
        else torch.device(mesh.device_type)
    )


@cache
def _meshed(device_type: str, shape: tuple[int, ...]) -> DeviceMesh:
    return init_device_mesh(device_type, shape, mesh_dim_names=("replicate", "shard", "pipeline", "tensor"))


def composed_mesh(mesh: DeviceMesh, plan: Plan) -> DeviceMesh:
    """All ranks by what they share: copies of the shards, shards, stages of a pipeline, parts of products.

    Ranks of one pipeline, and of one tensor parallel, are next to each other and work on the same samples.
    """
    groups, layout = plan.fsdp.groups(plan), plan.layout
    return _meshed(mesh.device_type, (groups, plan.data_parallel // groups, layout.pipeline, layout.tensor))


def sharding_mesh(mesh: DeviceMesh, plan: Plan) -> DeviceMesh:
    """The ranks over which FSDP divides, in groups that each hold all shards where the strategy replicates."""
    return composed_mesh(mesh, plan)[("replicate", "shard") if plan.strategy_row.replicates else ("shard",)]
