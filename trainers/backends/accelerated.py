"""A strategy put around the model by accelerate's ``Accelerator.prepare`` (the extra ``accelerate``).

torchrun --standalone --nproc-per-node 2 -m trainers PLAN.json OUT --accelerate   # a plan with "strategy": "ddp"

What accelerate did is looked at and not believed: it takes another way than the one asked for where a device has none.
"""

from __future__ import annotations

import os
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

from memcalc.errors import RunError
from memcalc.plan import Plan
from memcalc.training import Training
from trainers import optimizers
from trainers.backends import Prepared, device_of
from trainers.models import materialise, units

__all__ = ["fsdp_plugin", "prepare"]

_USUAL = Training()
_SHARDING = {
    "fsdp-full-shard": "FULL_SHARD", "fsdp-shard-grad-op": "SHARD_GRAD_OP", "fsdp-hybrid-shard": "HYBRID_SHARD",
    "fsdp-hybrid-shard-grad-op": "HYBRID_SHARD_ZERO2",
}  # fmt: skip
_PREFETCH = {"pre": "BACKWARD_PRE", "post": "BACKWARD_POST", "none": "NO_PREFETCH"}


def prepare(model: nn.Module, plan: Plan, mesh: DeviceMesh, seed: int, settings: Training = _USUAL) -> Prepared:
    """``Accelerator.prepare`` of model and optimizer. Raises RunError when the outcome is not the plan's strategy."""
    try:
        import accelerate
    except ImportError as error:
        raise RunError(f"accelerate cannot be imported ({error}); pip install accelerate") from None
    _forget(accelerate)
    if plan.strategy_row.zero_stage is not None:
        return _deepspeed(model, plan, mesh, seed, settings)
    blocks = sorted({type(unit).__name__ for unit in units(model, plan)})
    named = zip(plan.weights, model.named_parameters(), strict=True)
    names = {found: weight.name for weight, (found, _) in named}
    materialise(model, plan, device_of(mesh), seed)
    cpu, gathers = mesh.device_type == "cpu", plan.strategy_row.gathers
    flat = gathers and plan.fsdp.version == "1"
    handlers: list[Any] = [
        accelerate.DistributedDataParallelKwargs(
            bucket_cap_mb=plan.bucket_mb, gradient_as_bucket_view=plan.bucket_views, static_graph=plan.static_graph
        )
    ]
    plugin = fsdp_plugin(plan, blocks) if gathers else None
    accelerator = accelerate.Accelerator(
        cpu=cpu, mixed_precision="bf16" if plan.precision == "amp-bf16" else "no", kwargs_handlers=handlers,
        fsdp_plugin=plugin, parallelism_config=_replicas(plan) if plan.strategy_row.replicates and not flat else None,
    )  # fmt: skip
    if flat:  # its parameters are new ones, of which the optimizer is made afterwards
        wrapped = accelerator.prepare(model)
        stepper = accelerator.prepare(optimizers.make(wrapped.parameters(), plan))
    else:
        wrapped, stepper = accelerator.prepare(model, optimizers.make(model.parameters(), plan))
    wanted: Any = (
        FullyShardedDataParallel
        if flat
        else FSDPModule
        if gathers
        else DistributedDataParallel
        if plan.ranks > 1
        else type(model)
    )
    _look(accelerator, wrapped, plan, isinstance(wrapped, wanted))
    common: dict[str, Any] = {"model": wrapped, "optimizer": stepper, "states": stepper.optimizer}
    common |= {"accumulate": lambda: accelerator.no_sync(wrapped), "backward": accelerator.backward}
    common |= {"casts_itself": True}  # by an autocast of its own, or FSDP's policy
    if flat:
        from trainers.backends.fsdp_1 import Saved

        saved = Saved(wrapped, stepper.optimizer, names)
        common |= {"state": saved.state, "restore": saved.restore, "whole": saved.whole}
        common |= {"divides_silently": True, "clip": wrapped.clip_grad_norm_}
    return Prepared(**common)


