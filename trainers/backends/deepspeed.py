"""DeepSpeed's ZeRO, stages 0 to 3, by DeepSpeed itself (the extra ``deepspeed``).

torchrun --standalone --nproc-per-node 2 -m trainers PLAN.json OUT   # "strategy": "deepspeed-2", on the CPU too
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from memcalc.errors import RunError
from memcalc.extensions import DEEPSPEED_OPS, SWAP_OPS
from memcalc.hyperparameters import read_scaling
from memcalc.plan import Plan
from memcalc.training import Training
from trainers import optimizers
from trainers.backends import Prepared, device_of
from trainers.backends.deepspeed_build import show_ninja, watched
from trainers.backends.deepspeed_state import Masters, Saved, held
from trainers.models import materialise

__all__ = ["configuration", "load", "ops_of", "optimizer_of", "prepare", "wrapped"]

_USUAL = Training()


def configuration(plan: Plan, settings: Training = _USUAL) -> dict[str, Any]:
    """The plan as DeepSpeed's configuration, with every key said that changes memory or what is learned."""
    knobs, stage, precision = plan.deepspeed, plan.strategy_row.zero_stage or 0, plan.precision
    zero: dict[str, Any] = {
        "stage": stage,
        "reduce_bucket_size": knobs.reduce_bucket_size,
        "allgather_bucket_size": knobs.allgather_bucket_size,
        "overlap_comm": knobs.overlaps(stage),
        "contiguous_gradients": knobs.contiguous_gradients,
        "reduce_scatter": knobs.reduce_scatter,
        "round_robin_gradients": knobs.round_robin_gradients,
    }
    if stage == 3:
        zero |= {
            "stage3_param_persistence_threshold": knobs.persistence_threshold,
            "stage3_model_persistence_threshold": knobs.model_persistence_threshold,
            "stage3_prefetch_bucket_size": knobs.prefetch_bucket_size,
            "stage3_max_live_parameters": knobs.max_live_parameters,
            "stage3_max_reuse_distance": knobs.max_reuse_distance,
            "sub_group_size": knobs.sub_group_size,
        }
    found: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": plan.micro_batch,
        "gradient_accumulation_steps": plan.accumulation,
        "zero_optimization": zero | _offload(plan, settings.nvme_path),
        "zero_allow_untested_optimizer": True,  # any of torch's
        "zero_force_ds_cpu_optimizer": False,
        "gradient_clipping": 0.0,  # said, because releases differ: 0 by default, and 1 in 0.19
        "steps_per_print": 10**9,
    }
    if precision == "bf16-master":
        found["bf16"] = {"enabled": True}
    if precision == "fp16-master":
        found["fp16"] = {"enabled": True} | (read_scaling(settings.scaling) if settings.scaling else {})
    if knobs.grad_accum_dtype == "float32":
        found["data_types"] = {"grad_accum_dtype": "fp32"}
    return found


def _offload(plan: Plan, nvme: Path | None) -> dict[str, Any]:
    """Places on the host, and on a disk below ``nvme``. Raises RunError where that is not said."""
    offload, pinned = plan.offload, plan.offload.pin_memory and plan.device == "cuda"
    if offload.swaps and nvme is None:
        raise RunError("offload to NVMe needs a folder on a disk; give --nvme-path DIR")
    disk: dict[str, dict[str, Any]] = {
        "offload_optimizer": {"buffer_count": offload.optimizer_buffers},
        "offload_param": {
            "buffer_count": offload.parameter_buffers, "buffer_size": offload.parameter_buffer_size,
            "max_in_cpu": offload.max_in_cpu,
        },
    }  # fmt: skip
    places = {"offload_optimizer": offload.optimizer, "offload_param": offload.parameters}
    return {
        key: {"device": place, "pin_memory": pinned} | ({"nvme_path": str(nvme)} | disk[key] if place == "nvme" else {})
        for key, place in places.items()
        if place != "none"
    }


def load(kind: str) -> Any:
    """DeepSpeed, told which device it is for before it looks for one itself, and quiet."""
    if kind == "cpu":
        os.environ["DS_ACCELERATOR"] = "cpu"
        show_ninja()
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    try:
        import deepspeed
    except ImportError as error:
        raise RunError(f"deepspeed cannot be imported ({error}); pip install deepspeed") from None

    return deepspeed


class _Update:
    """The engine's step in the form of an optimizer: it clips, updates and drops gradients by itself."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        groups: list[dict[str, Any]] = self.engine.optimizer.param_groups
        return groups

    def step(self) -> None:
        """Update the weights."""
        self.engine.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Done by the engine."""


def prepare(model: nn.Module, plan: Plan, mesh: DeviceMesh, seed: int, settings: Training = _USUAL) -> Prepared:
    """The model in DeepSpeed's engine, which takes the plan's optimizer apart."""
    with watched(ops_of(plan)):
        deepspeed = load(mesh.device_type)
        materialise(model, plan, device_of(mesh), seed)
        if mesh.device_type == "cpu" and not deepspeed.comm.is_initialized():
            deepspeed.init_distributed(dist_backend="gloo", dist_init_required=False, verbose=False)
        engine, _, _, _ = deepspeed.initialize(
            model=model,
            optimizer=optimizer_of(model, plan),
            config=configuration(plan, settings),
            dist_init_required=False,
        )
    return wrapped(engine, plan)


def ops_of(plan: Plan) -> tuple[str, ...]:
    """What DeepSpeed builds for a plan when it first starts one of its kind."""
    return (DEEPSPEED_OPS if plan.device == "cpu" else ()) + (SWAP_OPS if plan.offload.swaps else ())


def optimizer_of(model: nn.Module, plan: Plan) -> Any:
    """The plan's optimizer. Its learning rate is 0 until the loop sets one: DeepSpeed makes a step of its own before."""
    optimizer = optimizers.make(model.parameters(), plan)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    return optimizer


def wrapped(engine: Any, plan: Plan) -> Prepared:
    """An engine as the loop takes it, whoever initialised it."""

    @contextlib.contextmanager
    def accumulate() -> Iterator[None]:
        engine.set_gradient_accumulation_boundary(False)
        try:
            yield
            engine.step()
        finally:
            engine.set_gradient_accumulation_boundary(True)

    def backward(loss: Tensor) -> None:
        engine.backward(loss, scale_wrt_gas=False)  # the loop has divided it already

    def clip(limit: float) -> None:
        engine._config.gradient_clipping = limit
        if hasattr(engine.optimizer, "clip_grad"):
            engine.optimizer.clip_grad = limit

    engine.set_gradient_accumulation_boundary(True)
    prepared = Prepared(
        model=engine,
        optimizer=_Update(engine),
        states=getattr(engine.optimizer, "optimizer", engine.optimizer),
        accumulate=accumulate,
        casts_itself=True,
        scales_itself=True,
        backward=backward,
        clip=clip,
        holds=lambda: held(engine, plan),
    )
    if not plan.strategy_row.zero_stage and not plan.precision_row.master:
        return prepared
    saved = (Saved if plan.strategy_row.zero_stage else Masters)(engine, plan)
    return replace(prepared, state=saved.state, restore=saved.restore, wake=saved.wake, whole=saved.whole)
