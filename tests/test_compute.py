"""torch.compile as a range, products in 8 bit, activations in host memory."""

from __future__ import annotations

import dataclasses
from itertools import accumulate

import pytest

from memcalc.checkpointing import Checkpointing
from memcalc.compute import Compute
from memcalc.errors import PlanError
from memcalc.estimate import estimate
from memcalc.ledger import ledger
from memcalc.models import MODELS, Model
from memcalc.plan import Plan
from memcalc.timeline import MOMENTS
from memcalc.units import format_both

S, H, F = 2048, 1024, 4096
LLAMA = Model(
    name="compute", family="llama", layers=8, hidden=H, heads=16, kv_heads=16, ffn=F, vocab=100, context=S
)  # fmt: skip
PLAN = Plan(model=LLAMA, tokens=S, micro_batch=1, precision="bf16", optimizer="sgd")


def moments(**compute: object) -> dict[str, int]:
    plan = dataclasses.replace(PLAN, compute=Compute(**compute))  # type: ignore[arg-type]
    return ledger(plan).peak().by_moment


def test_compiled_norms_are_one_kernel_in_any_version() -> None:
    old = dataclasses.replace(PLAN, torch="2.4")
    compiled = dataclasses.replace(old, compute=Compute(compile=True))
    assert ledger(compiled).peak().bytes == ledger(PLAN).peak().bytes < ledger(old).peak().bytes


def test_the_other_end_of_a_compiled_estimate_is_said() -> None:
    least = ledger(dataclasses.replace(PLAN, checkpoint_every=1)).peak().bytes
    found = estimate(dataclasses.replace(PLAN, compute=Compute(compile=True)))
    (said,) = [line for line in found.assumptions if "torch.compile" in line]
    assert format_both(least) in said and least < found.peak.bytes


def test_a_compiled_selective_checkpoint_does_not_keep_what_backward_never_reads() -> None:
    eager = dataclasses.replace(PLAN, checkpoint_every=1, checkpointing=Checkpointing(policy="matrix-products"))
    compiled = dataclasses.replace(eager, compute=Compute(compile=True))
    kept, less = (ledger(plan).at_moment("loss", "activations") for plan in (eager, compiled))
    assert kept - less == 8 * S * H * 2  # the down projection's output of each block, whose sum goes on alone


def in_8_bit(float8: str) -> int:
    """All bytes of 8-bit factors and scales that a step makes."""
    timeline = ledger(dataclasses.replace(PLAN, compute=Compute(float8=float8)))
    made = zip(timeline.ident.tolist(), timeline.delta.tolist(), strict=True)
    return sum(delta for ident, delta in made if delta > 0 and timeline.names[ident].endswith(("in 8 bit", "scales")))


def test_factors_in_8_bit_pass_by_and_nothing_less_is_kept() -> None:
    plain, tensorwise = moments(), moments(float8="tensorwise")
    assert tensorwise["loss"] == plain["loss"]
    # At most a down projection's: its input and its weight, a byte each.
    assert S * H + F * H <= tensorwise["forward"] - plain["forward"] <= S * F + F * H
    assert 0 <= tensorwise["backward"] - plain["backward"] <= S * F + F * H + S * H


def test_each_product_casts_its_factors_twice_and_its_gradient_once_or_twice() -> None:
    wide, narrow, weights = 6 * H + F, 5 * H + 2 * F, 4 * H * H + 3 * H * F  # inputs, outputs, weights of a block
    by_tensor = 8 * (2 * (S * wide + weights) + S * narrow)
    assert in_8_bit("none") == 0
    assert in_8_bit("tensorwise") == by_tensor
    assert in_8_bit("rowwise") == by_tensor + 8 * S * narrow
    assert in_8_bit("mxfp8") == in_8_bit("rowwise") * 33 // 32


def test_at_most_five_saved_tensors_are_on_their_way_to_the_host() -> None:
    here, away = moments(), moments(offload_activations=True)
    kept = here["loss"] - away["loss"]
    assert kept > 0.8 * (here["forward"] - here["start"])
    # A block's widest tensors, of which the last five saved may still be there.
    assert away["forward"] - away["start"] < 5 * 2 * S * F + 4 * 2 * S * F
    assert away["backward"] < here["backward"]


def test_inputs_of_checkpoints_wait_on_the_host_too() -> None:
    plan = dataclasses.replace(PLAN, checkpoint_every=1)
    away = dataclasses.replace(plan, compute=Compute(offload_activations=True))
    saved = ledger(plan).peak().by_moment["loss"] - ledger(away).peak().by_moment["loss"]
    # Of the last five saved tensors, three are the last norm's and the head's.
    assert saved == (8 - 2) * 2 * S * H


def test_each_activation_comes_back_for_the_layer_that_reads_it() -> None:
    """Of a checkpointed block its input; of the last norm its input, its float32 scale a row, and what the head reads."""
    away = dataclasses.replace(PLAN, checkpoint_every=1, compute=Compute(offload_activations=True))
    timeline = ledger(away)
    back = [i for i, name in enumerate(timeline.names) if name.endswith(", back from the host")]
    events = [
        (MOMENTS[moment], ident, delta)
        for ident, delta, moment in zip(
            timeline.ident.tolist(), timeline.delta.tolist(), timeline.moment.tolist(), strict=True
        )
        if ident in back
    ]
    assert sum(delta for _, _, delta in events if delta > 0) == (8 + 1 + 1) * 2 * S * H + 4 * S
    assert {moment for moment, _, _ in events} == {"backward"}
    # Each goes before the next but one is there: no more than two blocks' inputs are on the device.
    assert max(accumulate(delta for _, _, delta in events)) <= 2 * 2 * S * H + 4 * S


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"compute": Compute(float8="rowwise"), "precision": "fp32"}, "casts from bfloat16, not fp32"),
        ({"compute": Compute(float8="rowwise"), "model": MODELS["mlp-tiny"], "tokens": 0}, "reads no tokens"),
        ({"compute": Compute(offload_activations=True), "checkpoint_every": 1, "reentrant": True}, "reentrant"),
    ],
)
def test_what_makes_no_sense_is_refused(changes: dict[str, object], said: str) -> None:
    with pytest.raises(PlanError, match=said):
        dataclasses.replace(PLAN, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "compute", [Compute(compile=True), Compute(float8="rowwise"), Compute(offload_activations=True)]
)
def test_what_the_trainers_cannot_do_is_said(compute: Compute) -> None:
    assert dataclasses.replace(PLAN, compute=compute).untrained
