"""A few real steps of a torch module under the CPU allocator's instrument, with no trainer around them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from memcalc.measurement import RankMeasurement
from trainers.backends import Prepared
from trainers.meters import CpuMeter

__all__ = ["metered"]


def metered(
    build: Callable[[], torch.nn.Module],
    batch: Callable[[], Any],
    forward: Callable[[torch.nn.Module, Any], Any],
    loss: Callable[[Any, Any], torch.Tensor],
) -> RankMeasurement:
    """Two steps with AdamW, the second measured; the output of ``forward`` is let go before backward.

    ``loss`` takes the output and the batch. What ``build`` has frozen the optimizer does not see.
    """
    meter = CpuMeter(last_step=1)
    meter.mark(-1, "init")
    module = build()
    optimizer = torch.optim.AdamW([each for each in module.parameters() if each.requires_grad], foreach=False)
    prepared = Prepared(model=module, optimizer=optimizer, states=optimizer)
    for step in range(2):
        meter.mark(step, "start")
        given = batch()
        meter.mark(step, "forward")
        output = forward(module, given)
        meter.mark(step, "loss")
        value = loss(output, given)
        del output
        meter.mark(step, "backward")
        value.backward()  # type: ignore[no-untyped-call]
        del value
        meter.mark(step, "step")
        if step:
            meter.states(prepared)
        optimizer.step()
        optimizer.zero_grad()
        meter.mark(-1, "init")
    return meter.finish(prepared, 0)
