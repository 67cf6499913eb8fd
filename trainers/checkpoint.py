"""Sharded checkpoints that are either complete or ignored; memcalc/checkpoints.py says which files they have.

Tensors are stored under the names of the model's weights, whatever wrapped them, so a run can be resumed
with another strategy or number of ranks.
"""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint.state_dict_loader as loader
import torch.distributed.checkpoint.state_dict_saver as saver
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.tensor import DTensor

from memcalc.checkpoints import Marker, cure, digest, drop_old, read_marker
from memcalc.errors import FileError, shorten
from memcalc.plan import Plan
from trainers.backends import Prepared
from trainers.checkpoint_reader import Planner, Reader
from trainers.models import dtype_of
from trainers.process import Process

__all__ = ["Resumed", "load", "parameters", "save", "shapes", "whole"]


@dataclasses.dataclass(frozen=True, slots=True)
class Resumed:
    """Where a resumed run goes on: the next step, the losses so far, and the state of the loss scaler."""

    step: int
    losses: list[float | None]
    scaler: dict[str, Any]


def parameters(prepared: Prepared, plan: Plan) -> dict[str, Tensor]:
    """The model's parameters by the names of its weights: wrappers rename them, but keep their order."""
    names = [weight.name for weight in (plan.weights if prepared.weights is None else prepared.weights)]
    return dict(zip(names, prepared.model.parameters(), strict=True))


def shapes(plan: Plan) -> dict[str, Tensor]:
    """Shape and dtype of each whole weight, as tensors without memory."""
    usual = plan.precision_row.weights
    return {
        weight.name: torch.empty(weight.shape, dtype=dtype_of(weight.dtype or usual), device="meta")
        for weight in plan.weights
    }


def whole(prepared: Prepared, plan: Plan, name: str) -> Tensor:
    """One weight in full. All ranks ask together."""
    if prepared.whole is not None:
        return prepared.whole(name)
    parameter = parameters(prepared, plan)[name]
    found = prepared.part_of(parameter, parameter.detach())
    return found.full_tensor() if isinstance(found, DTensor) else found


def _state(prepared: Prepared, plan: Plan) -> dict[str, Any]:
    if prepared.state is not None:
        return prepared.state()
    named = parameters(prepared, plan)
    held = prepared.states.state
    optimizer = {
        name: {
            key: prepared.part_of(parameter, value) if value.shape == parameter.shape else value
            for key, value in held[parameter].items()
            if isinstance(value, Tensor)
        }
        for name, parameter in named.items()
        if parameter in held
    }
    model = {name: prepared.part_of(parameter, parameter.detach()) for name, parameter in named.items()}
    return {"model": model, "optimizer": {name: state for name, state in optimizer.items() if state}}


def save(folder: Path, prepared: Prepared, plan: Plan, process: Process, progress: Resumed, *, kept: int = 0) -> None:
    """Write checkpoint ``folder/step-N`` together with all ranks, then drop all but the newest ``kept`` unless that is 0.

    Raises FileError; the ones before it stay as they were then.
    """
    path = folder / f"step-{progress.step}"
    if process.first:
        shutil.rmtree(path, ignore_errors=True)
    dist.barrier()
    try:
        index = saver.save(_state(prepared, plan), checkpoint_id=path)
    except (CheckpointException, OSError) as error:
        raise FileError(f"checkpoint {path} cannot be written: {_cause(error)}") from error
    if process.first:
        done = Marker(
            step=progress.step, losses=progress.losses, scaler=progress.scaler, model=plan.model, optimizer=plan.optimizer,
            precision=plan.precision, files=_files(index), index=digest(path),
        )  # fmt: skip
        done.save(path)
        drop_old(folder, kept)
    dist.barrier()


def _files(index: Metadata) -> dict[str, int]:
    """Bytes of each rank's file, as the ranks wrote them: another machine may not see the size of a shared one at once."""
    sizes: dict[str, int] = {}
    for part in index.storage_data.values():
        sizes[part.relative_path] = max(sizes.get(part.relative_path, 0), part.offset + part.length)
    return sizes


def load(path: Path, prepared: Prepared, plan: Plan) -> Resumed:
    """Fill model and optimizer from a checkpoint. Raises FileError, and PlanError when it is of another model."""
    marker = read_marker(path, plan)
    if prepared.wake is not None:
        prepared.wake()
    else:
        _make_states(prepared)
    state = _state(prepared, plan)
    try:
        loader.load(state, storage_reader=Reader(path), planner=Planner())
    except (CheckpointException, OSError, RuntimeError, ValueError, KeyError, UnpicklingError) as error:
        raise FileError(f"checkpoint {path} cannot be read: {_cause(error)}; {cure(path)}") from error
    if prepared.restore is not None:
        prepared.restore(state)
    return Resumed(step=marker.step, losses=marker.losses, scaler=marker.scaler)


def _make_states(prepared: Prepared) -> None:
    """Let the optimizer make its states, which are then overwritten: a step of length 0 along gradients of 0."""
    for group in prepared.optimizer.param_groups:
        group["lr"] = 0.0
    for parameter in prepared.model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter)
    prepared.optimizer.step()
    prepared.optimizer.zero_grad(set_to_none=True)


def _cause(error: BaseException) -> str:
    """The root of an error in one line; torch's names every rank in a traceback of its own."""
    if isinstance(error, CheckpointException) and error.failures:
        failure = next(iter(error.failures.values()))
        error = failure[0] if isinstance(failure, tuple) else failure
    if isinstance(error, OSError) and error.strerror:
        return error.strerror.lower()
    if "PytorchStreamWriter" in str(error) or "inline_container" in str(
        error
    ):  # its zip writer keeps the cause to itself
        return "a file was cut off while it was written, as on a full disk"
    if isinstance(error, EOFError):
        return "one of its files ends too early"
    return shorten(str(error).strip().split("\n")[0], 150) if str(error).strip() else type(error).__name__
