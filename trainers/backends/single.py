"""One rank, nothing divided.

torchrun --standalone --nproc-per-node 1 -m trainers PLAN.json OUT   # a plan with "strategy": "single"
"""

from __future__ import annotations

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from memcalc.plan import Plan
from trainers import optimizers
from trainers.backends import Prepared, device_of
from trainers.models import materialise

__all__ = ["prepare"]


def prepare(model: nn.Module, plan: Plan, mesh: DeviceMesh, seed: int) -> Prepared:
    """The model as it is."""
    materialise(model, plan, device_of(mesh), seed)
    optimizer = optimizers.make(model.parameters(), plan)
    return Prepared(model=model, optimizer=optimizer, states=optimizer)
