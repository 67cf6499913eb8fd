"""DDP with the optimizer states divided: each rank updates some whole tensors and sends them to the others.

torchrun --standalone --nproc-per-node 2 -m trainers PLAN.json OUT   # a plan with "strategy": "zero-1"
"""

from __future__ import annotations

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.optim import ZeroRedundancyOptimizer

from memcalc.plan import Plan
from trainers import optimizers
from trainers.backends import Prepared
from trainers.backends.ddp import accumulation, replicate

__all__ = ["prepare"]


def prepare(model: nn.Module, plan: Plan, mesh: DeviceMesh, seed: int) -> Prepared:
    """DistributedDataParallel around the model, ZeroRedundancyOptimizer around the optimizer."""
    replica = replicate(model, plan, mesh, seed)
    kind, options = optimizers.arguments(plan)
    optimizer = ZeroRedundancyOptimizer(
        [each for each in replica.parameters() if each.requires_grad],
        optimizer_class=kind,
        process_group=mesh.get_group(),
        **options,
    )
    return Prepared(model=replica, optimizer=optimizer, states=optimizer.optim, accumulate=accumulation(replica, plan))
