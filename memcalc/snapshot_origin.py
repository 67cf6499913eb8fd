"""Where a stack says that memory came from: the moment of the step, and what it is.

Two literal tables, read for every stack. MOMENTS_BY_FRAME is asked row by row, outermost meaning first: a module called in backward by
checkpointing is backward. CATEGORIES_BY_FRAME is asked frame by frame from the innermost: FSDP's gather inside a
forward is communication. Backward writes gradients and scratch with the same stacks; what outlives its moment tells
them apart, so that every row names both.

File and function names are those of the installed packages: torch 2.0 to 2.13 (torch/optim, torch/autograd, torch/nn,
torch/distributed/fsdp), deepspeed 0.19 and megatron-core 0.16; C++ names are those of torch/csrc.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import NamedTuple

from memcalc.snapshot_fields import Frame, Frames

__all__ = ["CATEGORIES_BY_FRAME", "MOMENTS_BY_FRAME", "Origin", "origin"]


class MomentRow(NamedTuple):
    """A stack with such a frame belongs to a moment."""

    moment: str
    file: str
    """What its path ends with, or a folder in it that ends in ``/``; empty for any, as C++ has no useful path."""
    function: str = ""
    """A regular expression for the whole name; empty for any."""


class CategoryRow(NamedTuple):
    """Memory asked for below such a frame is of a category."""

    file: str
    function: str
    lasting: str
    """Of a block that outlives the moment it was allocated in."""
    passing: str
    """Of a block that does not."""


class Origin(NamedTuple):
    """What a stack tells; None for what it does not."""

    moment: str | None
    lasting: str | None
    passing: str | None
    place: str
    """The innermost line of the user's own, for people."""


MOMENTS_BY_FRAME = (
    MomentRow("backward", "torch/utils/checkpoint.py", "unpack_hook|recompute_fn|backward"),
    MomentRow("backward", "torch/autograd/graph.py", "_engine_run_backward"),
    MomentRow("backward", "torch/autograd/__init__.py", "backward|grad"),
    MomentRow("backward", "torch/distributed/fsdp/", r".*(pre|post)_backward.*"),
    MomentRow("backward", "", r"torch::autograd::(python::Python)?Engine::.*"),
    MomentRow("resume", "torch/optim/", "load_state_dict"),
    MomentRow("resume", "torch/serialization.py", "load"),
    MomentRow("start", "torch/optim/", "zero_grad"),
    MomentRow("step", "torch/optim/", "step|_use_grad|wrapper|profile_hook_step.*"),
    MomentRow("step", "apex/optimizers/", "step"),
    MomentRow("step", "bitsandbytes/optim/", "step|update_step|init_state"),
    MomentRow("step", "deepspeed/runtime/zero/", "step|_optimizer_step"),
    MomentRow("step", "torch/nn/utils/clip_grad.py"),
    MomentRow("step", "torch/amp/grad_scaler.py", "step|unscale_|_unscale_grads_"),
    MomentRow("loss", "torch/nn/modules/loss.py", "forward"),
    MomentRow("loss", "torch/nn/functional.py", ".*(loss|cross_entropy|kl_div).*"),
    MomentRow("forward", "torch/nn/modules/module.py", "_call_impl|_wrapped_call_impl|_slow_forward"),
    MomentRow("init", "torch/nn/modules/", "__init__|reset_parameters|_apply|to_empty"),
    MomentRow("init", "torch/nn/parallel/distributed.py", "__init__"),
    MomentRow("init", "torch/distributed/fsdp/", "__init__|_init_.*|fully_shard"),
    MomentRow("init", "deepspeed/__init__.py", "initialize"),
)
"""The first row that any frame of the stack fits."""