def fsdp_plugin(plan: Plan, blocks: list[str]) -> Any:
    """How accelerate shall shard, with all said that its environment would decide otherwise."""
    import accelerate

    words: dict[str, Any] = {"fsdp_version": 2, "reshard_after_forward": plan.strategy_row.reshards}
    if plan.fsdp.version == "1":
        words = {
            "fsdp_version": 1, "sharding_strategy": _SHARDING[plan.strategy], "backward_prefetch": _PREFETCH[plan.fsdp.backward_prefetch],
            "forward_prefetch": plan.fsdp.forward_prefetch, "use_orig_params": plan.fsdp.original_parameters,
            "limit_all_gathers": plan.fsdp.limit_all_gathers, "sync_module_states": False,
            "cpu_offload": plan.offload.on,
        }  # fmt: skip
    elif plan.offload.on:
        words["cpu_offload"] = CPUOffloadPolicy(pin_memory=plan.offload.pin_memory and plan.device == "cuda")
    else:
        words["cpu_offload"] = False
    return accelerate.FullyShardedDataParallelPlugin(
        **words,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=blocks,
        activation_checkpointing=False,  # the model's blocks are checkpointed already
        cpu_ram_efficient_loading=False,
    )


def _replicas(plan: Plan) -> Any:
    """Copies of the shards, as accelerate says them of FSDP 2."""
    import accelerate

    if not hasattr(accelerate, "ParallelismConfig"):
        raise RunError("accelerate replicates shards of FSDP 2 from release 1.10 on; pip install -U accelerate")
    groups = plan.fsdp.groups(plan)
    return accelerate.ParallelismConfig(dp_replicate_size=groups, dp_shard_size=plan.data_parallel // groups)


def _deepspeed(model: nn.Module, plan: Plan, mesh: DeviceMesh, seed: int, settings: Training) -> Prepared:
    """DeepSpeed's engine as accelerate initialises it; on the CPU only with ``cpu=False``, which switches it off."""
    import accelerate

    from trainers.backends.deepspeed import configuration, load, ops_of, optimizer_of, wrapped
    from trainers.backends.deepspeed_build import watched

    with watched(ops_of(plan)):
        deepspeed = load(mesh.device_type)
        materialise(model, plan, device_of(mesh), seed)
        if mesh.device_type == "cpu" and not deepspeed.comm.is_initialized():
            deepspeed.init_distributed(dist_backend="gloo", dist_init_required=False, verbose=False)
        plugin = accelerate.DeepSpeedPlugin(hf_ds_config=configuration(plan, settings), zero3_init_flag=False)
        accelerator = accelerate.Accelerator(deepspeed_plugin=plugin, gradient_accumulation_steps=plan.accumulation)
        _look(accelerator, model, plan, accelerator.device.type == mesh.device_type)
        engine, _ = accelerator.prepare(model, optimizer_of(model, plan))
    is_engine = isinstance(engine, deepspeed.DeepSpeedEngine)
    _look(accelerator, engine, plan, is_engine and engine.zero_optimization_stage() == plan.strategy_row.zero_stage)
    return wrapped(engine, plan)


def _look(accelerator: Any, made: nn.Module, plan: Plan, right: bool) -> None:
    if not right:
        said = f"{accelerator.distributed_type.value} on {accelerator.device.type} with a {type(made).__name__}"
        raise RunError(
            f"accelerate made {said} of {plan.strategy}; a run that is another one than planned is not started"
        )


def _forget(accelerate: Any) -> None:
    """Leave nothing that would decide in the plan's place: the state of an accelerator before this one, which all share,
    and settings that ``accelerate launch`` or a left-over environment hands over."""
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    for name in [name for name in os.environ if name.startswith(("ACCELERATE_", "FSDP_"))]:
        del os.environ[name]
