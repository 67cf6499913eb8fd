"""The forms of the loss: what each keeps and makes, by closed forms, and what a plan refuses."""

from __future__ import annotations

import dataclasses

import pytest

from memcalc.cross_entropy import liger_chunk
from memcalc.errors import PlanError
from memcalc.ledger import ledger
from memcalc.loss import Loss
from memcalc.models import MODELS, Model
from memcalc.plan import Plan
from memcalc.timeline import MOMENTS

B, S, V, H = 2, 512, 32000, 64
LLAMA = Model(
    name="loss", family="llama", layers=1, hidden=H, heads=4, kv_heads=4, ffn=128, vocab=V, context=S
)  # fmt: skip
PLAN = Plan(model=LLAMA, tokens=S, micro_batch=B, precision="bf16", optimizer="sgd")
BETA = B * S * V


def peak(moment: str, **loss: object) -> int:
    """Bytes at the fullest point of a moment."""
    return ledger(dataclasses.replace(PLAN, loss=Loss(**loss))).peak().by_moment[moment]  # type: ignore[arg-type]


def test_one_kernel_saves_the_float32_copies() -> None:
    """Plain: 2β logits, 4β copy, 4β log-softmax in the loss. A kernel reads the 2β logits and keeps a number a row."""
    assert peak("loss") - peak("loss", form="fused") == pytest.approx((4 + 4) * BETA, abs=1e4)
    # Backward: log-softmax and two gradients of 4β, against the logits and their gradient.
    assert peak("backward") - peak("backward", form="fused") == pytest.approx((12 - 4) * BETA, abs=1e5)
    assert peak("backward") - peak("backward", form="compiled") == pytest.approx((12 - 4) * BETA, abs=1e5)
    written_over = peak("backward", form="fused") - peak("backward", form="in-place")
    assert written_over == pytest.approx(2 * BETA - 2 * V * H, abs=3e5)  # the weight's gradient comes after


def test_chunks_take_only_the_passing_tensors_apart() -> None:
    """Log-softmaxes of all chunks are kept all the same; in backward two float32 tensors are of one chunk."""
    assert peak("loss") - peak("loss", chunks=8) == pytest.approx(4 * BETA * 7 / 8, abs=1e5)
    # At the end all chunks' 2β gradients of logits are joined to 2β more; at first there are 4β and two of a chunk.
    assert peak("backward") - peak("backward", chunks=8) == pytest.approx(
        12 * BETA - (4 + 4 / 8 + 4 / 8) * BETA, abs=1e5
    )


def test_a_head_in_chunks_joins_no_gradient_of_logits() -> None:
    assert peak("loss", chunks=8, chunk_head=True) == pytest.approx(peak("loss", chunks=8), abs=1e5)
    with_head = dataclasses.replace(PLAN, loss_dtype="logits", loss=Loss(chunks=8, chunk_head=True))
    without = dataclasses.replace(with_head, loss=Loss(chunks=8))
    backward = [ledger(plan).peak().by_moment["backward"] for plan in (without, with_head)]
    # Gradients of all chunks and their joining, against all log-softmaxes and two gradients of one chunk.
    assert backward[0] - backward[1] == pytest.approx((2 + 2) * BETA - (2 + 2 * 2 / 8) * BETA, abs=1e5)


def test_a_fused_linear_loss_has_one_chunk_of_logits_and_both_gradients() -> None:
    chunk = liger_chunk(S, H, V)
    assert chunk == 2  # the vocabulary is 500 times as wide as the hidden state: a 500th of the tokens, to a power of 2
    made = 2 * B * S * H + 2 * V * H + B * chunk * 2 * (V + H)
    # A kernel over whole logits holds no gradient yet.
    whole, apart = peak("loss", form="in-place"), peak("loss", form="fused-linear")
    assert apart - whole == pytest.approx(made - 2 * BETA, abs=1e4)
    assert peak("loss", form="fused-linear", chunks=2) - apart == 2 * B * (S // 2 - chunk) * (V + H)


def test_a_fused_linear_loss_hands_on_the_gradients_it_has_made() -> None:
    """The head's weight gradient waits from the loss to the step; that of its input until backward has read it."""
    timeline = ledger(dataclasses.replace(PLAN, loss=Loss(form="fused-linear")))
    events = list(zip(timeline.ident.tolist(), timeline.delta.tolist(), timeline.moment.tolist(), strict=True))
    for name, size, until in (("lm_head.weight", 2 * V * H, "step"), ("hidden state", 2 * B * S * H, "backward")):
        lives = [(MOMENTS[moment], delta) for i, delta, moment in events if timeline.names[i] == f"{name} gradient"]
        assert lives == [("loss", size), (until, -size)]


def test_a_cut_loss_holds_no_logits_and_makes_both_gradients_in_backward() -> None:
    kept = 2 * B * S * H + 4 * B * S  # what the head multiplies, and a number a row
    assert peak("forward", form="in-place") - peak("forward", form="cut") == pytest.approx(2 * BETA, abs=2e5)
    assert peak("loss", form="cut") - peak("forward", form="cut") < kept
    assert peak("backward", form="cut") >= peak("loss", form="cut") + 2 * B * S * H + 2 * V * H


def test_shifted_logits_are_a_copy_more() -> None:
    """The copy leaves out each sample's last row, and so does the log-softmax; the whole is there beside both."""
    shifted = B * (S - 1) * V * 4
    assert peak("loss", shift_copy=True) - peak("loss") == pytest.approx(2 * shifted - 4 * BETA, abs=1e5)


def test_a_padded_vocabulary_is_the_models_own_from_then_on() -> None:
    plan = Plan(model=MODELS["gpt2"], tokens=1024, micro_batch=1, loss=Loss(vocab_multiple=64))
    assert plan.model.vocab == 50304
    assert Plan.from_json(plan.to_json()) == plan


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"loss": Loss(chunk_head=True)}, "give --loss-chunks"),
        ({"loss": Loss(form="fused-linear", chunks=2, chunk_head=True)}, "leave out --chunk-head"),
        ({"loss": Loss(chunks=513)}, "more than the 512 tokens"),
        ({"loss": Loss(form="cut", shift_copy=True)}, "only whole logits"),
        ({"loss": Loss(form="cut", chunks=2)}, "leave out --loss-chunks"),
        ({"loss": Loss(form="fused-linear"), "keep_logits": True}, "no whole logits to keep"),
        ({"loss": Loss(chunks=2), "model": MODELS["mlp-tiny"], "tokens": 0}, "has no vocabulary"),
    ],
)
def test_what_makes_no_sense_is_refused(changes: dict[str, object], said: str) -> None:
    with pytest.raises(PlanError, match=said):
        dataclasses.replace(PLAN, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "loss", [Loss(form=form) for form in ("fused", "compiled", "fused-linear")] + [Loss(shift_copy=True)]
)
def test_what_the_trainers_cannot_do_is_said(loss: Loss) -> None:
    assert dataclasses.replace(PLAN, loss=loss).untrained
    assert not dataclasses.replace(PLAN, loss=Loss(chunks=4, chunk_head=True)).untrained