CATEGORIES_BY_FRAME = (
    CategoryRow("torch/optim/", "_init_group|load_state_dict", "optimizer", "optimizer"),
    CategoryRow("torch/optim/", "", "optimizer", "temporary"),
    CategoryRow("apex/optimizers/", "", "optimizer", "temporary"),
    CategoryRow("bitsandbytes/optim/", "", "optimizer", "temporary"),
    CategoryRow("torch/nn/utils/clip_grad.py", "", "temporary", "temporary"),
    CategoryRow("torch/amp/grad_scaler.py", "", "buffers", "temporary"),
    CategoryRow("torch/nn/parallel/distributed.py", "", "communication", "communication"),
    CategoryRow("", r"c10d::Reducer::.*", "communication", "communication"),
    CategoryRow("torch/distributed/fsdp/_fully_shard/_fsdp_param.py", "_init_sharded_param", "parameters", "temporary"),
    CategoryRow("_fsdp_collectives.py", "foreach_reduce.*", "gradients", "communication"),
    CategoryRow("_fsdp_collectives.py", "", "communication", "communication"),
    CategoryRow("_fsdp_param.py", "", "communication", "communication"),
    CategoryRow("torch/distributed/fsdp/_flat_param.py", "flatten_tensors.*|_init_flat_param.*", "parameters", "temporary"),
    CategoryRow("torch/distributed/fsdp/_flat_param.py", "", "communication", "communication"),
    CategoryRow("torch/distributed/fsdp/_runtime_utils.py", "_reduce_grad.*|_post_backward.*", "gradients", "communication"),
    CategoryRow("torch/distributed/distributed_c10d.py", "", "communication", "communication"),
    CategoryRow("deepspeed/runtime/zero/", "initialize_optimizer_states|_create_fp32_.*", "optimizer", "temporary"),
    CategoryRow("deepspeed/runtime/zero/", ".*all_?gather.*|fetch_sub_module|_?reduce.*|.*allreduce.*|average_tensor",
                "communication", "communication"),
    CategoryRow("deepspeed/runtime/zero/partition_parameters.py", "_partition.*|_zero_init_param|_convert_to_.*",
                "parameters", "temporary"),
    CategoryRow("deepspeed/runtime/zero/", "step|_optimizer_step", "optimizer", "temporary"),
    CategoryRow("megatron/core/distributed/param_and_grad_buffer.py", "__init__", "gradients", "gradients"),
    CategoryRow("megatron/core/optimizer/", "", "optimizer", "temporary"),
    CategoryRow("torch/utils/checkpoint.py", "unpack_hook|recompute_fn|backward", "activations", "activations"),
    CategoryRow("torch/utils/data/", "", "inputs", "inputs"),
    CategoryRow("", r"at::cuda::.*(Workspace|CurrentCUDABlas).*", "workspaces", "workspaces"),
)  # fmt: skip
"""The first row that fits the innermost frame that any fits."""

_BY_MOMENT = {
    "init": ("parameters", "temporary"),
    "forward": ("activations", "activations"),
    "loss": ("activations", "activations"),
    "backward": ("gradients", "temporary"),
    "step": ("optimizer", "temporary"),
}
"""Of a stack that fits no row of categories: lasting, passing."""


def origin(frames: Frames) -> Origin:
    """What a stack tells of the memory that was asked for with it.

    >>> train = Frame("train.py", 9, "main")
    >>> step = (Frame("/x/torch/optim/adam.py", 70, "_init_group"), Frame("/x/torch/optim/adam.py", 220, "step"), train)
    >>> origin(step)
    Origin(moment='step', lasting='optimizer', passing='optimizer', place='train.py:9 main')
    """
    moment = _moment(frames)
    found = next(filter(None, map(_categories, frames)), None) or _BY_MOMENT.get(moment or "")
    lasting, passing = found or (None, None)
    return Origin(moment, lasting, passing, _place(frames))


def _moment(frames: Frames) -> str | None:
    found = {row for frame in set(frames) for row in _moment_rows(frame)}
    if found:
        return next(row for row in MOMENTS_BY_FRAME if row in found).moment
    # The engine's own thread calls the backward of an autograd.Function from C++: nothing of Python is below it.
    if frames and _fits(frames[-1], "torch/autograd/function.py", "apply"):
        return "backward"
    return None


@lru_cache(maxsize=65536)
def _moment_rows(frame: Frame) -> tuple[MomentRow, ...]:
    return tuple(row for row in MOMENTS_BY_FRAME if _fits(frame, row.file, row.function))


@lru_cache(maxsize=65536)
def _categories(frame: Frame) -> tuple[str, str] | None:
    rows = (row for row in CATEGORIES_BY_FRAME if _fits(frame, row.file, row.function))
    return next(((row.lasting, row.passing) for row in rows), None)


def _fits(frame: Frame, file: str, function: str) -> bool:
    path = frame.file.replace("\\", "/")
    inside = f"/{file}" in f"/{path}" if file.endswith("/") else path.endswith(file)
    return inside and (not function or re.fullmatch(function, frame.function) is not None)


def _place(frames: Frames) -> str:
    python = [frame for frame in frames if frame.file.endswith(".py")]
    own = [frame for frame in python if "/site-packages/" not in frame.file and "/torch/" not in frame.file]
    for frame in (*own, *python, *frames):
        name = "/".join(frame.file.replace("\\", "/").split("/")[-2:])
        return f"{name}:{frame.line} {frame.function}" if name.endswith(".py") else frame.function
    return ""
