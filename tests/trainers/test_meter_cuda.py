"""How the CUDA meter reads torch's counters and the allocator's history, played by a stand-in for the driver."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import nn

from memcalc.timeline import MOMENTS
from trainers import meters
from trainers.backends import Prepared
from trainers.meters import CudaMeter

GIB = 2**30


class Card:
    """Counts bytes as torch.cuda does: blocks of 512, a peak that can be reset, a trace while it is recorded."""

    def __init__(self) -> None:
        self.blocks: dict[int, int] = {}
        self.peak = 0
        self.trace: list[dict[str, Any]] | None = None

    def allocated(self) -> int:
        return sum(self.blocks.values())

    def use(self, address: int, size: int) -> None:
        self.blocks[address] = -(-size // 512) * 512
        self.peak = max(self.peak, self.allocated())
        self._note("alloc", address, size)

    def free(self, address: int) -> None:
        size = self.blocks.pop(address)
        self._note("free_requested", address, size)
        self._note("free_completed", address, size)

    def _note(self, action: str, address: int, size: int) -> None:
        time.sleep(20e-6)  # the history's clock counts in microseconds
        if self.trace is not None:
            self.trace.append({"action": action, "addr": address, "size": size, "time_us": time.time_ns() // 1000})

    def reset(self, device: object) -> None:
        self.peak = self.allocated()

    def record(self, enabled: str | None = "all", context: str | None = "all") -> None:
        self.trace = [] if enabled else None

    def snapshot(self, device: object) -> dict[str, Any]:
        blocks = [{"address": a, "size": s, "state": "active_allocated"} for a, s in self.blocks.items()]
        blocks.append({"address": 9, "size": 4096, "state": "inactive"})
        return {"segments": [{"device": 0, "blocks": blocks}], "device_traces": [self.trace or []]}


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Card:
    card = Card()
    for name, function in {
        "max_memory_allocated": lambda device: card.peak,
        "max_memory_reserved": lambda device: 2 * card.peak,
        "mem_get_info": lambda device: (GIB - card.peak, 2 * GIB),
        "reset_peak_memory_stats": card.reset,
    }.items():
        monkeypatch.setattr(torch.cuda, name, function)
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", card.record)
    monkeypatch.setattr(torch.cuda.memory, "_snapshot", card.snapshot)
    # The weights of this test lie on the CPU; on the card they are what has address 1.
    monkeypatch.setattr(
        meters,
        "storages",
        lambda tensors, device, where=None: {1: 1000} if isinstance(next(iter(tensors), None), nn.Parameter) else {},
    )
    return card


def test_counters_by_moment_and_the_history_of_the_last_step(card: Card) -> None:
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters())
    prepared = Prepared(model=model, optimizer=optimizer, states=optimizer)
    card.use(7, 10**6)  # gone before the meter starts
    card.free(7)
    meter = CudaMeter(torch.device("cuda:0"), last_step=2)
    card.use(1, 1000)  # the weights
    card.use(8, 5000)
    card.free(8)
    for step in range(3):
        meter.mark(step, "start")
        meter.mark(step, "forward")
        card.use(2, 600)
        meter.mark(step, "backward")
        card.use(3, 300)
        card.free(2)
        meter.mark(step, "step")
        if step == 2:
            meter.states(prepared)
        card.free(3)
        meter.mark(-1, "init")
    found = meter.finish(prepared, rank=0)
    assert found.by_moment == {"start": 1024, "forward": 2048, "backward": 2560, "step": 1536}
    assert (found.allocated_peak, found.moment, found.init_peak) == (2560, "backward", 1024 + 5120)
    assert (found.reserved_peak, found.device_peak) == (2 * 2560, GIB + 2560)
    assert found.timeline is not None
    assert found.timeline.delta.tolist() == [1024, 1024, 512, -1024, -512]
    assert [MOMENTS[index] for index in found.timeline.moment] == ["start", "forward", "backward", "backward", "step"]
    assert found.timeline.peak().bytes == found.allocated_peak
    assert found.timeline.at_moment("step", "parameters") == 1024
