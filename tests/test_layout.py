"""Tensor, sequence and context parallel: closed forms of the literature, and what cannot be divided."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from memcalc.checkpointing import Checkpointing
from memcalc.errors import MemcalcError
from memcalc.implementation import Implementation
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


@pytest.mark.parametrize("t", [1, 8])
def test_selective_recomputation_leaves_34(t: int) -> None:
    """Korthikanti et al. 2022, table 2: scores, their softmax and its dropout are computed again."""
    found = kept_per_layer(
        layout=Layout(tensor=t, sequence=t > 1),
        checkpoint_every=1,
        checkpointing=Checkpointing(policy="core-attention"),
    )
    assert t * found == 34 * U + STATISTICS


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


def test_megatrons_loss_holds_six_bytes_a_logit() -> None:
    """16-bit logits and their float32 softmax; so it is where the model itself makes its logits float32."""

    def per_word(*, by_the_model: bool) -> float:
        """Bytes at the loss for each row of this rank's part of the vocabulary, without its weights and states."""
        found = []
        for vocab in (80_000, 160_000):
            plan = planned(
                dataclasses.replace(GPT, layers=1, vocab=vocab),
                layout=Layout(tensor=8),
                loss=Loss(float32_output=by_the_model),
            )
            found.append(ledger(plan).peak().bytes)
        return (found[1] - found[0]) / 10_000 - (2 + 4) * H

    assert per_word(by_the_model=False) == pytest.approx(6 * S * B, rel=1e-3)
    assert per_word(by_the_model=True) == pytest.approx(6 * S * B, rel=1e-3)


@pytest.mark.parametrize(
    ("model", "layout", "said"),
    [
        ("llama-3-8b", Layout(tensor=16), "tensor parallel 16 does not divide 8 key/value heads of llama-3-8b"),
        ("gpt2", Layout(tensor=5), "tensor parallel 5 does not divide 12 heads of gpt2"),
        ("gpt2", Layout(sequence=True), "sequence parallel divides tokens over the ranks of tensor parallel"),
        ("t5-base", Layout(tensor=2), "memcalc cannot divide the products of t5"),
        ("gpt2", Layout(context=3), "512 tokens do not divide over 3 ranks"),
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


def peak_per_logit(**changes: object) -> float:
    """Bytes at the peak for each word of this rank's vocabulary, token and sample, without weights and states."""
    model = dataclasses.replace(MODELS["llama-2-7b"], layers=1, hidden=64, heads=4, kv_heads=4, ffn=64)
    layout = Layout(tensor=2, loss_parallel=True)
    found = []
    for vocab in (80_000, 160_000):
        plan = planned(
            dataclasses.replace(model, vocab=vocab),
            layout=layout,
            dropout=0.0,
            attention="flash",
            tokens=512,
            **changes,
        )
        found.append(ledger(plan).peak().bytes)
    # Two tables of 16-bit weights with two moments.
    return ((found[1] - found[0]) / 40_000 - 2 * (2 + 4) * model.hidden) / (512 * B)


def test_loss_parallel_holds_four_float32_tensors_of_its_logits() -> None:
    """torch/distributed/tensor/parallel/loss.py, _nll_loss_and_log_softmax_backward: log-softmax, zeros, sum, product."""
    assert peak_per_logit() == pytest.approx(16, rel=0.01)


def test_ring_attention_gathers_all_keys_and_values_for_a_moment() -> None:
    """All ranks' shares of them in forward, in the recomputed forward and in backward."""
    model = dataclasses.replace(MODELS["llama-2-7b"], layers=1, hidden=64, heads=4, kv_heads=2, vocab=8, ffn=8)
    plan = planned(model, layout=Layout(context=4), dropout=0.0, attention="flash", tokens=64, checkpoint_every=1)
    found = skeleton(plan)
    gathered = [shape for name, shape in zip(found.names, found.shapes, strict=True) if "of all ranks" in name]
    assert gathered == 3 * [((64, 2 * 32), 2, True)]


def test_golden_bytes_of_megatrons_own_tests() -> None:
    """NVIDIA/Megatron-LM tests/functional_tests: 4,702,430,720 B; sizes in blocks of 512 B are 2e-5 below."""
    model = Model(
        name="golden", family="megatron", layers=12, hidden=512, heads=8, kv_heads=8, ffn=2048, vocab=50257, context=1024,
        biases=("qkv", "out", "mlp"), tied=True,
    )  # fmt: skip
    plan = Plan(
        model=model, tokens=1024, micro_batch=4, ranks=8, strategy="megatron-distributed", precision="bf16-master",
        optimizer="adam", optimizer_kind="fused", dropout=0.1, attention="eager", gpu="h100-80gb", torch="2.8",
        loss=Loss(vocab_multiple=128), implementation=Implementation(megatron="transformer-engine"),
    )  # fmt: skip
    assert ledger(plan).peak().bytes == pytest.approx(4_702_430_720, rel=5e-5)
    local = dataclasses.replace(plan, precision="fp16-master", implementation=Implementation(megatron="core"))
    assert ledger(local).peak().bytes == pytest.approx(4_608_815_616, rel=5e-4)


def test_expert_parallel_has_some_experts_and_exchanges_rows() -> None:
    """A rank of four has a quarter of the experts, the whole router, and rows of others' tokens, as many as its own."""
    model = dataclasses.replace(MODELS["moe-tiny"], experts=8, top_k=2)
    plan = Plan(model=model, tokens=16, micro_batch=1, ranks=4, strategy="ddp", layout=Layout(expert=4))
    whole, part = skeleton(dataclasses.replace(plan, layout=Layout())), skeleton(plan)
    shapes = dict(zip(part.names, part.shapes, strict=True))
    assert "layers.0.mlp.experts.1.up_proj.weight" in shapes
    assert "layers.0.mlp.experts.2.up_proj.weight" not in shapes
    assert shapes["layers.0.mlp.gate.weight"][0] == (8, model.hidden)
    exchanged = [shape for name, shape in zip(part.names, part.shapes, strict=True) if "rows of all ranks" in name]
    # There and back in two layers, forward and backward.
    assert [shape[0] for shape in exchanged] == 8 * [(16 * 2, model.hidden)]
    assert not any("rows of all ranks" in name for name in whole.names)
    with pytest.raises(MemcalcError, match="expert parallel with fsdp-full-shard"):
        dataclasses.replace(plan, strategy="fsdp-full-shard")


def test_what_a_pipeline_cannot_train_is_said() -> None:
    mlp = Model(name="deep", family="mlp", layers=4, hidden=8, features=8, classes=2)
    plan = Plan(model=mlp, micro_batch=2, accumulation=2, ranks=2, strategy="single", layout=Layout(pipeline=2))
    assert plan.untrained == ""
    assert "batch norm" in dataclasses.replace(plan, model=dataclasses.replace(mlp, batch_norm=True)).untrained
    bert = dataclasses.replace(plan, model=MODELS["bert-base"], tokens=64)
    assert "other models" in bert.untrained
