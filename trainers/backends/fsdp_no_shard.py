"""FSDP's first form with nothing divided: flat parameters per block, gradients averaged as a whole.

torchrun --standalone --nproc-per-node 2 -m trainers PLAN.json OUT   # a plan with "strategy": "fsdp-no-shard"
"""

from __future__ import annotations

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
from torch.distributed.fsdp.wrap import CustomPolicy

from memcalc.plan import Plan
from trainers import optimizers
from trainers.backends import Prepared, device_of
from trainers.models import materialise, units

__all__ = ["prepare"]


def prepare(model: nn.Module, plan: Plan, mesh: DeviceMesh, seed: int) -> Prepared:
    """FullyShardedDataParallel with NO_SHARD around each block and the rest."""
    device = device_of(mesh)
    materialise(model, plan, device, seed)
    wrapped = FullyShardedDataParallel(
        model,
        process_group=mesh.get_group(),
        sharding_strategy=ShardingStrategy.NO_SHARD,
        auto_wrap_policy=CustomPolicy(set(units(model, plan)).__contains__),
        use_orig_params=True,
        device_id=device,
    )
    optimizer = optimizers.make(wrapped.parameters(), plan)
    return Prepared(
        model=wrapped, optimizer=optimizer, states=optimizer, accumulate=wrapped.no_sync, clip=wrapped.clip_grad_norm_
    )
