"""The world a rank is rehearsed in, and the run itself."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from memcalc.errors import InputError
from memcalc.measurement import RankMeasurement
from memcalc.plan import Plan
from memcalc.training import Training
from trainers.loop import train
from trainers.models import dtype_of
from trainers.module_batches import zeros
from trainers.parts import Parts
from trainers.process import Process
from trainers.rehearsal import private
from trainers.rehearsal.cuda import cuda_kernels
from trainers.rehearsal.tracer import Tracer

__all__ = ["Shapes", "rehearse"]

STEPS = 2
"""The first makes the optimizer's states; the second repeats itself."""


class Shapes:
    """Micro batches of the plan's shapes, all zeros; nothing is held out."""

    def __init__(self, plan: Plan, settings: Training, process: Process) -> None:
        self.plan, self.device = plan, process.device
        self.held_out: NDArray[np.int64] = np.empty(0, np.int64)
        self.left_out = ""

    def seek(self, step: int) -> None:
        """Every step has the same."""

    def get(self, step: int, micro: int) -> tuple[Any, Any]:
        """Inputs and targets of one micro batch."""
        return self.at(np.zeros(self.plan.micro_batch, np.int64))

    def whole(self, step: int) -> tuple[Any, Any]:
        """Inputs and targets of all micro batches of a step."""
        return self.at(np.zeros(self.plan.micro_batch * self.plan.accumulation, np.int64))

    def at(self, indices: NDArray[np.int64]) -> tuple[Any, Any]:
        """As many samples as there are indices."""
        plan, rows = self.plan, len(indices)
        if plan.model.module.factory:
            return zeros(plan, rows, self.device)
        if plan.family.reads == "tokens":
            shape = rows, plan.tokens * plan.family.sequences
            return self._zeros(shape, torch.int64), self._zeros((rows, plan.tokens), torch.int64)
        inputs = self._zeros((rows, plan.model.features), dtype_of(plan.precision_row.weights))
        return inputs, self._zeros((rows,), torch.int64)

    def _zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=self.device)


@contextlib.contextmanager
def world(rank: int, ranks: int, device: torch.device) -> Iterator[Process]:
    """One rank among ``ranks`` that do not exist. Its collectives give whatever is there already."""
    with private.fake_group(rank, ranks):
        # Made before any tensor is fake: a mesh looks at the numbers in it.
        mesh = init_device_mesh(device.type, (ranks,))
        yield Process(rank=rank, world=ranks, device=device, mesh=mesh)


def rehearse(
    plan: Plan, *, rank: int = 0, device: str = "fake", parts: Parts | None = None, tracer: Tracer | None = None
) -> RankMeasurement:
    """Two steps of ``rank``; sizes in bytes, with the timeline of the second step. Raises MemcalcError.

    device  ``fake``: sizes only, as on the plan's device; ``cuda``: real tensors and kernels on this machine's first GPU
    parts   what the loop shall use instead of the plan's model, loss or batches
    tracer  the meter of fake tensors, of who wants to ask it afterwards
    """
    settings, parts = Training(steps=STEPS, measure_steps=STEPS), parts or Parts(batches=Shapes)
    if device == "cuda":
        if not torch.cuda.is_available():
            raise InputError("this machine has no GPU that torch can use; rehearse on fake tensors, which need none")
        torch.cuda.set_device(0)
        with world(rank, plan.ranks, torch.device("cuda", 0)) as process, private.answered_reductions():
            return train(plan, settings, process, parts=parts).ranks[0]
    tracer = tracer or Tracer(plan.device, STEPS - 1)
    kernels: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
    if plan.device == "cuda":
        kernels = cuda_kernels(fused_norm=plan.rms_norm == "fused")
    with world(rank, plan.ranks, torch.device("cpu")) as process, kernels, tracer.running():
        return train(plan, settings, process, parts=replace(parts, meter=lambda device, last_step: tracer)).ranks[0]
