"""Pipelines: schedules, stages, and the micro batches that wait on each."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memcalc import schedules
from memcalc import step as step_module
from memcalc.assumptions import uncounted
from memcalc.deepspeed import DeepSpeed
from memcalc.errors import PlanError
from memcalc.estimate import estimate
from memcalc.layout import Layout
from memcalc.ledger import fullest, ledger, peaks
from memcalc.models import FAMILIES, MODELS, Model
from memcalc.plan import Plan
from memcalc.schedules import in_flight, passes, played
from memcalc.stages import split, stage, stage_weights
from memcalc.timeline import CATEGORIES
from tests.drawn_models import gpt2s, llamas
from tests.plans import plans

GPT2 = MODELS["gpt2"]
GPT2_WEIGHTS = FAMILIES["gpt2"].weights(GPT2)
PLAIN = Plan(model=GPT2, tokens=1024, micro_batch=4, precision="bf16")


def piped(stages: int, plan: Plan = PLAIN, **layout: object) -> Plan:
    return dataclasses.replace(
        plan,
        ranks=stages * plan.data_parallel,
        layout=Layout(pipeline=stages, **layout),  # type: ignore[arg-type]
    )


piped_plans = plans(model=st.one_of(gpt2s(max_layers=6), llamas(max_layers=6)), max_ranks=3).filter(
    lambda plan: plan.layout.pipeline > 1
)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved"])
@pytest.mark.parametrize(("stages", "micro_batches"), [(1, 1), (2, 1), (2, 8), (4, 3), (4, 4), (4, 16), (3, 7)])
def test_every_pass_is_run_once_and_backward_after_forward(schedule: str, stages: int, micro_batches: int) -> None:
    chunks = 2 if schedule == "interleaved" else 1
    for index in range(stages):
        order = passes(schedule, index, stages, micro_batches, chunks)
        assert len(order) == len(set(order)) == 2 * micro_batches * chunks
        place = {each: n for n, each in enumerate(order)}
        assert all(place[each] < place[each._replace(forward=False)] for each in order if each.forward)


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved"])
def test_a_stack_of_layers_is_divided_like_any_model(schedule: str, normed: bool) -> None:
    """Each stage of an mlp has its layers only, and memory for what it receives, as wide as the layer before says."""
    widths, accumulation, batch = (40, 300, 20, 70, 10, 30), 8, 16
    model = Model(
        name="pyramid", family="mlp", layers=6, hidden=8, features=5, classes=3, widths=widths, batch_norm=normed
    )
    whole = Plan(model=model, micro_batch=batch, accumulation=accumulation, device="cpu")
    chunks = 2 if schedule == "interleaved" else 1
    plan = piped(3, whole, schedule=schedule, chunks=chunks)
    stages = [ledger(plan, index) for index in range(3)]
    for kind in ("parameters", "buffers"):
        assert sum(each.at_moment("step", kind) for each in stages) == ledger(whole).at_moment("step", kind)
    if chunks == 1:
        seams = [[part.start, part.stop] for index in range(3) for part in stage(plan, index).chunks]
        inside = [sum(widths[block - 1] for block in blocks if 0 < block < 6) for blocks in seams]
        received = [each.at_moment("forward", "communication") for each in stages]
        assert received == [4 * accumulation * batch * size for size in inside]
    assert fullest(plan)[1].at(batch).peak().bytes == max(each.peak().bytes for each in stages)


def test_of_unlike_layers_any_stage_may_be_the_fullest() -> None:
    model = Model(name="bulge", family="mlp", layers=4, hidden=8, features=5, classes=3, widths=(10, 20, 900, 10))
    plan = piped(4, Plan(model=model, micro_batch=1, accumulation=4, device="cpu"))
    assert fullest(plan)[0] == 2


@given(st.integers(1, 9), st.integers(1, 40), st.data())
def test_no_more_wait_than_1f1b_has_stages_behind(stages: int, micro_batches: int, data: st.DataObject) -> None:
    index = data.draw(st.integers(0, stages - 1))
    assert in_flight(passes("1f1b", index, stages, micro_batches)) == min(stages - index, micro_batches)
    assert in_flight(passes("gpipe", index, stages, micro_batches)) == micro_batches


@given(st.integers(2, 6), st.integers(1, 4), st.integers(1, 60), st.data())
def test_what_is_played_has_as_many_waiting_as_all_micro_batches(
    stages: int, chunks: int, micro_batches: int, data: st.DataObject
) -> None:
    index = data.draw(st.integers(0, stages - 1))
    schedule = "interleaved" if chunks > 1 else "1f1b"
    some = played(schedule, index, stages, micro_batches, chunks)
    assert some <= micro_batches
    whole = passes(schedule, index, stages, micro_batches, chunks)
    assert in_flight(passes(schedule, index, stages, some, chunks)) == in_flight(whole)


@given(st.integers(1, 200), st.integers(1, 20), st.booleans())
def test_stages_share_all_blocks(blocks: int, parts: int, ends: bool) -> None:
    if parts > blocks + 2 * ends:
        return
    sizes = split(blocks, parts, ends)
    assert sum(sizes) == blocks
    assert min(sizes) >= 0
    assert max(sizes) - min(sizes[1:-1] or [max(sizes)]) <= 1 + ends


@settings(max_examples=30)
@given(piped_plans)
def test_stages_share_all_weights_and_a_tied_head_has_a_copy(plan: Plan) -> None:
    weights = plan.family.weights(plan.model)
    held = [
        weight.name
        for index in range(plan.layout.pipeline)
        for weight in stage_weights(weights, stage(plan, index), plan.model.tied)
    ]
    assert set(held) == {weight.name for weight in weights}
    assert len(held) == len(weights) + plan.model.tied
    assert held.count(weights[0].name) == 1 + plan.model.tied


@settings(max_examples=30)
@given(piped_plans)
def test_the_fullest_stage_is_among_those_that_are_played(plan: Plan) -> None:
    every = [ledger(plan, index).peak().bytes for index in range(plan.layout.pipeline)]
    assert max(every) == ledger(plan).peak().bytes == peaks(plan, [plan.micro_batch])[0]
    assert every[fullest(plan)[0]] == max(every)
    assert estimate(plan).stage == fullest(plan)[0]


@settings(max_examples=30)
@given(piped_plans)
def test_more_micro_batches_never_need_less(plan: Plan) -> None:
    # Interleaved micro batches go through in groups of as many as there are stages; a last, smaller one changes the order.
    one_more = plan.layout.pipeline if plan.layout.chunks > 1 else 1
    plan = dataclasses.replace(plan, accumulation=plan.accumulation * one_more)
    more = dataclasses.replace(plan, accumulation=plan.accumulation + one_more)
    assert ledger(more).peak().bytes >= ledger(plan).peak().bytes


@settings(max_examples=30)
@given(piped_plans.filter(lambda plan: plan.layout.chunks == 1))
def test_gpipe_never_keeps_fewer_activations_than_1f1b(plan: Plan) -> None:
    # Its peak may be lower all the same: gradients are there only when all forward passes are done.
    for index in range(plan.layout.pipeline):
        kept = []
        for name in ("1f1b", "gpipe"):
            step = ledger(dataclasses.replace(plan, layout=dataclasses.replace(plan.layout, schedule=name)), index)
            of_kind = np.where(step.category == CATEGORIES.index("activations"), step.delta, 0)
            kept.append(int(np.cumsum(of_kind).max()))
        assert kept[0] <= kept[1]


@pytest.mark.parametrize("index", [0, 1])
@pytest.mark.parametrize("checkpoint_every", [0, 1])
def test_counted_micro_batches_need_what_played_ones_do(
    index: int, checkpoint_every: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = dataclasses.replace(PLAIN, accumulation=20, checkpoint_every=checkpoint_every, micro_batch=1)
    plan = piped(2, plan, schedule="gpipe")
    counted = ledger(plan, index).peak().bytes
    monkeypatch.setattr(schedules, "PLAYED", 20)
    assert ledger(plan, index).peak().bytes == counted


def test_a_long_1f1b_needs_what_all_its_micro_batches_do(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = piped(3, dataclasses.replace(PLAIN, accumulation=12, micro_batch=1))
    short = ledger(plan, 0).peak().bytes
    monkeypatch.setattr(step_module, "played", lambda *where, **_: where[3])
    assert ledger(plan, 0).peak().bytes == short


def test_a_later_stage_keeps_fewer_micro_batches() -> None:
    """1F1B: stage s of p keeps min(p - s, m) micro batches, so that equal stages differ by one each."""
    plan = piped(6, dataclasses.replace(PLAIN, accumulation=16, strategy="megatron-ddp", precision="bf16-master"))
    inner = [ledger(plan, index).peak().by_category["activations"] for index in range(1, 5)]
    steps = {first - second for first, second in zip(inner, inner[1:], strict=False)}
    assert len(steps) == 1
    few = dataclasses.replace(plan, accumulation=2)
    assert len({ledger(few, index).peak().by_category["activations"] for index in range(1, 4)}) == 1


def test_engines_hold_on_to_different_tensors() -> None:
    """torch has a receive buffer for each micro batch, Megatron drops an output that was sent."""
    crossing = PLAIN.micro_batch * PLAIN.tokens * GPT2.hidden * 2
    held = [
        ledger(piped(3, dataclasses.replace(PLAIN, accumulation=count)), 1).peak().by_category["communication"]
        for count in (6, 7)
    ]
    assert held[1] - held[0] == 2 * crossing
    megatron = dataclasses.replace(PLAIN, strategy="megatron-ddp", precision="bf16-master", accumulation=6)
    assert ledger(piped(3, megatron), 1).peak().by_category["communication"] < held[0]


@pytest.mark.parametrize(
    ("layout", "said"),
    [
        ({"pipeline": 2, "chunks": 2}, "interleaved, and no other, has 2 or more on each rank"),
        ({"pipeline": 2, "schedule": "interleaved"}, "1 chunk: interleaved"),
        ({"pipeline": 13}, "12 layers do not go round pipeline 13 x chunks 1 = 13"),
        ({"pipeline": 1, "ends": True}, "but pipeline parallel is 1"),
    ],
)
def test_what_cannot_be_is_refused(layout: dict[str, object], said: str) -> None:
    pipeline = layout["pipeline"]
    assert isinstance(pipeline, int)
    with pytest.raises(PlanError, match=said):
        dataclasses.replace(PLAIN, ranks=pipeline, layout=Layout(**layout))  # type: ignore[arg-type]


def test_an_estimate_names_its_stage() -> None:
    found = estimate(piped(4, dataclasses.replace(PLAIN, accumulation=8)))
    assert f"the fullest stage of the pipeline is number {found.stage}, counted from 0 to 3" in " ".join(
        found.assumptions
    )
    assert estimate(PLAIN).stage == 0
    assert not any("stage" in said for said in estimate(PLAIN).assumptions)


def test_deepspeeds_engine_keeps_copies_of_inputs_outputs_and_logits() -> None:
    """deepspeed/runtime/pipe/engine.py: two copies of what was received; on the last stage two outputs stay."""
    plan = dataclasses.replace(
        PLAIN, strategy="deepspeed-1", precision="bf16-master", accumulation=8, checkpoint_every=1
    )
    crossing = PLAIN.micro_batch * PLAIN.tokens * GPT2.hidden * 2
    waiting = [ledger(piped(6, plan), index).at_moment("forward", "communication") for index in (1, 2)]
    assert waiting[0] - waiting[1] == 2 * crossing  # the received one, and the copy that is the first block's input
    logits = PLAIN.micro_batch * PLAIN.tokens * GPT2.vocab * 2
    few, more = (
        ledger(dataclasses.replace(plan, deepspeed=DeepSpeed(pipeline_engine=engine))).peak().bytes
        for engine in (False, True)
    )
    assert logits <= more - few <= 2 * logits


@pytest.mark.parametrize(("precision", "itemsize"), [("bf16-master", 4), ("fp16-master", 2), ("fp32", 4)])
def test_megatrons_gradients_lie_in_one_buffer(precision: str, itemsize: int) -> None:
    plan = dataclasses.replace(PLAIN, strategy="megatron-ddp", precision=precision, ranks=8, optimizer_kind="fused")
    parameters = sum(weight.numel for weight in GPT2_WEIGHTS)
    step = ledger(plan)
    assert step.at_moment("forward", "gradients") == -(-parameters * itemsize // 512) * 512
    copies = step.at_moment("step", "gradients") - step.at_moment("forward", "gradients") if itemsize == 2 else 0
    assert copies == pytest.approx(4 * parameters * (itemsize == 2), rel=1e-3)


def test_the_distributed_optimizer_divides_copies_and_states() -> None:
    """Megatron-LM docs/user-guide/features/dist_optimizer.md: 6 + 12 / d bytes a parameter of bfloat16 with float32 gradients."""
    parameters = sum(weight.numel for weight in GPT2_WEIGHTS)
    for ranks in (1, 4, 8):
        plan = dataclasses.replace(
            PLAIN, strategy="megatron-distributed", precision="bf16-master", ranks=ranks, optimizer_kind="fused"
        )
        held = [ledger(plan).at_moment("forward", kind) for kind in ("parameters", "gradients", "optimizer")]
        assert sum(held) == pytest.approx((6 + 12 / ranks) * parameters, rel=1e-3)


def test_old_torch_keeps_the_outputs_of_the_last_stage() -> None:
    plan = Plan(
        model=MODELS["gpt2"], tokens=128, micro_batch=2, ranks=2, accumulation=4, layout=Layout(pipeline=2),
        strategy="single", torch="2.9",
    )  # fmt: skip
    (said,) = uncounted(plan)
    assert f"{4 * 2 * 128 * 50257 * 4 / 1e6:.3f} MB" in said
    assert uncounted(dataclasses.replace(plan, torch="2.10")) == []
