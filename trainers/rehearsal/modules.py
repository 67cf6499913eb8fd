"""Any nn.Module rehearsed: what its weights and activations take, from its own code."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import is_dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from memcalc.errors import InputError
from memcalc.measurement import RankMeasurement
from memcalc.models import Model
from memcalc.plan import Plan
from memcalc.training import Training
from trainers.parts import Parts
from trainers.process import Process
from trainers.rehearsal import private
from trainers.rehearsal.run import rehearse

__all__ = ["mean_output", "rehearse_module"]

Loss = Callable[[Any, Any], Tensor]


def rehearse_module(
    make: Callable[[], nn.Module],
    batch: Callable[[], Any],
    *,
    loss: Loss | None = None,
    targets: Callable[[], Any] = lambda: None,
    **settings: Any,
) -> RankMeasurement:
    """Two steps of the module that ``make`` gives, on the batch that ``batch`` gives; sizes in bytes.

    Both are called while tensors are fake, so that neither a large model nor a large batch takes memory. A batch is one
    argument, a tuple of arguments, or a dict of named ones. ``loss(output, targets())`` is a number; without it, that is
    the output's own ``loss``, or the mean of all that comes out. ``settings`` are fields of a Plan: device, precision,
    optimizer, optimizer_kind, accumulation, strategy and ranks. Raises MemcalcError.

    >>> found = rehearse_module(lambda: nn.Linear(1000, 10), lambda: torch.zeros(32, 1000), device="cpu")
    >>> found.parameters, found.timeline.at_moment("start", "inputs") >= 32 * 1000 * 4
    (40040, True)
    """
    settings = {"device": "cpu", "micro_batch": 1, **settings}
    plan = Plan(model=Model(name="module", family="size", parameters=1), **settings)
    parts = Parts(
        build=lambda plan: _Called(make()),
        criterion=lambda plan: loss or mean_output,
        batches=partial(_Batch, batch, targets),
    )
    return rehearse(plan, parts=parts)


class _Batch:
    """The same batch for every micro batch, made anew each time as a loader would."""

    def __init__(
        self, inputs: Callable[[], Any], targets: Callable[[], Any], plan: Plan, settings: Training, process: Process
    ) -> None:
        self.inputs, self.targets = inputs, targets
        self.held_out: NDArray[np.int64] = np.empty(0, np.int64)
        self.left_out = ""

    def seek(self, step: int) -> None:
        """Every step has the same."""

    def get(self, step: int, micro: int) -> tuple[Any, Any]:
        """Inputs and targets of one micro batch."""
        return self.inputs(), self.targets()

    def whole(self, step: int) -> tuple[Any, Any]:
        """No module is run as a pipeline."""
        return self.get(step, 0)

    def at(self, indices: NDArray[np.int64]) -> tuple[Any, Any]:
        """Nothing is held out."""
        return self.get(0, 0)


class _Called(nn.Module):
    """A module that is called with one batch, whatever arguments are in it."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        if not isinstance(inner, nn.Module):
            raise InputError(f"what should be a module is {type(inner).__name__}; a factory returns an nn.Module")
        self.inner = inner

    def forward(self, batch: Any) -> Any:
        if isinstance(batch, Mapping):
            return self.inner(**batch)
        return self.inner(*batch) if isinstance(batch, tuple | list) else self.inner(batch)


def mean_output(output: Any, targets: Any = None) -> Tensor:
    """The loss a model gives itself; else the mean of every floating-point tensor that needs a gradient.

    >>> mean_output({"logits": torch.ones(2, 3, requires_grad=True)}).item()
    1.0
    """
    own = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(own, Tensor):
        return own
    if is_dataclass(output) and not isinstance(output, type | Mapping):
        output = vars(output)
    found = [part for part in private.tensors(output) if part.is_floating_point() and part.requires_grad]
    if not found:
        raise InputError("nothing in the module's output has a gradient; give a loss")
    return torch.stack([part.float().mean() for part in found]).sum()
