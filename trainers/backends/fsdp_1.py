"""FSDP's first form: a flat parameter for each block, divided over ranks, gathered when it is used.

memcalc validate runs it; checkpoints of its flat shards are not written, so memcalc launch does not.
"""

from __future__ import annotations

import contextlib

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import BackwardPrefetch, FullyShardedDataParallel, MixedPrecision, ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from memcalc.plan import Plan
from trainers import optimizers
from trainers.backends import Prepared, device_of, sharding_mesh
from trainers.models import dtype_of, materialise, units

__all__ = ["prepare"]

_PREFETCH = {"pre": BackwardPrefetch.BACKWARD_PRE, "post": BackwardPrefetch.BACKWARD_POST, "none": None}
_SHARDING = {
    "fsdp-full-shard": ShardingStrategy.FULL_SHARD,
    "fsdp-shard-grad-op": ShardingStrategy.SHARD_GRAD_OP,
    "fsdp-hybrid-shard": ShardingStrategy.HYBRID_SHARD,
    "fsdp-hybrid-shard-grad-op": ShardingStrategy._HYBRID_SHARD_ZERO2,
}


def prepare(model: nn.Module, plan: Plan, mesh: DeviceMesh, seed: int) -> Prepared:
    """FullyShardedDataParallel around each block and the rest."""
    device, precision = device_of(mesh), plan.precision_row
    materialise(model, plan, device, seed)
    policy = MixedPrecision(
        param_dtype=dtype_of(precision.compute) if precision.autocast else None,
        reduce_dtype=dtype_of(plan.reduce_dtype),
        # Buffers stay as they are, as fully_shard leaves them.
        buffer_dtype=None,
    )
    wrapped = FullyShardedDataParallel(
        model,
        device_mesh=sharding_mesh(mesh, plan),
        sharding_strategy=_SHARDING[plan.strategy],
        auto_wrap_policy=ModuleWrapPolicy({type(unit) for unit in units(model, plan)}),
        mixed_precision=policy,
        backward_prefetch=_PREFETCH[plan.fsdp.backward_prefetch],
        forward_prefetch=plan.fsdp.forward_prefetch,
        limit_all_gathers=plan.fsdp.limit_all_gathers,
        use_orig_params=True,
        device_id=device,
    )
    optimizer = optimizers.make(wrapped.parameters(), plan)
    return Prepared(
        model=wrapped,
        optimizer=optimizer,
        states=optimizer,
        accumulate=contextlib.nullcontext if plan.fsdp.sync_every_micro_batch else wrapped.no_sync,
        casts_itself=True,
    )
