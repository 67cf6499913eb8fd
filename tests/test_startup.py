"""Moments before the first step: a model built whole, and a checkpoint loaded to the device."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given

from memcalc.errors import InputError, UnknownNameError
from memcalc.estimate import estimate
from memcalc.ledger import ledger
from memcalc.models import MODELS
from memcalc.plan import Plan
from memcalc.reserved import replayed
from memcalc.startup import Startup
from tests.plans import plans

GIB = 2**30
SHARDED = Plan(
    model=MODELS["llama-3-8b"], tokens=1024, micro_batch=1, strategy="fsdp-full-shard", ranks=8,
    precision="amp-bf16", checkpoint_every=1,
)  # fmt: skip
ALONE = Plan(model=MODELS["gpt2"], tokens=128, micro_batch=1)


def with_startup(plan: Plan, **changes: str) -> Plan:
    return dataclasses.replace(plan, startup=Startup(**changes))


def test_a_model_built_whole_stands_on_every_rank_until_it_is_divided() -> None:
    """8.03e9 float32 parameters are 29.9 GiB, however many ranks there are."""
    found = estimate(with_startup(SHARDED, build="whole"))
    assert found.peak.moment == "init"
    assert 29.9 < found.peak.bytes / GIB < 30.5
    assert found.steady == estimate(SHARDED).peak
    assert found.peak.by_moment["backward"] == found.steady.by_moment["backward"]
    more = estimate(with_startup(dataclasses.replace(SHARDED, ranks=64), build="whole"))
    assert 29.9 < more.peak.bytes / GIB < 30.5 and more.steady.bytes < found.steady.bytes
    assert found.reserved.low >= found.peak.bytes


def test_building_whole_changes_nothing_where_every_rank_holds_everything() -> None:
    for strategy, ranks in (("single", 1), ("ddp", 4)):
        plan = dataclasses.replace(ALONE, strategy=strategy, ranks=ranks)
        assert estimate(with_startup(plan, build="whole")).peak == estimate(plan).peak


def test_segments_of_a_model_built_whole_serve_its_shards_and_steps() -> None:
    plan = with_startup(SHARDED, build="whole")
    found = replayed(plan, ledger(plan))
    assert found.peak_reserved >= ledger(plan).peak().bytes
    alone = replayed(SHARDED, ledger(SHARDED))
    assert found.peak_reserved < ledger(plan).peak().bytes + alone.peak_reserved


@pytest.mark.parametrize(("torch", "copies"), [("2.0", 2), ("2.1", 1)])
def test_a_checkpoint_on_the_device_stands_beside_parameters_and_states(torch: str, copies: int) -> None:
    """pytorch pull request 106082: until 2.1 load_state_dict made a deep copy of the states, 2 · 4 B per parameter."""
    found = estimate(with_startup(dataclasses.replace(ALONE, torch=torch, optimizer_kind="fused"), resume="device"))
    weights = found.peak.by_moment["resume"]
    count = found.parameters
    assert weights == pytest.approx(count * (4 + 8 + 4 + (8 if copies == 2 else 0)), rel=0.002)
    assert (found.peak.moment == "resume") == (copies == 2)  # a fused step needs 16 B per parameter


def test_a_resumed_run_has_its_states_before_the_first_forward() -> None:
    """Megatron-LM#3920 and others: the first forward of a resumed run goes out of memory where a fresh one fits."""
    fresh = dataclasses.replace(ALONE, micro_batch=32)
    resumed = with_startup(fresh, resume="host")
    first = [replayed(plan, ledger(plan), steps=1).peak_allocated for plan in (fresh, resumed)]
    later = [replayed(plan, ledger(plan), steps=2).peak_allocated for plan in (fresh, resumed)]
    assert first[0] < first[1]
    assert later[0] == pytest.approx(later[1], rel=0.01)


@given(plans())
def test_what_comes_before_leaves_the_step_as_it_is(plan: Plan) -> None:
    found = ledger(with_startup(plan, build="whole", resume="device"))
    assert found.steady() == ledger(plan).steady()
    assert found.peak().bytes == max(found.peak().by_moment.values())
    assert (found.live() >= 0).all() and found.live()[-1] == ledger(plan).live()[-1]


def test_unknown_words_are_refused() -> None:
    with pytest.raises(UnknownNameError, match="unknown build"):
        Startup(build="halves")
    with pytest.raises(InputError, match="unknown allocator option 'expandable'"):
        dataclasses.replace(ALONE, allocator="expandable:True")


def test_what_trainers_cannot_do_is_said() -> None:
    assert with_startup(SHARDED, build="whole").untrained.startswith("a model that each rank first builds whole")
    assert with_startup(SHARDED, resume="device").untrained
    assert "launch --resume" in with_startup(SHARDED, resume="host").untrained
