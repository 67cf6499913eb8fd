"""The four meters, the verdict, and what an estimate says it assumed."""

from __future__ import annotations

import dataclasses

import pytest

from memcalc.estimate import estimate, holding_gpus
from memcalc.hardware import GPUS
from memcalc.models import MODELS, Model
from memcalc.outside import outside
from memcalc.plan import Plan
from memcalc.reserved import replayed
from memcalc.units import format_both

GB, MIB = 10**9, 2**20


def sized(parameters: int = GB, **changes: object) -> Plan:
    model = Model(name=f"{parameters:,} parameters", family="size", parameters=parameters)
    return dataclasses.replace(Plan(model=model, optimizer="adam"), **changes)  # type: ignore[arg-type]


GPT2 = Plan(model=MODELS["gpt2"], tokens=1024, micro_batch=4, precision="amp-bf16")


def test_json_has_exactly_these_keys() -> None:
    found = estimate(GPT2).to_dict()
    assert list(found) == [
        "plan", "allocated", "reserved", "device", "host", "parameters", "verdict", "assumptions",
    ]  # fmt: skip
    assert list(found["allocated"]) == ["peak_bytes", "moment", "by_category", "by_moment"]
    assert list(found["reserved"]) == list(found["device"]) == ["low_bytes", "high_bytes"]
    assert list(found["host"]) == ["peak_bytes"]


@pytest.mark.parametrize("strategy", ["fsdp-full-shard", "fsdp-shard-grad-op"])
def test_of_unknown_layers_only_what_a_rank_keeps_is_counted(strategy: str) -> None:
    found = estimate(sized(strategy=strategy, ranks=8))
    assert 0 <= found.peak.bytes - 20 * GB // 8 < 5 * 512  # five tensors, each in whole blocks
    assert any("gathered layers are not counted" in line for line in found.assumptions)
    known = sized(strategy=strategy, ranks=8)
    known = dataclasses.replace(known, model=dataclasses.replace(known.model, layers=10))
    assert estimate(known).peak.bytes > 20 * GB // 8


def test_sharded_gradients_of_a_size_alone_are_float32_under_a_16_bit_policy() -> None:
    found = estimate(sized(strategy="fsdp-full-shard", ranks=8, precision="amp-bf16"))
    assert 0 <= found.peak.bytes - 20 * GB // 8 < 5 * 512
    assert found.peak.by_category["gradients"] == found.peak.by_category["parameters"]


def test_what_was_not_counted_can_be_refuted_but_not_confirmed() -> None:
    assert estimate(sized(gpu="t4")).verdict == "does-not-fit"
    assert estimate(sized(gpu="h200")).verdict == "unknown"
    assert any("activations are not counted" in line for line in estimate(sized()).assumptions)


def test_verdicts_follow_the_bounds_of_the_device_meter() -> None:
    verdicts = {}
    for micro_batch in range(4, 200, 4):
        found = estimate(dataclasses.replace(GPT2, micro_batch=micro_batch, gpu="a100-80gb"))
        usable = GPUS["a100-80gb"].usable_bytes
        assert (found.verdict == "does-not-fit") == (found.device.low > usable)
        assert (found.verdict == "fits") == (found.device.high <= usable)
        verdicts[found.verdict] = micro_batch
    assert list(verdicts) == ["fits", "tight", "does-not-fit"]
    assert estimate(GPT2).verdict == "unknown"  # no card was named


@pytest.mark.parametrize(("gpu", "workspace"), [("a100-80gb", 8_519_680), ("h100-80gb", 33_554_432)])
def test_cublas_workspaces_of_a_known_card_are_counted_until_torch_2_15(gpu: str, workspace: int) -> None:
    without = estimate(GPT2).peak.bytes
    assert estimate(dataclasses.replace(GPT2, gpu=gpu)).peak.bytes == without + 2 * workspace
    assert estimate(dataclasses.replace(GPT2, gpu=gpu, torch="2.15")).peak.bytes == without


def test_what_blocks_hold_beside_their_tensors_is_said() -> None:
    plan = dataclasses.replace(GPT2, model=MODELS["gpt2-xl"])
    found = estimate(plan)
    beside = replayed(plan, found.timeline).peak_allocated - found.peak.bytes
    assert 0 < beside < 0.02 * found.peak.bytes
    assert any(f"may be {format_both(beside)} higher" in line for line in found.assumptions)
    expandable = estimate(dataclasses.replace(plan, allocator="expandable_segments:True"))
    assert not any("higher" in line for line in expandable.assumptions)
    assert expandable.reserved.point < found.reserved.point


def test_a_full_card_makes_the_allocator_give_its_cache_back() -> None:
    """release_cached_blocks: what does not fit with the cache may fit without it."""
    plan = dataclasses.replace(GPT2, model=MODELS["gpt2-xl"], torch="2.15", gpu="a100-40gb")
    found, free = estimate(plan).reserved, estimate(dataclasses.replace(plan, gpu="a100-80gb")).reserved
    capacity = GPUS["a100-40gb"].usable_bytes - outside(plan, GPUS["a100-40gb"]).point
    assert free.low == found.low < found.point <= capacity < free.point
    assert free.high == found.high, "what it would like to have is said all the same"
    # Where not even that is enough, what it would like to have is the point too.
    small = estimate(dataclasses.replace(plan, gpu="rtx-3060")).reserved
    assert small == free


def test_more_ranks_add_a_communicator_to_the_device_meter() -> None:
    alone = estimate(dataclasses.replace(GPT2, gpu="a100-80gb"))
    several = estimate(dataclasses.replace(GPT2, gpu="a100-80gb", strategy="fsdp-no-shard", ranks=8))
    card = GPUS["a100-80gb"]
    assert alone.device.low - alone.reserved.low == card.context.low
    assert several.device.low - several.reserved.low == card.context.low + card.nccl.low
    assert several.device.high - several.reserved.high == card.context.high + card.nccl.high


def test_on_a_cpu_all_meters_are_the_process_memory() -> None:
    found = estimate(dataclasses.replace(GPT2, device="cpu"))
    assert found.host == found.peak.bytes
    assert found.reserved.low == found.reserved.high == found.device.low == found.device.high == found.peak.bytes


def test_the_host_holds_the_batch_and_the_step_counters() -> None:
    weights = len(GPT2.family.weights(GPT2.model))
    assert estimate(GPT2).host == 4 * 2 * 1024 * 8 + 4 * weights
    assert estimate(dataclasses.replace(GPT2, optimizer_kind="fused")).host == 4 * 2 * 1024 * 8


def test_older_torch_kept_two_lists_in_the_step() -> None:
    assert estimate(sized(torch="2.0")).peak.bytes == 24 * GB
    assert estimate(sized(torch="2.1")).peak.bytes == 20 * GB


def test_cards_that_hold_it_come_smallest_first_and_say_whether_for_sure() -> None:
    plan = sized()
    found = holding_gpus(plan, estimate(plan).reserved)
    sizes = [gpu.usable_bytes for gpu, _ in found]
    assert sizes == sorted(sizes)
    assert {gpu.name for gpu, sure in found if sure} >= {"h100-80gb", "a100-80gb", "a100-40gb"}
    assert "t4" not in {gpu.name for gpu, _ in found}
