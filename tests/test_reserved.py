"""From the timeline of one step to what a whole run reserves: construction, states, kept gradients, streams."""

from __future__ import annotations

import dataclasses
import time
from typing import cast

import numpy as np
import pytest
from hypothesis import given, settings

from memcalc.allocator_options import AllocatorOptions
from memcalc.estimate import estimate
from memcalc.fitting import exactly_needed
from memcalc.fsdp import Fsdp
from memcalc.layout import Layout
from memcalc.ledger import ledger
from memcalc.models import MODELS
from memcalc.plan import Plan
from memcalc.replay import replay
from memcalc.reserved import most_reserved, replayed, run
from memcalc.streams import STREAMS, delayed, stream_of
from memcalc.timeline import CATEGORIES, MOMENTS, Timeline
from tests.allocations import DEFAULT, EXPANDABLE, MIB
from tests.plans import plans

NAMED = {
    "single": Plan(model=MODELS["gpt2"], tokens=1024, micro_batch=8, precision="amp-bf16", gpu="a100-80gb"),
    "ddp": Plan(model=MODELS["gpt2"], tokens=1024, micro_batch=4, precision="amp-bf16", strategy="ddp", ranks=8),
    "fsdp": Plan(
        model=MODELS["llama-2-7b"], tokens=4096, micro_batch=1, precision="amp-bf16", strategy="fsdp-full-shard",
        ranks=8, checkpoint_every=1,
    ),
    "accumulated": Plan(model=MODELS["gpt2"], tokens=256, micro_batch=2, accumulation=4, precision="bf16"),
    "pipeline-engine": Plan(
        model=MODELS["gpt2"], tokens=256, micro_batch=2, accumulation=8, precision="bf16-master", strategy="deepspeed-1",
        ranks=4, layout=Layout(pipeline=4),
    ),
}  # fmt: skip


@pytest.mark.parametrize("options", [DEFAULT, EXPANDABLE], ids=["segments", "expandable"])
@pytest.mark.parametrize("name", list(NAMED))
def test_after_the_second_step_nothing_more_is_reserved(name: str, options: AllocatorOptions) -> None:
    plan = NAMED[name]
    timeline = ledger(plan)
    second, fifth = (replayed(plan, timeline, options, steps=steps) for steps in (2, 5))
    assert second.peak_reserved == fifth.peak_reserved
    assert second.peak_allocated == fifth.peak_allocated
    assert len({sum(size for _, size in run(plan, timeline, steps)) for steps in (1, 2, 3)}) == 1


@given(plans())
@settings(max_examples=40, deadline=None)
def test_a_run_is_construction_and_steps_that_repeat(plan: Plan) -> None:
    timeline = ledger(plan)
    totals = [sum(size for _, size in run(plan, timeline, steps)) for steps in (1, 2, 3)]
    assert totals[0] == totals[1] == totals[2]
    found = replayed(plan, timeline)
    assert found.peak_reserved >= found.peak_allocated >= timeline.peak().bytes
    if plan.device == "cpu" or (plan.strategy_row.gathers and plan.fsdp.version == "1"):
        return  # no blocks; or frees that wait for another stream
    again = replayed(plan, timeline, EXPANDABLE)
    assert again.peak_allocated == timeline.peak().bytes, "split to the block: nothing to spare"


def test_the_optimizers_states_come_after_the_first_backward() -> None:
    plan = NAMED["single"]
    timeline = ledger(plan)
    events = run(plan, timeline, 1)
    states = [
        i for i, (ident, _) in enumerate(events) if timeline.names[ident % len(timeline.names)].endswith(" state")
    ]
    assert len(states) == 2 * len(plan.family.weights(plan.model))
    assert states == list(range(states[0], states[-1] + 1))
    before = {timeline.names[ident % len(timeline.names)] for ident, _ in events[: states[0]]}
    assert any(name.endswith(" gradient") for name in before)


