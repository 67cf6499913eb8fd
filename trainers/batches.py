"""Samples to micro batches on a rank's device, the same samples in the same step for every number of ranks."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DistributedSampler

from memcalc import data
from memcalc.plan import Plan
from memcalc.training import Training
from memcalc.units import format_count, things
from trainers.models import dtype_of
from trainers.module_batches import called_with, counted, sampled
from trainers.process import Process

__all__ = ["Batches", "Source", "readers", "samples_read"]


def readers(plan: Plan) -> int:
    """Processes that read samples of their own."""
    return plan.data_parallel if plan.processes > 1 else 1


def samples_read(plan: Plan) -> int:
    """Samples of a micro batch that one of them reads: all GPUs' where one process drives them."""
    return plan.micro_batch * (plan.data_parallel // readers(plan))


class Source(Protocol):
    """What the loop asks for samples."""

    held_out: NDArray[np.int64]
    """Samples that are evaluated and not trained on, by index."""

    @property
    def left_out(self) -> str:
        """What is trained on in no epoch, in a sentence."""

    def seek(self, step: int) -> None:
        """A step begins."""

    def get(self, step: int, micro: int) -> tuple[Any, Any]:
        """Inputs and targets of one micro batch of a step."""

    def whole(self, step: int) -> tuple[Any, Any]:
        """Inputs and targets of all micro batches of a step together."""

    def at(self, indices: NDArray[np.int64]) -> tuple[Any, Any]:
        """Inputs and targets of some samples."""


class Batches:
    """Micro batches on this rank's device. Rank r of N takes rows r::N, so a step's samples do not depend on N."""

    def __init__(self, plan: Plan, settings: Training, process: Process) -> None:
        self.plan, self.device = plan, process.device
        self.own = plan.model.module
        self.samples = counted(plan) if self.own.sample else data.load(plan, settings.data, settings.tokenizer)
        self.training, self.held_out = data.split(self.samples, plan)
        self.sampler: DistributedSampler[int] = DistributedSampler(
            self.training,  # type: ignore[arg-type]  # all it asks for is a length
            readers(plan),
            process.rank // plan.layout.model_parallel,
            seed=settings.seed,
            drop_last=True,
        )
        self.per_epoch = len(self.training) // plan.global_batch
        self.epoch, self.order = -1, np.empty(0, np.int64)
        reads = plan.family.reads == "tokens"
        self.dtype = torch.int64 if reads else dtype_of(plan.precision_row.weights)

    @property
    def left_out(self) -> str:
        """What an epoch does not train on, in a sentence; blank where every sample fills a step."""
        rest = len(self.training) % self.plan.global_batch
        if not rest:
            return ""
        return (
            f"{format_count(rest)} of {things(len(self.training), 'sample')} "
            f"{'do not fill' if rest > 1 else 'does not fill'} a step of {format_count(self.plan.global_batch)} and "
            f"{'are left out of each epoch, different ones' if rest > 1 else 'is left out of each epoch, another one'} every time"
        )

    def seek(self, step: int) -> None:
        """Shuffle anew when a step begins an epoch."""
        if step // self.per_epoch != self.epoch:
            self.epoch = step // self.per_epoch
            self.sampler.set_epoch(self.epoch)
            self.order = np.fromiter(self.sampler, np.int64)

    def get(self, step: int, micro: int) -> tuple[Any, Any]:
        """Inputs and targets of one micro batch of a step."""
        size = samples_read(self.plan)
        first = (step % self.per_epoch * self.plan.accumulation + micro) * size
        return self.at(self.training[self.order[first : first + size]])

    def whole(self, step: int) -> tuple[Any, Any]:
        """Inputs and targets of all micro batches of a step together."""
        size = samples_read(self.plan) * self.plan.accumulation
        first = step % self.per_epoch * size
        return self.at(self.training[self.order[first : first + size]])

    def at(self, indices: NDArray[np.int64]) -> tuple[Any, Any]:
        """Inputs and targets of some samples."""
        if self.own.sample:
            return sampled(self.plan, len(indices), self.device)
        inputs, targets = self.samples.take(indices)
        if self.own.factory:
            inputs, targets = called_with(self.plan, inputs, targets)
            sent = self._send(inputs, self.dtype), self._send(targets, torch.int64)
            return (dict(zip(self.own.arguments, sent, strict=True)), None) if self.own.arguments else sent
        return self._send(inputs, self.dtype), self._send(targets, torch.int64)

    def _send(self, array: NDArray[Any], dtype: torch.dtype) -> Tensor:
        # numpy's memory is not the CPU allocator's, so this tensor is all that an instrument sees.
        tensor = torch.empty(array.shape, dtype=dtype, device=self.device)
        source = torch.from_numpy(array)
        if self.device.type == "cuda":
            source = source.to(dtype).pin_memory()
        return tensor.copy_(source, non_blocking=True)
