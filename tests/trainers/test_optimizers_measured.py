"""The optimizer rows against the real optimizers, by the CPU allocator's own events."""

from __future__ import annotations

import os
from functools import partial
from typing import Any

os.environ.setdefault("KINETO_LOG_LEVEL", "5")

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

import trainers.optimizers
from memcalc.optimizers import KINDS, OPTIMIZERS
from memcalc.spec import Weight

VERSION = tuple(int(part) for part in torch.__version__.split(".")[:2])
FLAGS = {"foreach": {"foreach": True}, "for-loop": {"foreach": False}, "fused": {"fused": True}}
# LBFGS takes a closure, and Muon matrices alone: it has a test of its own.
MAKE = {name: partial(kind, **options) for name, (kind, options) in trainers.optimizers.CLASSES.items()}
SHAPES = [
    pytest.param([(100, 50), (100,), (30, 200), (70,)], id="mixed"),
    pytest.param([(300,), (64, 80), (40,)], id="vector-first"),
    pytest.param([(60, 70), (60, 70), (60, 70)], id="equal"),
    pytest.param([(10, 4, 3, 3), (10,)], id="convolution"),
    pytest.param([(500,)], id="one-vector"),
    pytest.param([(40, 50), (50, 40)], id="matrices"),
]
COUNTERS = ("step", "mu_product")
WRAPPED = 20
"""CPU kernels wrap Python numbers into 0-dimensional tensors: an 8-byte one and its cast, twice at most."""


def step(make: Any, shapes: list[tuple[int, ...]], dtype: torch.dtype) -> tuple[torch.optim.Optimizer, list[int]]:
    """The optimizer after seven steps, and the last one's allocator events."""
    parameters = [torch.nn.Parameter(torch.randn(shape).to(dtype)) for shape in shapes]
    optimizer = make(parameters)
    for _ in range(6):  # RAdam is rectified from the sixth step on
        for parameter in parameters:
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof:
        optimizer.step()
    events: Any = prof.profiler.kineto_results.events()
    return optimizer, [e.nbytes() for e in sorted(events, key=lambda e: e.start_ns()) if e.name() == "[memory]"]


def peak(events: list[int]) -> int:
    total = top = 0
    for size in events:
        total += size
        top = max(top, total)
    assert total == 0, "step() left something behind"
    return top


CASES = [(name, kind) for name in MAKE for kind in OPTIMIZERS[name].kinds]


@pytest.mark.parametrize("shapes", SHAPES)
@pytest.mark.parametrize(("name", "kind"), CASES)
def test_states_and_temporaries_are_those_of_torch(name: str, kind: str, shapes: list[tuple[int, ...]]) -> None:
    row = OPTIMIZERS[name]
    optimizer, events = step(partial(MAKE[name], **FLAGS[kind]), shapes, torch.float32)
    for shape, parameter in zip(shapes, optimizer.param_groups[0]["params"], strict=True):
        state = optimizer.state[parameter]
        kept = [t.nbytes for key, t in state.items() if key not in COUNTERS and t is not None]
        assert kept == row.state_bytes(Weight("w", shape), "float32")
        assert [t.nbytes for key, t in state.items() if key in COUNTERS] == [4] * row.counters
    predicted = sum(size for _, size in row.temporaries(shapes, 4, kind, VERSION))
    assert 0 <= peak(events) - predicted <= WRAPPED


# Adafactor is left out: oneDNN's bfloat16 matrix product takes scratch memory that other devices do not.
@pytest.mark.parametrize(("name", "kind"), [case for case in CASES if case[0] != "adafactor"])
def test_everything_halves_in_bfloat16_but_the_counter(name: str, kind: str) -> None:
    shapes = [(100, 50), (100,), (30, 200), (70,)]
    row = OPTIMIZERS[name]
    optimizer, events = step(partial(MAKE[name], **FLAGS[kind]), shapes, torch.bfloat16)
    for shape, parameter in zip(shapes, optimizer.param_groups[0]["params"], strict=True):
        kept = {key: t.nbytes for key, t in optimizer.state[parameter].items() if t is not None}
        assert {kept.pop(counter, 4) for counter in COUNTERS} == {4}
        assert list(kept.values()) == row.state_bytes(Weight("w", shape), "bfloat16")
    predicted = sum(size for _, size in row.temporaries(shapes, 2, kind, VERSION))
    assert 0 <= peak(events) - predicted <= WRAPPED


@pytest.mark.parametrize("name", MAKE)
def test_a_kind_the_table_lacks_is_one_torch_lacks(name: str) -> None:
    for kind in set(KINDS) - set(OPTIMIZERS[name].kinds):
        with pytest.raises(TypeError, match="fused"):
            MAKE[name]([torch.nn.Parameter(torch.zeros(1))], **FLAGS[kind])


@pytest.mark.parametrize("kind", ["foreach", "for-loop"])
@pytest.mark.parametrize("name", ["sgd", "sgd-momentum", "adam", "rmsprop", "adamax"])
def test_decay_of_gradients_is_a_copy_of_them(name: str, kind: str) -> None:
    shapes = [(60, 70), (60, 70)]
    _, events = step(partial(MAKE[name], weight_decay=0.01, **FLAGS[kind]), shapes, torch.float32)
    predicted = sum(size for _, size in OPTIMIZERS[name].temporaries(shapes, 4, kind, VERSION, l2=True))
    assert 0 <= peak(events) - predicted <= WRAPPED


@pytest.mark.parametrize("shapes", [[(60, 70), (30, 200)], [(200, 30)], [(64, 64), (64, 64)]])
def test_muon(shapes: list[tuple[int, ...]]) -> None:
    optimizer, events = step(torch.optim.Muon, shapes, torch.float32)
    row = OPTIMIZERS["muon"]
    for shape, parameter in zip(shapes, optimizer.param_groups[0]["params"], strict=True):
        kept = [t.nbytes for t in optimizer.state[parameter].values()]
        assert kept == row.state_bytes(Weight("w", shape, "h.0"), "float32")
    predicted = sum(size for _, size in row.temporaries(shapes, 4, "for-loop", VERSION))
    # oneDNN's bfloat16 products take scratch memory of other sizes than any tensor has.
    sizes = {factor * min(shape) * side for shape in shapes for factor in (2, 4) for side in shape}
    assert 0 <= peak([size for size in events if abs(size) in sizes]) - predicted <= WRAPPED
