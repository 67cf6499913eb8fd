"""What the ways to write a layer keep, by hand, and what they are refused for."""

from __future__ import annotations

import dataclasses

import pytest

from memcalc.errors import PlanError, UnknownNameError
from memcalc.implementation import Implementation
from memcalc.ledger import ledger
from memcalc.loss import Loss
from memcalc.models import MODELS, Model
from memcalc.plan import Plan

LLAMA = Model(
    name="small", family="llama", layers=2, hidden=64, heads=4, kv_heads=4, ffn=192, vocab=256, context=32
)  # fmt: skip
DECODER = dataclasses.replace(LLAMA, family="decoder", gated=True)
GROUPED = dataclasses.replace(LLAMA, kv_heads=2)
GPT2 = dataclasses.replace(LLAMA, family="gpt2", tied=True)
B, S = 3, 32
U = B * S * 64
"""Elements of one activation."""


def plan_of(model: Model, /, **changes: object) -> Plan:
    fields = {"tokens": S, "micro_batch": B, "precision": "bf16", "attention": "flash", **changes}
    return Plan(model=model, **fields)  # type: ignore[arg-type]


def kept(model: Model, /, *, norm: str = "", gelu: str = "", **changes: object) -> int:
    """Bytes one more block keeps until the loss; ``changes`` are fields of Plan or of Implementation."""
    forms = {"norm": norm, "gelu": gelu} | {
        field: changes.pop(field) for field in ("gate_up", "rotary", "grouped", "softmax") if field in changes
    }
    how = Implementation(**{field: value for field, value in forms.items() if value})  # type: ignore[arg-type]
    one, two = (
        ledger(plan_of(dataclasses.replace(model, layers=layers), implementation=how, **changes)).at_moment(
            "loss", "activations"
        )
        for layers in (1, 2)
    )
    return two - one