def test_gradients_that_the_next_step_frees_are_not_kept_for_good() -> None:
    """NO_SHARD's: with accumulation the step makes others of their names, which are freed as well."""
    plan = dataclasses.replace(NAMED["accumulated"], strategy="fsdp-no-shard", ranks=2, precision="amp-bf16")
    timeline = ledger(plan)
    assert replayed(plan, timeline, EXPANDABLE).peak_allocated == timeline.peak().bytes


@pytest.mark.parametrize("version", ["1", "2"])
def test_states_are_made_in_the_models_order(version: str) -> None:
    """``model.parameters()``: blocks between the embedding and the head, although those two are one unit."""
    plan = dataclasses.replace(NAMED["fsdp"], fsdp=Fsdp(version=version))
    names = [name.removesuffix(" state") for name in ledger(plan).names if name.endswith(" state")]
    held = [weight.name for weight in plan.weights if weight.name in names]
    assert list(dict.fromkeys(names)) == held
    assert version == "1" or len(held) == len(plan.weights), "of FSDP 1 those that reach into this rank's shard"


def test_shards_are_cast_all_at_once() -> None:
    """_fsdp_collectives.py, _get_param_all_gather_inputs: one flat tensor of each unit, as large as its gather over the ranks."""
    plan = NAMED["fsdp"]
    timeline = ledger(plan)
    sizes = dict.fromkeys(timeline.names, 0)
    for ident, delta in zip(timeline.ident.tolist(), timeline.delta.tolist(), strict=True):
        sizes[timeline.names[ident]] = max(sizes[timeline.names[ident]], delta)
    gathers = {name: size for name, size in sizes.items() if name.endswith(" gather")}
    assert len(gathers) == 33
    assert {name: size // plan.ranks for name, size in gathers.items()} == {
        name.replace("cast shard", "gather"): size for name, size in sizes.items() if name.endswith(" cast shard")
    }


def test_kept_gradients_come_in_the_first_backward() -> None:
    plan = dataclasses.replace(NAMED["single"], set_to_none=False)
    timeline = ledger(plan)
    size, events = len(timeline.names), run(plan, timeline, 2)
    kept = [
        i
        for i, (ident, delta) in enumerate(events)
        if ident < size and delta > 0 and timeline.names[ident].endswith(" gradient")
    ]
    assert len(kept) == len(plan.family.weights(plan.model))
    # Where each lies was decided among activations: the first step's, whose idents are those of the timeline and size.
    first_activation = next(i for i, (ident, _) in enumerate(events) if ident >= size)
    last_activation = max(
        i
        for i, (ident, delta) in enumerate(events)
        if size <= ident < 2 * size and delta > 0 and timeline.names[ident - size] == "lm_head output"
    )
    assert first_activation < last_activation < kept[0]
    # They stay: nothing of the construction is freed, and the second backward makes others to add to them.
    assert not {ident for ident, delta in events if delta < 0 and ident < size} & {events[i][0] for i in kept}
    second = [timeline.names[ident - 2 * size] for ident, delta in events if ident >= 2 * size and delta > 0]
    assert sum(name.endswith(" gradient") for name in second) >= len(kept)


def test_what_a_real_step_frees_for_good_was_there() -> None:
    """In the second step DDP frees its buckets and makes them anew in another order; other steps do neither."""
    plan = NAMED["ddp"]
    names = ("weight", "empty", "empty", "odd", "batch", "batch", "batch", "batch", "DDP > empty")
    before = [(0, 4), (1, 2), (2, 3), (3, 1), (4, 1), (5, 1)]
    events = [*before, (6, 1), (7, 1), (4, -1), (5, -1), (1, -2), (2, -3), (3, -1), (8, 5)]
    inputs, forward = CATEGORIES.index("inputs"), MOMENTS.index("forward")
    timeline = Timeline(
        names=names,
        ident=np.array([ident for ident, _ in events]),
        category=np.array([inputs if names[ident] == "batch" else 0 for ident, _ in events], np.int8),
        moment=np.array([MOMENTS.index("start")] * 10 + [forward] * 4, np.int8),
        delta=np.array([size * 512 for _, size in events]),
    )
    assert len(run(plan, timeline, 1)) == 6, "the weight, one bucket and the odd one, a batch, the new bucket"
    for steps in (1, 2, 3):
        live: dict[int, int] = {}
        for ident, size in run(plan, timeline, steps):
            assert (ident in live) == (size < 0), "freed is what is there, made what is not"
            live[ident] = live.get(ident, 0) + size
            live = {key: size for key, size in live.items() if size > 0}
    assert replayed(plan, timeline).peak_allocated >= timeline.peak().bytes


