"""Decay, clipping, averages and steps in backward: what they add or save, and what they refuse."""

from __future__ import annotations

import dataclasses

import pytest

from memcalc.errors import PlanError
from memcalc.estimate import estimate
from memcalc.ledger import ledger
from memcalc.models import MODELS
from memcalc.plan import Plan
from memcalc.update import Update

PLAN = Plan(model=MODELS["llama-3-8b"], tokens=128, micro_batch=1, precision="bf16")
PARAMETERS = 8030261248


def peak(plan: Plan, **update: object) -> int:
    return ledger(dataclasses.replace(plan, update=Update(**update))).peak().bytes  # type: ignore[arg-type]


def test_an_average_is_one_more_copy_in_its_own_dtype() -> None:
    assert peak(PLAN, ema="weights") - peak(PLAN) == 2 * PARAMETERS
    assert peak(PLAN, ema="float32") - peak(PLAN) == 4 * PARAMETERS


def test_clipping_makes_a_block_for_each_norm_and_partial_sums() -> None:
    plan = dataclasses.replace(PLAN, optimizer="sgd")
    step = [
        ledger(dataclasses.replace(plan, update=Update(clip=clip))).peak().by_moment["step"] for clip in (False, True)
    ]
    tensors, stretches = 291, 128256 * 4096 // 65536
    assert step[1] - step[0] == pytest.approx(512 * tensors + 4 * tensors * stretches, rel=0.01)


def test_a_step_in_backward_needs_no_gradients_of_the_whole_model() -> None:
    """torchtune: optimizer_in_bwd saves the gradients, 2 B a parameter here, and the step's list."""
    plan = dataclasses.replace(PLAN, optimizer="paged-adamw-8bit", optimizer_kind="fused")
    assert peak(plan) / PARAMETERS == pytest.approx(4, abs=0.05)
    # Weights, and the largest gradient: that of the head or of the embedding.
    assert peak(plan, in_backward=True) / PARAMETERS == pytest.approx(2 + 2 * 128256 * 4096 / PARAMETERS, abs=0.1)


def test_under_fsdp_a_unit_is_updated_when_its_shards_are_reduced() -> None:
    plan = dataclasses.replace(PLAN, strategy="fsdp-full-shard", ranks=8, precision="amp-bf16")
    steps = ledger(dataclasses.replace(plan, update=Update(in_backward=True)))
    assert steps.at_moment("step", "gradients") == 0
    assert ledger(plan).at_moment("step", "gradients") == pytest.approx(4 * PARAMETERS / 8, rel=1e-3)


def test_paged_states_are_counted_on_the_host() -> None:
    plan = dataclasses.replace(PLAN, optimizer="paged-adamw", optimizer_kind="fused")
    assert estimate(plan).host == pytest.approx(8 * PARAMETERS, rel=1e-3)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"update": Update(l2=True)}, "adamw adds no decay to gradients"),
        ({"update": Update(in_backward=True), "strategy": "ddp", "ranks": 2}, "in buckets"),
        ({"update": Update(in_backward=True), "accumulation": 2}, "cannot accumulate over 2"),
        ({"update": Update(in_backward=True, clip=True)}, "never has all gradients together"),
        ({"update": Update(in_backward=True), "optimizer": "muon", "optimizer_kind": "for-loop"}, "one by one"),
        ({"update": Update(in_backward=True), "optimizer": "lbfgs", "optimizer_kind": "for-loop"}, "lbfgs"),
    ],
)
def test_what_makes_no_sense_is_refused(changes: dict[str, object], said: str) -> None:
    with pytest.raises(PlanError, match=said):
        dataclasses.replace(PLAN, **changes)  # type: ignore[arg-type]


def test_what_the_trainers_cannot_do_is_said() -> None:
    assert "in backward" in dataclasses.replace(PLAN, update=Update(in_backward=True)).untrained
    assert "average" in dataclasses.replace(PLAN, update=Update(ema="weights")).untrained
    assert not dataclasses.replace(PLAN, optimizer="adam", update=Update(l2=True, clip=True)).untrained
