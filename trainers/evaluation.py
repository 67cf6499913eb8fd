"""The loss over samples that are not trained on, on all ranks, each sample counted once."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
import torch.distributed as dist

from memcalc.plan import Plan
from trainers.backends import Prepared
from trainers.batches import Source, readers, samples_read
from trainers.models.module import call
from trainers.parts import Criterion
from trainers.process import Process

__all__ = ["evaluate"]


@torch.no_grad()
def evaluate(
    prepared: Prepared, batches: Source, criterion: Criterion, autocast: Callable[[], AbstractContextManager[object]],
    plan: Plan, process: Process,
) -> float:  # fmt: skip
    """Mean loss over the held-out samples of all ranks; the model is training again when this returns."""
    held, size, processes = batches.held_out, samples_read(plan), readers(plan)
    copies = plan.layout.model_parallel  # ranks that work on the same samples
    mine = held[process.rank // copies :: processes]
    prepared.model.eval()
    total = torch.zeros(2, dtype=torch.float64, device=process.device)
    for first in range(0, math.ceil(len(held) / processes), size):
        rows = mine[first : first + size]
        # Sharded models need every rank in every forward pass; one without samples left repeats one that does not count.
        inputs, targets = batches.at(rows if len(rows) else held[:1])
        with autocast():
            whole = prepared.loss
            loss = whole(inputs, targets) if whole else criterion(call(prepared.model, inputs), targets)
        total += torch.stack([loss.double() * len(rows), torch.full_like(loss, len(rows), dtype=torch.float64)])
    dist.all_reduce(total)
    prepared.reshard()
    prepared.model.train()
    return float(total[0] / total[1])
