"""What a run is put together from, and where it is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from memcalc.plan import Plan
from memcalc.training import Training
from trainers import meters
from trainers.batches import Batches, Source
from trainers.models import build, criterion
from trainers.process import Process

__all__ = ["Criterion", "Moments", "Parts"]

Criterion = Callable[[Any, Tensor], Tensor]
"""Model output and targets to the loss."""


class Moments:
    """Where the loop is, for the instruments and for error messages."""

    def __init__(self) -> None:
        self.meter: meters.Meter | None = None
        self.step, self.moment = -1, "init"

    def __call__(self, step: int, moment: str) -> None:
        self.step, self.moment = step, moment
        if self.meter is not None:
            self.meter.mark(step, moment)

    def outside(self) -> None:
        """Between steps: evaluation, checkpoints, logging."""
        self(-1, "init")


@dataclass(frozen=True, kw_only=True, slots=True)
class Parts:
    """What a run is put together from; a rehearsal brings some of its own."""

    build: Callable[[Plan], nn.Module] = build
    """The model, on the meta device."""
    criterion: Callable[[Plan], Criterion] = criterion
    batches: Callable[[Plan, Training, Process], Source] = Batches
    meter: Callable[[torch.device, int], meters.Meter] = meters.make
