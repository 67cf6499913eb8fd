"""A strategy put around the model by accelerate's ``Accelerator.prepare`` (the extra ``accelerate``).

torchrun --standalone --nproc-per-node 2 -m trainers PLAN.json OUT --accelerate   # a plan with "strategy": "ddp"

What accelerate did is looked at and not believed: it takes another way than the one asked for where a device has none.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from memcalc.errors import RunError
from memcalc.plan import Plan
from trainers import optimizers
from trainers.backends import Prepared, device_of
from trainers.models import materialise, units

__all__ = ["prepare"]


def prepare(model: nn.Module, plan: Plan, mesh: DeviceMesh, seed: int) -> Prepared:
    """``Accelerator.prepare`` of model and optimizer. Raises RunError when the outcome is not the plan's strategy."""
    try:
        import accelerate
    except ImportError as error:
        raise RunError(f"accelerate cannot be imported ({error}); pip install accelerate") from None
    blocks = sorted({type(unit).__name__ for unit in units(model, plan)})
    materialise(model, plan, device_of(mesh), seed)
    optimizer = optimizers.make(model.parameters(), plan)
    cpu, gathers = mesh.device_type == "cpu", plan.strategy_row.gathers
    handlers: list[Any] = [
        accelerate.DistributedDataParallelKwargs(
            bucket_cap_mb=plan.bucket_mb, gradient_as_bucket_view=plan.bucket_views, static_graph=plan.static_graph
        )
    ]
    plugin = None
    if gathers and not cpu:
        plugin = accelerate.FullyShardedDataParallelPlugin(
            fsdp_version=2,
            reshard_after_forward=plan.strategy_row.reshards,
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=blocks,
        )
    accelerator = accelerate.Accelerator(cpu=cpu, mixed_precision="no", kwargs_handlers=handlers, fsdp_plugin=plugin)
    wrapped, stepper = accelerator.prepare(model, optimizer)
    wanted: Any = FSDPModule if gathers else DistributedDataParallel if plan.ranks > 1 else type(model)
    if not isinstance(wrapped, wanted):
        made = f"{accelerator.distributed_type.value} with a {type(wrapped).__name__}"
        raise RunError(
            f"accelerate made {made} of {plan.strategy}; a run that is another one than planned is not started"
        )
    return Prepared(
        model=wrapped,
        optimizer=stepper,
        states=stepper.optimizer,
        accumulate=lambda: accelerator.no_sync(wrapped),
        backward=accelerator.backward,
    )
