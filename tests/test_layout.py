"""Tensor, sequence and context parallel: closed forms of the literature, and what cannot be divided."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from memcalc.errors import MemcalcError
from memcalc.layout import Layout
from memcalc.ledger import ledger, skeleton
from memcalc.loss import Loss
from memcalc.models import MODELS, Model
from memcalc.plan import Plan
from memcalc.timeline import CATEGORIES, MOMENTS

GPT = dataclasses.replace(MODELS["megatron-1.3b"], context=4096)
B, S, H, A = 2, 2048, GPT.hidden, GPT.heads
U = S * B * H


def planned(model: Model, **changes: object) -> Plan:
    layout = changes.get("layout", Layout())
    assert isinstance(layout, Layout)
    known = {
        "tokens": S, "micro_batch": B, "precision": "bf16", "dropout": 0.1, "attention": "eager",
        "ranks": layout.model_parallel,
    }  # fmt: skip
    return Plan(model=model, **(known | changes))  # type: ignore[arg-type]


def kept_per_layer(**changes: object) -> int:
    """Bytes one more layer keeps for backward."""
    found = []
    for layers in (2, 3):
        timeline = ledger(planned(dataclasses.replace(GPT, layers=layers), **changes))
        last = np.flatnonzero(timeline.moment == MOMENTS.index("forward"))[-1]
        kept = np.where(timeline.category == CATEGORIES.index("activations"), timeline.delta, 0)
        found.append(int(kept[: last + 1].sum()))
    return found[1] - found[0]


# Two LayerNorms keep a float32 mean and reciprocal deviation of each token, which the paper leaves out.
STATISTICS = 2 * 2 * 4 * S * B


def test_a_layer_keeps_34_and_5as_over_h() -> None:
    """Korthikanti et al. 2022, equation 1."""
    assert kept_per_layer() == U * (34 + 5 * A * S // H) + STATISTICS


@pytest.mark.parametrize("t", [2, 4, 8])
def test_tensor_parallel_leaves_10_whole(t: int) -> None:
    """Korthikanti et al. 2022, equation 2: 10 + 24/t + 5as/(ht)."""
    assert t * (kept_per_layer(layout=Layout(tensor=t)) - STATISTICS) == U * (10 * t + 24 + 5 * A * S // H)


@pytest.mark.parametrize("t", [2, 4, 8])
def test_sequence_parallel_divides_all_of_it(t: int) -> None:
    """Korthikanti et al. 2022, equation 4: (34 + 5as/h)/t."""
    found = kept_per_layer(layout=Layout(tensor=t, sequence=True))
    assert t * found == U * (34 + 5 * A * S // H) + STATISTICS


@pytest.mark.parametrize("t", [1, 2, 8])
def test_without_the_scores_34_are_left(t: int) -> None:
    """Korthikanti et al. 2022, equation 6: 34/t; flash attention keeps a float32 logarithm per row and head besides."""
    found = kept_per_layer(layout=Layout(tensor=t, sequence=t > 1), attention="flash")
    assert t * found == 34 * U + STATISTICS + 4 * S * B * A


def test_full_recomputation_keeps_the_input_alone() -> None:
    """Korthikanti et al. 2022, table 2: 2sbh, and a t-th of it where the stream is divided."""
    assert kept_per_layer(checkpoint_every=1) == 2 * U
    assert kept_per_layer(checkpoint_every=1, layout=Layout(tensor=4, sequence=True)) == 2 * U // 4


def test_the_vocabulary_is_padded_to_a_multiple_for_every_rank() -> None:
    """Megatron's 50257 words become 50304 on one rank and 50688 on four."""
    for t, padded in ((1, 50304), (4, 50688)):
        plan = planned(GPT, layout=Layout(tensor=t), loss=Loss(vocab_multiple=128 * t))
        found = skeleton(plan)
        shapes = dict(zip(found.names, found.shapes, strict=True))
        assert shapes["word_embeddings.weight"][0] == (padded // t, H)


def test_megatrons_loss_holds_six_bytes_a_logit_and_its_first_form_ten() -> None:
    """16-bit logits and their float32 softmax; bigscience's copy, with float32 logits kept, holds one more."""

    def per_word(*, copied: bool) -> float:
        """Bytes at the loss for each row of this rank's part of the vocabulary, without its weights and states."""
        found = []
        for vocab in (80_000, 160_000):
            plan = planned(
                dataclasses.replace(GPT, layers=1, vocab=vocab), layout=Layout(tensor=8, copied_logits=copied)
            )
            found.append(ledger(plan).peak().bytes)
        return (found[1] - found[0]) / 10_000 - (2 + 4) * H

    assert per_word(copied=False) == pytest.approx(6 * S * B, rel=1e-3)
    assert per_word(copied=True) == pytest.approx(10 * S * B, rel=1e-3)


@pytest.mark.parametrize(
    ("model", "layout", "said"),
    [
        ("llama-3-8b", Layout(tensor=16), "tensor parallel 16 does not divide 8 key/value heads of llama-3-8b"),
        ("gpt2", Layout(tensor=5), "tensor parallel 5 does not divide 12 heads of gpt2"),
        ("gpt2", Layout(sequence=True), "sequence parallel divides tokens over the ranks of tensor parallel"),
        ("t5-base", Layout(tensor=2), "memcalc cannot divide the products of t5"),
        ("gpt2", Layout(context=3), "512 tokens do not divide over 3 ranks"),
        ("gpt2", Layout(copied_logits=True), "copied logits: gpt2 has no loss of Megatron's"),
        ("mixtral-8x7b", Layout(expert=3), "expert parallel 3 does not divide 8 experts of mixtral-8x7b"),
        ("gpt2", Layout(expert=2), "expert parallel 2 does not divide 0 experts of gpt2"),
    ],
)
def test_what_does_not_divide_is_said_in_one_line(model: str, layout: Layout, said: str) -> None:
    with pytest.raises(MemcalcError, match=said):
        Plan(model=MODELS[model], tokens=512, micro_batch=1, ranks=layout.model_parallel, layout=layout)


def test_ranks_that_share_a_model_do_not_divide_the_rest_anew() -> None:
    with pytest.raises(MemcalcError, match="6 ranks do not divide by tensor 4 x context 1 x pipeline 1 = 4"):
        Plan(model=MODELS["gpt2"], tokens=512, micro_batch=1, ranks=6, strategy="ddp", layout=Layout(tensor=4))
    plan = Plan(
        model=MODELS["gpt2"], tokens=512, micro_batch=3, ranks=16, strategy="ddp", layout=Layout(tensor=4, context=2)
    )
    assert (plan.data_parallel, plan.shards, plan.global_batch) == (2, 4, 6)