def rounded(size: int) -> int:
    return -(-size // 512) * 512


def test_norms() -> None:
    fused = kept(LLAMA, norm="fused")
    assert kept(LLAMA, norm="chain") - fused == 2 * (4 + 4 - 2) * U
    assert kept(LLAMA, norm="python") - fused == 2 * (4 + 2 - 2) * U
    full = {"precision": "fp32", "attention": "efficient"}
    assert kept(LLAMA, norm="python", **full) == kept(LLAMA, norm="chain", **full) == kept(LLAMA, norm="fused", **full) + 2 * 4 * U  # fmt: skip


def test_auto_is_what_torch_does() -> None:
    assert kept(LLAMA) == kept(LLAMA, norm="fused")
    assert kept(LLAMA, torch="2.8") == kept(LLAMA, norm="chain")


def test_gelu_written_out_keeps_three_tensors_more() -> None:
    wide = B * S * 192
    assert kept(GPT2, gelu="python") - kept(GPT2) == 2 * 3 * wide
    assert kept(GPT2, gelu="fused") == kept(GPT2)
    # Under autocast the power, the tanh and what follows are float32: x, half of it, tanh, tanh + 1, the product.
    amp = {"precision": "amp-bf16"}
    assert kept(GPT2, gelu="python", **amp) - kept(GPT2, **amp) == (4 + 2 + 4 + 4 - 2) * wide


def test_one_kernel_for_swiglu_keeps_three_of_four_tensors() -> None:
    assert kept(LLAMA) - kept(LLAMA, gate_up="kernel") == 2 * B * S * 192
    wide = dataclasses.replace(LLAMA, ffn=4096)
    peak, plain = (
        ledger(plan_of(wide, implementation=Implementation(gate_up=form))).peak().by_moment["backward"]
        for form in ("kernel", "auto")
    )
    assert peak < plain


def test_repeated_heads_are_copies() -> None:
    assert kept(GROUPED, grouped="repeat") - kept(GROUPED) == 2 * 2 * (U - U // 2)
    assert kept(LLAMA, grouped="repeat") == kept(LLAMA)


def test_a_float32_softmax_keeps_itself_and_its_cast() -> None:
    scores = B * 4 * S * S
    eager = {"attention": "eager"}
    assert kept(LLAMA, softmax="float32", **eager) - kept(LLAMA, **eager) == 4 * scores
    assert kept(LLAMA, softmax="float32") == kept(LLAMA)


def test_a_scripted_softmax_keeps_what_went_into_it_too() -> None:
    scores = B * 4 * S * S
    wide, scripted = (kept(DECODER, softmax=form, attention="eager") for form in ("float32", "scripted"))
    assert scripted - wide == 4 * scores


def test_clamped_scores_are_kept_beside_their_softmax() -> None:
    scores = B * 4 * S * S
    how = {"attention": "eager", "softmax": "clamped"}
    assert kept(DECODER, **how) - kept(DECODER, attention="eager") == 2 * scores
    in_float16 = {**how, "precision": "fp16"}
    wide = kept(DECODER, **{**in_float16, "softmax": "float32"})
    assert kept(DECODER, **in_float16) - wide == 2 * scores


def test_backward_of_a_scripted_softmax_holds_all_until_its_end() -> None:
    model, tokens = dataclasses.replace(DECODER, layers=1, context=512), 512
    wide, scripted = (
        ledger(plan_of(model, tokens=tokens, attention="eager", implementation=Implementation(softmax=form)))
        for form in ("float32", "scripted")
    )
    scores = 4 * B * 4 * tokens**2
    # What went in, the softmax, its gradient, two more and the mask, against the softmax, its gradient and one more.
    more = scripted.peak().by_moment["backward"] - wide.peak().by_moment["backward"]
    assert more == 2 * scores + 4 * B * tokens**2


def test_dropout_keeps_its_masks_and_the_shares_it_leaves() -> None:
    scores = B * 4 * S * S
    dropped, plain = (kept(DECODER, dropout=share, attention="flash") for share in (0.1, 0.0))
    assert dropped - plain == 2 * U  # a byte for each element, after attention and after the MLP
    dropped, plain = (kept(DECODER, dropout=share, attention="eager") for share in (0.1, 0.0))
    assert dropped - plain == 2 * U + (1 + 2) * scores
    at_loss = [
        ledger(plan_of(DECODER, dropout=share, attention="flash")).at_moment("loss", "activations")
        for share in (0.1, 0.0)
    ]
    assert at_loss[0] - at_loss[1] == (DECODER.layers * 2 + 1) * U  # one for the embeddings


@pytest.mark.parametrize("form", ["complex", "kernel"])
def test_rotary_positions_keep_nothing_however_they_are_written(form: str) -> None:
    assert kept(LLAMA, rotary=form) == kept(LLAMA)


def test_rotary_positions_in_place_need_no_transients() -> None:
    wide = dataclasses.replace(LLAMA, ffn=1)
    peaks = {
        form: ledger(plan_of(wide, implementation=Implementation(rotary=form))).peak().by_moment["forward"]
        for form in ("auto", "complex", "kernel")
    }
    assert peaks["kernel"] <= peaks["auto"]
    assert peaks["kernel"] <= peaks["complex"]


def test_the_tables_of_a_partly_rotated_head_are_narrower() -> None:
    def tables(width: int) -> int:
        model = dataclasses.replace(DECODER, rotary_dim=width)
        return ledger(plan_of(model)).at_moment("loss", "buffers")

    assert tables(0) == tables(16) == 2 * rounded(2 * S * 16)
    assert tables(8) == 2 * rounded(2 * S * 8)


def test_values_hold_the_whole_of_a_fused_product() -> None:
    assert kept(dataclasses.replace(LLAMA, fused_qkv=True)) - kept(LLAMA) == 2 * 2 * U


def test_capped_scores_keep_their_tanh() -> None:
    scores = B * 4 * S * S
    capped = dataclasses.replace(DECODER, capped=("attention",))
    assert kept(capped, attention="eager") - kept(DECODER, attention="eager") == 2 * scores
    assert plan_of(capped, attention="auto").kernel == "eager"
    logits = B * S * 256 * 2
    both = (dataclasses.replace(DECODER, capped=("logits",)), DECODER)
    at_loss = [ledger(plan_of(model)).at_moment("loss", "activations") for model in both]
    assert at_loss[0] - at_loss[1] == logits


def test_what_attention_and_mlp_make_is_kept_by_norms_after_them() -> None:
    assert kept(dataclasses.replace(DECODER, post_norm=True)) - kept(DECODER) == 2 * (2 * U + rounded(4 * B * S))


def test_side_by_side_reads_one_norm_or_two() -> None:
    one, two = (kept(dataclasses.replace(DECODER, side_by_side=norms)) for norms in (1, 2))
    # The second norm's output; its input is the first one's.
    assert two - one == 2 * U + rounded(4 * B * S)


def test_logits_that_become_float32_after_the_loss() -> None:
    def peak(**loss: object) -> int:
        plan = plan_of(LLAMA, loss_dtype="logits", loss=Loss(**loss))  # type: ignore[arg-type]
        return ledger(plan).peak().by_moment["loss"]

    assert peak(converted=True) > peak()
    upcast = [
        ledger(plan_of(LLAMA, loss=Loss(float32_output=output))).peak().by_moment["loss"] for output in (False, True)
    ]
    # The 16-bit ones are gone when the log-softmax is made.
    assert upcast[0] - upcast[1] == 2 * B * S * 256


@pytest.mark.parametrize(
    ("model", "how", "message"),
    [
        ("gpt2", {"norm": "python"}, "--norm python: not of the gpt2 family, only of llama, decoder, moe, llava, t5"),
        ("pythia-1b", {"norm": "fused"}, "pythia-1b has LayerNorm, which is one kernel everywhere"),
        ("powerlm-3b", {"gelu": "python"}, "--gelu python: powerlm-3b has no GELU"),
        ("opt-125m", {"rotary": "kernel"}, "--rotary kernel: opt-125m has no rotary positions"),
        ("phi-2", {"gate_up": "kernel"}, "--gate-up kernel: phi-2 has no gate"),
        ("gpt2", {"softmax": "scripted"}, "--softmax scripted: not of the gpt2 family, only of decoder"),
        ("vit-tiny-16", {"grouped": "repeat"}, "--grouped repeat: not of the vit family"),
    ],
)
def test_what_says_nothing_about_a_model_is_refused(model: str, how: dict[str, str], message: str) -> None:
    tokens = min(MODELS[model].context, 64)
    with pytest.raises(PlanError, match=message):
        Plan(model=MODELS[model], tokens=tokens, micro_batch=1, implementation=Implementation(**how))


def test_an_unknown_way_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(UnknownNameError) as caught:
        Implementation(norm="fuse")
    assert caught.value.nearest == "fused"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"family": "llama", "gated": False, "norm": "layer"}, "norm .layer. says nothing of the family llama"),
        (
            {"family": "llama", "gated": False, "biases": ("out",)},
            "a bias of out is for the family decoder; llama has only qkv",
        ),
        ({"biases": ("o",)}, "biases 'o'"),
        ({"biases": ("norm",)}, "RMSNorm has none; take norm layer"),
        ({"rotary_dim": 5}, "rotary positions on 5 of a head's width 16"),
        ({"rotary_dim": 18}, "rotary positions on 18 of a head's width 16"),
        ({"side_by_side": 3}, "side by side 3 must be 0, 1 or 2 norms"),
        ({"side_by_side": 1, "post_norm": True}, "post norm needs attention and MLP one after the other"),
        ({"activation": "gelu_new"}, "activation 'gelu_new'"),
    ],
)
def test_options_that_do_not_fit_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises((PlanError, UnknownNameError), match=message):
        plan_of(dataclasses.replace(DECODER, **changes))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("model", "how", "said"),
    [
        ("gemma-2b", {}, "models of the family decoder"),
        ("llama-tiny", {"norm": "fused"}, "with --norm fused"),
        ("llama-tiny", {"gate_up": "kernel"}, "with --gate-up kernel"),
        ("llama-tiny", {"rotary": "complex"}, "with --rotary complex"),
        ("llama-tiny", {"norm": "python", "grouped": "repeat"}, ""),
    ],
)
def test_what_the_trainers_cannot_run_is_said(model: str, how: dict[str, str], said: str) -> None:
    plan = Plan(model=MODELS[model], tokens=64, micro_batch=1, device="cpu", implementation=Implementation(**how))
    assert plan.untrained == said
