"""What must hold however a model is divided over ranks of tensor, sequence and context parallel."""

from __future__ import annotations

import dataclasses

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from memcalc.estimate import estimate
from memcalc.layout import Layout
from memcalc.ledger import ledger, skeleton
from memcalc.plan import Plan
from memcalc.tensor_parallel import local
from tests.laws import kept_activations, model_states, replaced
from tests.plans import divided


def whole(plan: Plan) -> Plan:
    """The same with nothing divided but by the strategy."""
    return replaced(plan, ranks=plan.data_parallel, layout=Layout())


@given(divided())
def test_every_allocation_is_freed_at_most_once_and_the_step_closes(plan: Plan) -> None:
    timeline = ledger(plan)
    seen = np.zeros(len(timeline.names), dtype=np.int64)
    for ident, delta in zip(timeline.ident.tolist(), timeline.delta.tolist(), strict=True):
        seen[ident] += delta
        assert seen[ident] >= 0, timeline.names[ident]
    peak = timeline.peak()
    assert sum(peak.by_category.values()) == peak.bytes


@given(divided(), st.integers(1, 9))
def test_a_skeleton_serves_every_micro_batch(plan: Plan, micro_batch: int) -> None:
    assert skeleton(plan).peaks([micro_batch]) == [ledger(replaced(plan, micro_batch=micro_batch)).peak().bytes]


@given(divided())
def test_dividing_never_needs_more_states(plan: Plan) -> None:
    # Sharding rounds rows up anew in each part, and so can hold up to one row of every weight more.
    if plan.strategy_row.shards_optimizer:
        plan = replaced(plan, ranks=plan.layout.model_parallel)
    assert model_states(plan) <= model_states(whole(plan))


@given(divided())
def test_context_parallel_holds_the_states_of_as_many_shards(plan: Plan) -> None:
    if plan.strategy_row.parallel:
        flat = replaced(plan, layout=dataclasses.replace(plan.layout, context=1))
        assert plan.shards == flat.shards
        assert model_states(plan) == model_states(flat)


@given(divided())
def test_sequence_parallel_never_keeps_more_where_it_gathers_again(plan: Plan) -> None:
    if not plan.layout.sequence or plan.model.family != "megatron":
        return
    without = replaced(plan, layout=dataclasses.replace(plan.layout, sequence=False))
    # The float32 statistics and the masks are rounded up to blocks one by one.
    slack = 512 * len(ledger(plan).names)
    assert kept_activations(ledger(plan)) <= kept_activations(ledger(without)) + slack


@given(divided())
def test_a_rank_of_context_parallel_keeps_what_a_shorter_sequence_does(plan: Plan) -> None:
    """Only attention differs, and only while it runs."""
    if plan.attention != "flash":
        return
    layout = dataclasses.replace(plan.layout, context=1)
    short = replaced(
        plan, tokens=plan.tokens // plan.layout.context, layout=layout, ranks=plan.data_parallel * layout.model_parallel
    )
    if plan.device == "cuda" and not plan.strategy_row.gathers:
        assert kept_activations(ledger(plan)) == kept_activations(ledger(short))


@given(divided())
def test_a_ranks_weights_together_are_the_model(plan: Plan) -> None:
    """Each weight is whole on every rank, or its parts make it up, with padding of the vocabulary alone."""
    parts = {w.name: w for w in plan.family.weights(local(plan).model)}
    for weight in plan.family.weights(plan.model):
        part = parts.pop(weight.name)
        pairs = list(zip(part.shape, weight.shape, strict=True))
        divided_by = [-(-all_of // own) for own, all_of in pairs]
        assert divided_by.count(1) >= len(pairs) - 1
        assert max(divided_by) in (1, plan.layout.tensor) or weight.shape[0] == plan.model.vocab
    assert not parts


@given(divided())
def test_meters_are_in_order(plan: Plan) -> None:
    found = estimate(plan)
    assert found.peak.bytes <= found.reserved.low <= found.reserved.high <= found.device.high
