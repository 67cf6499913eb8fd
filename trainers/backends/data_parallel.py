"""One process for all GPUs (nn.DataParallel): a replica on each for every step, outputs and loss on the first.

torchrun --standalone --nproc-per-node 1 -m trainers PLAN.json OUT   # a plan with "strategy": "data-parallel"
"""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from memcalc.errors import RunError
from memcalc.plan import Plan
from trainers import optimizers
from trainers.backends import Prepared, device_of
from trainers.models import materialise

__all__ = ["prepare"]


def prepare(model: nn.Module, plan: Plan, mesh: DeviceMesh, seed: int) -> Prepared:
    """DataParallel around the model. Raises RunError where it would run it on one device without a word."""
    if mesh.device_type != "cuda" or torch.cuda.device_count() < plan.ranks:
        # torch/nn/parallel/data_parallel.py: without GPUs forward calls the module as it is.
        raise RunError(f"nn.DataParallel divides batches over GPUs; {plan.ranks} are needed, and not here: take ddp")
    materialise(model, plan, device_of(mesh), seed)
    optimizer = optimizers.make(model.parameters(), plan)
    replicas = nn.DataParallel(model, device_ids=list(range(plan.ranks)))
    return Prepared(model=replicas, optimizer=optimizer, states=optimizer)
