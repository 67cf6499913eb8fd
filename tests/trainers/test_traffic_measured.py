"""Bytes that ``memcalc strategies`` says a rank sends, against the collectives that the trainers' real code asks for.

The steps are rehearsed: the same loop and backends in a process group whose other ranks do not exist.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist

from memcalc.fsdp import Fsdp
from memcalc.plan import Plan
from memcalc.traffic import collectives
from tests.trainers.runs import plan, some
from trainers.rehearsal.run import STEPS, rehearse
from trainers.rehearsal.tracer import Tracer

SMALL = 64  # bytes: losses and norms are summed over ranks, too
# What FSDP and ZeroRedundancyOptimizer call, by its names in torch 2.6 and in 2.13, and the parameter that is the whole tensor.
CALLS = {
    "all_gather_into_tensor": ("all-gather", "output_tensor"),
    "all_gather_single": ("all-gather", "output_tensor"),
    "all_gather": ("all-gather", "tensor_list"),  # of FSDP 1 on the CPU
    "reduce_scatter_tensor": ("reduce-scatter", "input"),
    "reduce_scatter_single": ("reduce-scatter", "input"),
    "all_reduce": ("all-reduce", "tensor"),
    "broadcast": ("broadcast", "tensor"),
}


@contextmanager
def watched(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    """Bytes by operation."""
    found: Counter[str] = Counter()
    outermost: list[str] = []

    def count(operation: str, whole: torch.Tensor | list[torch.Tensor]) -> None:
        size = sum(part.nbytes for part in (whole if isinstance(whole, list) else [whole]))
        if size > SMALL:
            found[operation] += size

    def counted(original: Callable[..., Any], operation: str, whole: str) -> Callable[..., Any]:
        parameters = inspect.signature(original)

        def call(*args: Any, **options: Any) -> Any:
            outermost.append(operation)  # one of them may be made of another
            if len(outermost) == 1:
                given = parameters.bind(*args, **options).arguments
                count(operation, given[whole] if whole in given else given["output"])
            try:
                return original(*args, **options)
            finally:
                outermost.pop()

        return call

    with monkeypatch.context() as patch:
        for name, (operation, whole) in CALLS.items():
            if hasattr(dist, name):
                patch.setattr(dist, name, counted(getattr(dist, name), operation, whole))
        reduces = Tracer.reduces

        def bucket(self: Tracer, buffer: torch.Tensor) -> None:
            count("all-reduce", buffer)
            reduces(self, buffer)

        patch.setattr(Tracer, "reduces", bucket)
        yield found


CASES: dict[str, Plan] = {
    "full shard, four micro batches": plan(ranks=2, strategy="fsdp-full-shard", batch=16, accumulation=4),
    "ddp": plan(ranks=4, strategy="ddp"),
    "shard grad op": plan(ranks=4, strategy="fsdp-shard-grad-op"),
    "full shard in bfloat16": plan(ranks=2, strategy="fsdp-full-shard", precision="amp-bf16"),
    "ddp, accumulated": plan(ranks=2, strategy="ddp", accumulation=2),
    "fsdp 1": plan(ranks=2, strategy="fsdp-full-shard", fsdp=Fsdp(version="1")),
    "reduced in every micro batch": plan(
        ranks=2, strategy="fsdp-full-shard", accumulation=2, fsdp=Fsdp(sync_every_micro_batch=True)
    ),
    "hybrid": plan(ranks=4, nodes=2, strategy="fsdp-hybrid-shard"),
    "zero-1": plan(ranks=4, strategy="zero-1"),
    "no shard": plan(ranks=2, strategy="fsdp-no-shard"),
}


@pytest.mark.parametrize("name", some(CASES))
def test_collectives_are_those_of_the_real_code(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES[name]
    with watched(monkeypatch) as found:
        rehearse(case)
    expected: Counter[str] = Counter()
    for each in collectives(case):
        expected[each.operation] += STEPS * each.bytes
    assert found.keys() == expected.keys()
    for operation, size in expected.items():
        # Rows that do not divide by the ranks are padded; the padding is sent and not counted.
        assert found[operation] == pytest.approx(size, rel=0.01), operation
