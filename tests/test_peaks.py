"""Laws of what a search plays: peaks of deep models and long pipelines from a few layers and micro batches are the ledger's."""

from __future__ import annotations

import contextlib
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memcalc.alike import aligned
from memcalc.checkpointing import Checkpointing
from memcalc.climb import climb
from memcalc.errors import InputError
from memcalc.layout import Layout
from memcalc.ledger import play
from memcalc.loss import Loss
from memcalc.models import MODELS
from memcalc.peaks import fullest_of, outline, peak_of, stages_of
from memcalc.plan import Plan
from memcalc.stages import stage
from memcalc.timeline import MOMENTS
from tests.plans import divided, plans

DEEP = Plan(
    model=replace(MODELS["llama-3-8b"], layers=23), tokens=512, micro_batch=1, ranks=8, strategy="ddp", precision="amp-bf16",
)  # fmt: skip
PIPE = replace(DEEP, ranks=32, accumulation=32, layout=Layout(pipeline=16), model=replace(DEEP.model, layers=37))


@st.composite
def deep_plans(draw: st.DrawFn) -> Plan:
    """Plans of models that are deeper, and of pipelines that are longer, than others that are drawn."""
    plan, layers = draw(st.one_of(plans(), divided())), draw(st.integers(0, 20))
    stages, rounds = draw(st.sampled_from([1, 1, 2, 4])), draw(st.integers(0, 9))
    with contextlib.suppress(InputError):
        plan = replace(
            plan, layout=replace(plan.layout, pipeline=stages * plan.layout.pipeline), ranks=stages * plan.ranks,
            accumulation=stages * plan.accumulation + rounds,
        )  # fmt: skip
    with contextlib.suppress(InputError):
        if plan.model.layers == plan.model.blocks and plan.model.layers:
            plan = replace(plan, model=replace(plan.model, layers=plan.model.layers + layers))
    return plan


@given(deep_plans(), st.integers(1, 5))
@settings(max_examples=40, deadline=None)
def test_peaks_are_those_of_the_whole_ledger_and_no_less_than_what_forward_passes_leave(
    plan: Plan, micro_batch: int
) -> None:
    bound, most = climb(plan), 0
    for index in stages_of(plan):
        step, whole = outline(plan, index), play(plan, stage(plan, index))
        found, peak = step.fullest(micro_batch), whole.at(micro_batch).peak()
        assert (found.bytes, found.moment, found.by_category) == (peak.bytes, peak.moment, peak.by_category)
        assert step.peak(micro_batch) == peak.bytes
        most = max(most, peak.bytes)
    assert bound is None or bound.least(micro_batch) <= most


@pytest.mark.parametrize(
    "plan",
    [
        DEEP,
        replace(DEEP, strategy="zero-1", checkpoint_every=1),
        replace(DEEP, strategy="fsdp-full-shard", checkpoint_every=1),
        replace(DEEP, strategy="fsdp-shard-grad-op", checkpoint_every=2, optimizer_kind="fused"),
        replace(DEEP, strategy="fsdp-no-shard", accumulation=2),
        replace(DEEP, checkpoint_every=1, checkpointing=Checkpointing(policy="matrix-products")),
        replace(DEEP, loss=Loss(chunks=8, chunk_head=True)),
        replace(DEEP, ranks=4, layout=Layout(pipeline=2), accumulation=8),
    ],
    ids=lambda plan: f"{plan.strategy} {plan.checkpoint_every}",
)
def test_layers_that_are_alike_are_not_played_one_by_one(plan: Plan) -> None:
    """As exact as the law says, and shortened: it does not hold because everything was played."""
    for index in stages_of(plan):
        step, whole = outline(plan, index), play(plan, stage(plan, index))
        assert step.copies > 0
        assert sum(len(part.sign) for part in (*step.passes, *step.more)) < len(whole.sign) / 2
        assert [step.peak(size) for size in (1, 7)] == whole.peaks([1, 7])


def test_micro_batches_that_wait_alike_are_not_played_one_by_one() -> None:
    step, whole = outline(PIPE, 0), play(PIPE, stage(PIPE, 0))
    assert sum(len(part.sign) for part in step.passes) < len(whole.sign) / 2
    assert [step.peak(size) for size in (1, 7)] == whole.peaks([1, 7])


def test_forward_passes_alone_tell_what_a_long_pipeline_holds_before_its_first_backward_pass() -> None:
    bound, before, whole = climb(PIPE), outline(PIPE, 0).before, play(PIPE, stage(PIPE, 0))
    assert bound is not None and before is not None and bound.flights == 16
    live, start = whole.at(3).live(), len(before.sign)
    first = int(np.argmax(whole.moment == MOMENTS.index("backward")))
    assert bound.least(3) - bound.held == live[start:first].max() - live[start - 1]
    assert 0.5 * live[start - 1] < bound.held <= live[start - 1]  # no buckets of DDP in it


def test_the_fullest_point_is_made_of_its_parts() -> None:
    found = fullest_of(replace(DEEP, micro_batch=2))
    assert found.bytes == sum(found.by_category.values()) == peak_of(replace(DEEP, micro_batch=2))


@given(
    st.lists(st.integers(0, 3), max_size=4), st.lists(st.integers(4, 6), min_size=1, max_size=4),
    st.lists(st.integers(7, 9), max_size=4), st.integers(1, 3),
)  # fmt: skip
def test_a_stretch_is_found_where_it_repeats(start: list[int], layer: list[int], end: list[int], times: int) -> None:
    low, high = (np.array([*start, *layer * count, *end]) for count in (times, times + 1))
    found = aligned(low, high)
    assert found is not None
    made = low.tolist()
    for each in reversed(found):
        made[each.before : each.before] = high[each.events].tolist()
    assert made == high.tolist()


def test_what_repeats_nothing_before_it_is_no_stretch() -> None:
    assert aligned(np.array([1, 2, 9]), np.array([1, 2, 3, 9])) is None
    assert aligned(np.array([1, 2, 3]), np.array([1, 2])) is None
