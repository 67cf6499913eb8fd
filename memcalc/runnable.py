"""Whether what others make can run a plan here: DeepSpeed and what it builds, and accelerate; looked at without importing them."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import resource
import shutil
from pathlib import Path

from memcalc import extensions
from memcalc.errors import FileError, PlanError, RunError
from memcalc.host import LEAST_SWAPPED, host_tensors
from memcalc.plan import Plan
from memcalc.precision import DTYPE_BYTES
from memcalc.units import format_bytes

__all__ = [
    "lost_gradient",
    "require_accelerate",
    "require_engine",
    "require_swap",
    "require_unlocked",
    "sector",
    "swapped_bytes",
]

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


def require_swap(plan: Plan, folder: Path | None) -> None:
    """Raises MemcalcError where a plan that offloads to NVMe cannot: no folder, no room, no libaio to build async_io with."""
    if folder is None:
        raise PlanError("the plan offloads to NVMe; give --nvme-path DIR, a folder on that disk")
    if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        raise FileError(f"--nvme-path {folder} is no folder that can be written; make it, or name another")
    needed, free = swapped_bytes(plan) // plan.nodes, shutil.disk_usage(folder).free
    if free < needed:
        raise FileError(f"{folder} has {format_bytes(free)} left; what is offloaded to it takes {format_bytes(needed)}")
    if lost := lost_gradient(plan, sector(folder)):
        raise PlanError(
            f"DeepSpeed would train without the gradient of {lost}: direct I/O cannot read it back to where it belongs, which "
            "DeepSpeed does not notice; take another number of ranks, or --offload-optimizer cpu"
        )
    locked, limit = (
        sum(each.size for each in host_tensors(plan) if each.apart),
        resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
    )
    if os.geteuid() and limit != resource.RLIM_INFINITY and limit < locked:
        raise RunError(
            f"DeepSpeed locks {format_bytes(locked)} of swap buffers in memory and may lock {format_bytes(limit)}: raise "
            "ulimit -l, or take fewer and smaller buffers (--offload-parameter-buffers, --offload-parameter-buffer-size)"
        )
    if not extensions.built("async_io") and not extensions.has_libaio():
        raise RunError(f"offload to NVMe needs libaio, which DeepSpeed builds its async_io with: {extensions.LIBAIO}")


def require_unlocked(plan: Plan) -> None:
    """Raises FileError where a build that was killed left a lock on which the plan's run would wait for ever."""
    builds = plan.strategy_row.zero_stage is not None and plan.device == "cpu"
    ops = (extensions.DEEPSPEED_OPS if builds else ()) + (extensions.SWAP_OPS if plan.offload.swaps else ())
    if ops and (left := extensions.blocking(ops=ops)):
        raise FileError(
            f"a build of DeepSpeed's was killed and left a lock on which {plan.strategy} would wait for ever: "
            f"{extensions.cure(left)}"
        )


def lost_gradient(plan: Plan, block: int) -> str:
    """The first weight whose gradient cannot be read back from NVMe; blank where all can.

    partitioned_optimizer_swapper.py, ``_swap_in_pinned_gradients``, reads each with O_DIRECT to its place in its group, which
    has to be a multiple of the disk's block; else the read fails, and ``aio_handle.wait`` counts it as done all the same (seen
    with DeepSpeed 0.19.8). Pieces below 1 MiB stay in memory.

    >>> from memcalc.models import Model
    >>> from memcalc.offload import Offload
    >>> def wide(hidden):
    ...     model = Model(name="wide", family="mlp", layers=2, hidden=hidden, features=hidden, classes=2)
    ...     return Plan(model=model, micro_batch=1, ranks=2, strategy="deepspeed-3", offload=Offload(optimizer="nvme"))
    >>> lost_gradient(wide(1024), 512), lost_gradient(wide(1000), 512)
    ('', 'layers.1.linear.weight')
    """
    if plan.offload.optimizer != "nvme":
        return ""
    itemsize, offset = DTYPE_BYTES["float32"], 0
    for weight in plan.weights:
        part = -(-weight.numel // plan.shards)
        if itemsize * part >= LEAST_SWAPPED and itemsize * offset % block:
            return weight.name
        offset += part
        if offset >= plan.deepspeed.sub_group_size:
            offset = 0
    return ""


def sector(folder: Path) -> int:
    """Bytes of a logical block of the disk that a folder is on; 512 where the system does not say."""
    device = os.stat(folder).st_dev
    place = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}").resolve()
    for disk in (place, place.parent):  # of a partition the disk says it
        with contextlib.suppress(OSError, ValueError):
            return int((disk / "queue/logical_block_size").read_text())
    return 512


def swapped_bytes(plan: Plan) -> int:
    """What all ranks have on NVMe, at the least: masters, two moments and gradients in float32, and weights.

    >>> from memcalc.models import MODELS
    >>> from memcalc.offload import Offload
    >>> plan = Plan(model=MODELS["gpt2"], tokens=8, micro_batch=1, strategy="deepspeed-3", offload=Offload(optimizer="nvme"))
    >>> swapped_bytes(plan) == 16 * 124_439_808
    True
    """
    count = sum(weight.numel for weight in plan.weights)
    states = 4 * DTYPE_BYTES["float32"] if plan.offload.optimizer == "nvme" else 0
    return count * (states + (DTYPE_BYTES[plan.precision_row.weights] if plan.offload.parameters == "nvme" else 0))


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
