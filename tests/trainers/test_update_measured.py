"""Steps in backward, averages of weights and clipping by torch itself, against the ledger: bytes at each moment's fullest."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from typing import Any

os.environ.setdefault("KINETO_LOG_LEVEL", "5")

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.profiler import ProfilerActivity, profile

from memcalc.ledger import ledger
from memcalc.models import Model
from memcalc.plan import Plan
from memcalc.timeline import MOMENTS
from memcalc.update import Update
from trainers.models import build, criterion, materialise
from trainers.optimizers import arguments

LLAMA = Model(
    name="update-llama", family="llama", layers=4, hidden=128, heads=4, kv_heads=2, ffn=384, vocab=1000, context=64
)  # fmt: skip
PLAN = Plan(model=LLAMA, tokens=64, micro_batch=2, device="cpu")
SMALL = 4096
"""Numbers that CPU kernels wrap into tensors, and those a loop keeps."""


def peak_above_start(plan: Plan) -> int:
    """The ledger's peak over what is there when forward begins."""
    timeline = ledger(plan)
    first = int(np.flatnonzero(timeline.moment == MOMENTS.index("forward"))[0])
    live = timeline.live()
    return int(live[first:].max() - live[first - 1])


def measured(plan: Plan, prepare: Callable[[nn.Module], Callable[[], None]]) -> int:
    """The same of a real step, whose end ``prepare`` gives."""
    model = build(plan)
    materialise(model, plan, torch.device("cpu"), seed=0)
    end, loss_of = prepare(model), criterion(plan)
    ids = torch.randint(1000, (2, 64))

    def step() -> None:
        loss = loss_of(model(ids), ids)
        loss.backward()
        del loss
        end()

    for _ in range(2):
        step()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof:
        step()
    events: Any = prof.profiler.kineto_results.events()
    sizes = [e.nbytes() for e in sorted(events, key=lambda e: e.start_ns()) if e.name() == "[memory]"]
    return int(np.cumsum(sizes).max())


def test_each_weight_is_updated_and_its_gradient_freed_while_backward_runs() -> None:
    plan = dataclasses.replace(PLAN, update=Update(in_backward=True))
    kind, options = arguments(plan)

    def prepare(model: nn.Module) -> Callable[[], None]:
        optimizers = {parameter: kind([parameter], **options) for parameter in model.parameters()}

        def finished(parameter: nn.Parameter) -> None:
            optimizers[parameter].step()
            optimizers[parameter].zero_grad()

        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(finished)  # type: ignore[attr-defined]
        return lambda: None

    assert abs(measured(plan, prepare) - peak_above_start(plan)) <= SMALL
    at_the_end = dataclasses.replace(plan, update=Update(), micro_batch=1)
    assert ledger(plan).peak().bytes < ledger(dataclasses.replace(at_the_end, micro_batch=2)).peak().bytes


@pytest.mark.parametrize("clips", [False, True])
def test_averages_are_updated_in_place_and_clipping_takes_a_number_a_tensor(clips: bool) -> None:
    plan = dataclasses.replace(PLAN, update=Update(ema="weights", clip=clips))
    kind, options = arguments(plan)

    def prepare(model: nn.Module) -> Callable[[], None]:
        optimizer = kind(model.parameters(), **options)
        average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.99))
        kept = sum(parameter.nbytes for parameter in average.module.parameters())
        assert kept == ledger(plan).peak().bytes - ledger(dataclasses.replace(plan, update=Update())).peak().bytes

        def end() -> None:
            if clips:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            average.update_parameters(model)

        return end

    assert abs(measured(plan, prepare) - peak_above_start(plan)) <= SMALL
