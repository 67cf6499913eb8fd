"""What must hold between the meters of every plan."""

from __future__ import annotations

from hypothesis import given

from memcalc.allocator import Allocator
from memcalc.allocator_options import AllocatorOptions
from memcalc.estimate import estimate
from memcalc.ledger import ledger
from memcalc.plan import Plan
from memcalc.reserved import replayed, reserved_range, run
from tests.plans import plans

MIB = 2**20


@given(plans())
def test_meters_are_in_order(plan: Plan) -> None:
    found = estimate(plan)
    assert found.peak.bytes <= found.reserved.low <= found.reserved.high
    assert found.reserved.low <= found.device.low <= found.device.high
    assert found.reserved.high <= found.device.high
    assert found.host >= 0


@given(plans())
def test_steps_leave_as_much_as_they_found(plan: Plan) -> None:
    if plan.device == "cpu":
        return
    timeline = ledger(plan)
    two, three = (replayed(plan, timeline, steps=steps) for steps in (2, 3))
    assert two.allocated == three.allocated and two.peak_allocated == three.peak_allocated


@given(plans())
def test_reserved_lies_between_the_tensors_and_all_that_was_ever_asked_for(plan: Plan) -> None:
    if plan.device == "cpu":
        return
    found = estimate(plan)
    timeline, held = found.timeline, found.held
    assert held is not None
    assert found.reserved.low == found.peak.bytes <= found.reserved.point <= found.reserved.high
    assert held.peak_reserved % (2 * MIB) == 0
    assert held.peak_allocated <= held.peak_reserved
    # Were nothing ever reused, each request would have a segment of its own.
    options, asked = plan.allocator_options, [size for _, size in run(plan, timeline) if size > 0]
    segment = Allocator(options).segment_size
    streams = len(held.by_stream)
    assert held.peak_reserved <= sum(segment(options.round(size)) for size in asked) + 2 * streams * 20 * MIB


@given(plans())
def test_expandable_segments_hold_no_more_than_a_page_for_each_hole(plan: Plan) -> None:
    """No law says that they hold less: best fit may split a block that a segment of its own had spared."""
    if plan.device == "cpu":
        return
    timeline = ledger(plan)
    held = replayed(plan, timeline, AllocatorOptions(expandable_segments=True))
    assert held.peak_allocated == timeline.peak().bytes  # also where a free waits for another stream
    assert held.segments <= 2 * len(held.by_stream)


@given(plans())
def test_a_card_with_room_changes_nothing_and_a_full_one_only_lowers_reserved(plan: Plan) -> None:
    if plan.device == "cpu":
        return
    timeline = ledger(plan)
    free = replayed(plan, timeline)
    assert replayed(plan, timeline, capacity=free.peak_reserved).peak_reserved == free.peak_reserved
    capacity = free.peak_reserved - 2 * MIB
    full = replayed(plan, timeline, capacity=capacity)
    assert full.peak_reserved < free.peak_reserved
    likely = free.peak_reserved if full.refused else full.peak_reserved
    assert reserved_range(plan, timeline, capacity=capacity, free=free).point == likely
    # What cannot hold the tensors refuses one of them, which an estimate takes for granted.
    assert replayed(plan, timeline, capacity=timeline.peak().bytes - 1).refused is not None
