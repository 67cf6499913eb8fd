"""A full copy per rank; gradients are averaged in buckets while backward runs.

torchrun --standalone --nproc-per-node 2 -m trainers PLAN.json OUT   # a plan with "strategy": "ddp"
"""

from __future__ import annotations

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from memcalc.plan import Plan
from trainers import optimizers
from trainers.backends import Prepared, device_of
from trainers.models import materialise

__all__ = ["prepare", "replicate", "wrap"]


def prepare(model: nn.Module, plan: Plan, mesh: DeviceMesh, seed: int) -> Prepared:
    """DistributedDataParallel around the model."""
    replica = replicate(model, plan, mesh, seed)
    optimizer = optimizers.make(replica.parameters(), plan)
    return Prepared(model=replica, optimizer=optimizer, states=optimizer, accumulate=replica.no_sync)


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
        # Every rank has made the same values; sending them round would take a second copy of the model.
        init_sync=False,
    )
