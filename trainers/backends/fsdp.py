"""Parameters, gradients and states divided by rows (FSDP2); blocks are gathered when they are used.

torchrun --standalone --nproc-per-node 2 -m trainers PLAN.json OUT   # "strategy": "fsdp-full-shard" or "fsdp-shard-grad-op"
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from memcalc.plan import Plan
from trainers import optimizers
from trainers.backends import Prepared, composed_mesh, device_of, sharding_mesh
from trainers.backends.tensor_parallel import divide
from trainers.models import dtype_of, materialise, units

__all__ = ["prepare", "shard"]


def shard(model: nn.Module, blocks: Iterable[nn.Module], plan: Plan, mesh: DeviceMesh) -> FSDPModule:
    """``fully_shard`` each block, then the rest as the root."""
    precision = plan.precision_row
    policy = MixedPrecisionPolicy(
        param_dtype=dtype_of(precision.compute) if precision.autocast else None,
        reduce_dtype=dtype_of(plan.reduce_dtype),
    )
    pinned = plan.offload.pin_memory and mesh.device_type == "cuda"
    offload = CPUOffloadPolicy(pin_memory=pinned) if plan.offload.on else OffloadPolicy()
    for unit in blocks:
        fully_shard(
            unit, mesh=mesh, mp_policy=policy, offload_policy=offload, reshard_after_forward=plan.strategy_row.reshards
        )
    # The root stays gathered from forward to backward, which is torch's default: it would be needed again at once.
    return fully_shard(model, mesh=mesh, mp_policy=policy, offload_policy=offload)


def prepare(model: nn.Module, plan: Plan, mesh: DeviceMesh, seed: int) -> Prepared:
    """Products are divided first, then parameters; only shards are ever given memory."""
    if plan.layout.tensor > 1:
        divide(model, plan, composed_mesh(mesh, plan)["tensor"])
    root = shard(model, units(model, plan), plan, sharding_mesh(mesh, plan))
    materialise(model, plan, torch.device("cpu") if plan.offload.on else device_of(mesh), seed)
    optimizer = optimizers.make(model.parameters(), plan)

    @contextmanager
    def accumulate() -> Iterator[None]:
        root.set_requires_gradient_sync(plan.fsdp.sync_every_micro_batch)
        try:
            yield
        finally:
            root.set_requires_gradient_sync(True)

    def reshard() -> None:
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    return Prepared(
        model=model,
        optimizer=optimizer,
        states=optimizer,
        accumulate=accumulate,
        reshard=reshard,
        casts_itself=True,
    )