class _Fsdp1:
    """What streams.py reads of a plan with FSDP 1."""

    strategy_row = NAMED["fsdp"].strategy_row

    class fsdp:
        version = "1"


def test_under_fsdp_1_gathers_are_free_two_units_later() -> None:
    """_limiter_utils.py: the third gather waits until the first unit's buffer is free, so the pool holds two or three."""
    names = [f"h.{unit} gather" for unit in range(4)]
    events = [(unit, sign * 100) for unit in range(4) for sign in (1, -1)]
    plan = cast(Plan, _Fsdp1)
    assert stream_of(plan, names) == dict.fromkeys(range(4), 3)
    moved = delayed(plan, names, events)
    freed = [event for event in moved if event[1]]
    assert freed == [(0, 100), (1, 100), (0, -100), (2, 100), (1, -100), (3, 100), (2, -100), (3, -100)]
    assert [event for event in moved if event[0] == 1] == [(1, 100), (1, 0), (1, -100)], "let go of at once"
    assert replay([(ident, size * MIB) for ident, size in moved]).peak_allocated == 100 * MIB
    assert delayed(NAMED["fsdp"], names, events) == events, "FSDP 2 waits for events of its own"
    gathered = replay([(ident, size * MIB) for ident, size in moved]).peak_reserved
    assert gathered == 200 * MIB == 2 * replay([(ident, size * MIB) for ident, size in events]).peak_reserved


def test_under_fsdp_1_what_is_reduced_is_made_on_a_stream_of_its_own() -> None:
    names = ["h.0 flat gradient", "h.0 gradient to reduce", "h.0 shards gradient", "h.0 cast shard", "logits"]
    assert stream_of(cast(Plan, _Fsdp1), names) == {1: 2, 2: 2, 3: 1}


def test_collectives_of_fully_shard_have_streams_of_their_own() -> None:
    plan = NAMED["fsdp"]
    timeline = ledger(plan)
    assert set(stream_of(plan, timeline.names).values()) == set(STREAMS["2"].values())
    assert stream_of(NAMED["ddp"], ledger(NAMED["ddp"]).names) == {}
    found = replayed(plan, timeline)
    # The shards of the gradients, 6.74e9 parameters / 8 ranks * 4 B, are all on the reduce-scatter's stream.
    shards = sum(weight.numel for weight in plan.family.weights(plan.model)) / 8 * 4
    assert shards <= found.by_stream[2] <= shards + 33 * 20 * MIB


def test_80_layers_are_replayed_in_under_a_second() -> None:
    plan = Plan(
        model=MODELS["llama-2-70b"], strategy="fsdp-full-shard", ranks=64, tokens=4096, micro_batch=1,
        precision="amp-bf16",
    )  # fmt: skip
    timeline = ledger(plan)
    started = time.process_time()
    found = replay(timeline)
    assert time.process_time() - started < 1
    assert found.peak_reserved >= timeline.peak().bytes


@pytest.mark.parametrize(("name", "strategy"), [("gpt2", "deepspeed-2"), ("gpt2-large", "deepspeed-1")])
def test_a_search_counts_the_same_high_end_where_the_replay_decides_it(name: str, strategy: str) -> None:
    plan = Plan(
        model=MODELS[name], tokens=256, micro_batch=1, ranks=4, strategy=strategy, precision="bf16-master",
        gpu="a100-80gb", checkpoint_every=1,
    )  # fmt: skip
    found = estimate(plan)
    assert exactly_needed(plan, found.peak.bytes) == found.device.high
    assert found.reserved.high > most_reserved(plan, found.peak.bytes)
