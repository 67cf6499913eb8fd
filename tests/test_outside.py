"""What is on the card and not torch's: contexts and communicators, by version of torch, card and layout."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any, cast

import pytest

from memcalc.estimate import estimate
from memcalc.hardware import GPUS, Bounds
from memcalc.layout import Layout
from memcalc.models import MODELS
from memcalc.outside import communicators, context, device_range, outside
from memcalc.plan import Plan
from memcalc.reserved import Range
from memcalc.strategies import STRATEGIES

MIB = 2**20
GPT2 = Plan(model=MODELS["gpt2"], tokens=1024, micro_batch=4, precision="amp-bf16")
DDP = dataclasses.replace(GPT2, strategy="ddp", ranks=8)


def laid_out(ranks: int, **degrees: int) -> Plan:
    fields = {"layout": Layout(**degrees), **OF_A_PLAN}  # type: ignore[arg-type]  # degrees alone are given
    return cast(Plan, SimpleNamespace(ranks=ranks, **fields))


OF_A_PLAN: dict[str, Any] = {
    "device": "cuda", "torch_version": (2, 6), "strategy_row": STRATEGIES["fsdp-full-shard"], "model": MODELS["gpt2"],
}  # fmt: skip


def test_one_rank_alone_talks_to_nobody() -> None:
    assert communicators(GPT2) == {}
    assert outside(GPT2, GPUS["a100-80gb"]) == Range(low=256 * MIB, point=468 * MIB, high=680 * MIB)


@pytest.mark.parametrize(
    ("ranks", "degrees", "groups"),
    [
        (8, {"tensor": 8}, {"tensor": 8}),
        (16, {"tensor": 8}, {"data": 2, "tensor": 8}),
        (64, {"tensor": 4, "pipeline": 4}, {"data": 4, "tensor": 4, "pipeline": 4}),
        (16, {"context": 2, "expert": 4}, {"data": 8, "context": 2, "expert": 4}),
    ],
)
def test_every_way_of_dividing_the_work_has_a_group(
    ranks: int, degrees: dict[str, int], groups: dict[str, int]
) -> None:
    plan = laid_out(ranks, **degrees)
    assert communicators(plan) == groups
    card = GPUS["h100-80gb"]
    assert outside(plan, card).low == card.context.low + len(groups) * card.nccl.low
    assert outside(plan, card).high == card.context.high + len(groups) * card.nccl.high


def test_megatron_and_deepspeed_have_groups_of_their_own() -> None:
    plan = laid_out(64, tensor=4, pipeline=4)
    axes = communicators(plan)
    plan.strategy_row = STRATEGIES["megatron-ddp"]  # type: ignore[misc]
    assert communicators(plan) == axes | {"model": 16, "world": 64, "tied head": 2}
    plan.strategy_row = STRATEGIES["deepspeed-1"]  # type: ignore[misc]
    assert communicators(plan) == axes | {"model": 16, "world": 64, "tied head": 2, "slice": 4}
    plan.model = MODELS["llama-3-8b"]  # type: ignore[misc]
    assert "tied head" not in communicators(plan)


def test_kernels_were_loaded_all_at_once_before_torch_1_13() -> None:
    """pytorch#107667: more than 1000 MB before CUDA 11.7, about 300 since."""
    old, new = (dataclasses.replace(GPT2, torch=torch) for torch in ("1.12", "1.13"))
    card = GPUS["v100-32gb"]
    assert context(old, card).low > context(new, card).high
    assert context(old, card).low <= 1000 * 10**6 <= context(old, card).high
    assert context(old, GPUS["mi250x"]) == GPUS["mi250x"].context


def test_a_context_that_somebody_measured_stands_for_the_catalogs() -> None:
    found = outside(DDP, GPUS["a100-80gb"], Bounds(1229 * MIB, 1536 * MIB))
    card = GPUS["a100-80gb"]
    assert (found.low, found.high) == (1229 * MIB + card.nccl.low, 1536 * MIB + card.nccl.high)
    assert found.low < found.point < found.high


def test_without_a_card_the_widest_bounds_stand() -> None:
    found = outside(DDP, None)
    each = [outside(DDP, card) for card in GPUS.values()]
    assert found.low == min(one.low for one in each) and found.high == max(one.high for one in each)


def test_the_device_adds_it_to_every_end_of_reserved() -> None:
    found = estimate(dataclasses.replace(DDP, gpu="a100-80gb"))
    rest = outside(DDP, GPUS["a100-80gb"])
    for end in ("low", "point", "high"):
        assert getattr(found.device, end) == getattr(found.reserved, end) + getattr(rest, end)
    nothing = Range(low=5, point=6, high=7)
    assert device_range(dataclasses.replace(GPT2, device="cpu"), nothing, None) == nothing
