"""A full copy per rank; gradients are averaged in buckets while backward runs.

torchrun --standalone --nproc-per-node 2 -m trainers PLAN.json OUT   # a plan with "strategy": "ddp"
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from memcalc.plan import Plan
from trainers import optimizers
from trainers.backends import Prepared, device_of
from trainers.models import materialise

__all__ = ["accumulation", "prepare", "replicate", "wrap"]


def prepare(model: nn.Module, plan: Plan, mesh: DeviceMesh, seed: int) -> Prepared:
    """DistributedDataParallel around the model."""
    replica = replicate(model, plan, mesh, seed)
    optimizer = optimizers.make(replica.parameters(), plan)
    return Prepared(model=replica, optimizer=optimizer, states=optimizer, accumulate=accumulation(replica, plan))


def accumulation(replica: DistributedDataParallel, plan: Plan) -> Callable[[], AbstractContextManager[object]]:
    """What wraps all micro batches of a step but the last.

    A static graph is learnt in the first backward pass, which has to send gradients: within no_sync torch ends there
    with "expect_autograd_hooks_ INTERNAL ASSERT FAILED" (pytorch issue 143580, open in torch 2.13).
    So the first micro batch of the run is sent by itself. What is sent is a mean of all ranks, so that the sum of the
    micro batches is the same.
    """
    if not plan.static_graph:
        return replica.no_sync
    learnt = False

    def accumulate() -> AbstractContextManager[object]:
        nonlocal learnt
        first, learnt = not learnt, True
        return contextlib.nullcontext() if first else replica.no_sync()

    return accumulate


def replicate(model: nn.Module, plan: Plan, mesh: DeviceMesh, seed: int) -> DistributedDataParallel:
    """The model on this rank's device, in DDP with the plan's buckets."""
    materialise(model, plan, device_of(mesh), seed)
    return wrap(model, plan, mesh)


def wrap(model: nn.Module, plan: Plan, mesh: DeviceMesh) -> DistributedDataParallel:
    """DDP around what is on this rank's device."""
    device = device_of(mesh)
    return DistributedDataParallel(
        model,
        device_ids=[device] if device.type == "cuda" else None,
        process_group=mesh.get_group(),
        bucket_cap_mb=plan.bucket_mb,
        gradient_as_bucket_view=plan.bucket_views,
        static_graph=plan.static_graph,
        # Every rank has made the same values; sending them round would take a second copy of the model.
        init_sync=False,
    )
