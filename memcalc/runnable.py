"""Whether what others make can run a plan here: DeepSpeed and what it builds, and accelerate; looked at without importing them."""

from __future__ import annotations

import importlib.util
import os
import shutil

from memcalc import extensions
from memcalc.errors import PlanError, RunError
from memcalc.plan import Plan

__all__ = ["require_accelerate", "require_engine"]

_LEAVE_OUT = "leave out --accelerate"


def require_engine(plan: Plan) -> None:
    """Raises RunError where what runs the plan's strategy is not installed, or cannot be built; looks without importing it."""
    if plan.strategy_row.zero_stage is None:
        return
    if importlib.util.find_spec("deepspeed") is None:
        raise RunError(f"{plan.strategy} needs deepspeed, which is not installed: pip install deepspeed")
    compiler = os.environ.get("CXX", "c++")
    if plan.device == "cpu" and shutil.which(compiler) is None:
        # deepspeed/comm/torch.py, build_shm_op, builds its shared-memory operations when it starts on a CPU.
        raise RunError(
            f"{plan.strategy} on the CPU needs a C++ compiler, and {compiler} is none; install g++ or set CXX"
        )
    if plan.device == "cpu" and shutil.which("ninja") is None and importlib.util.find_spec("ninja") is None:
        raise RunError(
            f"{plan.strategy} on the CPU needs ninja, which builds what DeepSpeed takes there: pip install ninja"
        )
    if plan.device == "cpu" and (left := extensions.blocking()):
        raise RunError(
            f"a build of DeepSpeed's was killed and left a lock on which {plan.strategy} would wait for ever: "
            f"{extensions.cure(left)}"
        )


def require_accelerate(plan: Plan) -> None:
    """Raises PlanError where accelerate would run the plan in another way than said, RunError where it is not installed."""
    row, layout = plan.strategy_row, plan.layout
    if row.gathers and plan.device == "cpu":
        # accelerate/state.py, AcceleratorState: FSDP only where the device is no CPU.
        raise PlanError("accelerate on the CPU makes DDP of FSDP without a word; take ddp, or leave out --accelerate")
    if row.name not in ("single", "ddp") and row.zero_stage is None and not row.gathers:
        raise PlanError(
            f"accelerate is put around single, ddp, FSDP and DeepSpeed, not around {row.name}; {_LEAVE_OUT}"
        )
    if layout.model_parallel > 1:
        raise PlanError(f"accelerate is put around whole models, not around divided ones; {_LEAVE_OUT}")
    if row.replicates and plan.fsdp.version == "1" and plan.fsdp.groups(plan) != plan.nodes:
        # accelerator.py, prepare_model, gives FSDP 1 no mesh: a copy of the shards is in every machine.
        raise PlanError(
            f"accelerate keeps one copy of FSDP 1's shards on each machine, not {plan.fsdp.groups(plan)} on {plan.nodes}; "
            f"take --fsdp-version 2, or {_LEAVE_OUT}"
        )
    if plan.precision_row.autocast:
        _require_autocast(plan)
    if importlib.util.find_spec("accelerate") is None:
        raise RunError("accelerate is not installed: pip install accelerate")


def _require_autocast(plan: Plan) -> None:
    """Raises PlanError where accelerate's mixed precision is another than the plan's."""
    row = plan.strategy_row
    if plan.precision_row.loss_scaling:
        # accelerator.py, __init__: with fp16 on a CPU there is no autocast and no scaler; elsewhere a scaler of its own.
        said = (
            "trains in float32 without a word"
            if plan.device == "cpu"
            else "keeps a scale that no checkpoint here holds"
        )
        raise PlanError(f"accelerate with {plan.precision} on {plan.device} {said}; take amp-bf16, or {_LEAVE_OUT}")
    if row.gathers and plan.fsdp.version == "1":
        # accelerator.py, prepare_model: native_amp wraps forward whatever wraps the model then.
        raise PlanError(
            f"accelerate runs FSDP 1 under torch.autocast beside FSDP's own policy, which is not counted; take "
            f"--fsdp-version 2, or {_LEAVE_OUT}"
        )
    if row.gathers and plan.reduce_dtype != plan.precision_row.compute:
        # utils/dataclasses.py, FullyShardedDataParallelPlugin.set_mixed_precision
        raise PlanError(
            f"accelerate reduces gradients in {plan.precision_row.compute}, the plan in {plan.reduce_dtype}; make it with "
            f"--reduce-dtype compute, or {_LEAVE_OUT}"
        )
    if not row.gathers and plan.model.says_words and not plan.loss.float32_output:
        # utils/operations.py, ConvertOutputsToFp32
        raise PlanError(
            f"accelerate makes the outputs of autocast float32; make the plan with --float32-logits, or {_LEAVE_OUT}"
        )
