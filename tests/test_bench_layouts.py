"""The bench: degrees of a layout, and Megatron's flags."""

from __future__ import annotations

import pytest

from memcalc.bench.run import score
from memcalc.bench.words import say
from memcalc.layout import Layout
from tests.published_rows import GPT2, lacks_of, plan_of, row_of


@pytest.mark.parametrize(
    ("text", "cards", "notes", "layout"),
    [
        ("fsdp2+tp4", "8", "", Layout(tensor=4)),
        ("fsdp2+tp4", "8", "sequence parallel", Layout(tensor=4, sequence=True)),
        ("fsdp2+cp4", "8", "", Layout(context=4)),
        ("ddp+dp1+tp1+pp4", "4", "", Layout(pipeline=4)),
        ("ddp+dp2+pp4", "8", "virtual pipeline 1", Layout(pipeline=4, chunks=3, schedule="interleaved")),
        ("ddp+dp2+pp4", "8", "partition type:transformer|embedding", Layout(pipeline=4, ends=True)),
        ("tp4+pp2+dp1", "8", "", Layout(tensor=4, pipeline=2)),
    ],
)
def test_degrees_of_a_layout(text: str, cards: str, notes: str, layout: Layout) -> None:
    plan = plan_of(strategy=text, n_gpus=cards, notes=notes, grad_accum="4")
    assert (plan.layout, plan.ranks) == (layout, int(cards))


def test_megatrons_flags_say_what_its_model_is() -> None:
    notes = (
        "transformer_engine layers; sequence parallel; flags: swiglu, disable-bias-linear, position-embedding-type=rope"
    )
    cells = {
        "source": "NVIDIA/Megatron-LM tests", "model": "Megatron GPT 12 layers h512", "hidden": "512", "heads": "8",
        "kv_heads": "8", "ffn": "2048", "n_params": "", "strategy": "zero1+dp2+tp4+pp1", "n_gpus": "8",
        "param_dtype": "bf16+fp32 master", "compute_dtype": "bf16", "optimizer": "Adam (fused)", "attention": "unfused",
    }  # fmt: skip
    plan = plan_of(notes=notes, **cells)
    assert (plan.strategy, plan.layout) == ("megatron-distributed", Layout(tensor=4, sequence=True))
    # 8/3 of the width in multiples of 64; the vocabulary in multiples of 128 for each of four ranks.
    assert (plan.model.ffn, plan.model.vocab, plan.model.biases, plan.model.positions) == (1344, 50688, (), "rotary")
    assert (plan.dropout, plan.attention, plan.implementation.megatron) == (0.1, "eager", "transformer-engine")
    assert lacks_of(notes="flags: multi-latent-attention", **cells) == ["Megatron's --multi-latent-attention"]
    last = say(row_of(notes="read on the last rank", **cells | {"strategy": "ddp+dp2+tp2+pp2"}))
    assert last.stage == 1


# NVIDIA/Megatron-LM tests/functional_tests/test_cases: golden values of allocated_bytes.all.peak, in GiB.
_GPT = GPT2 | {
    "source": "NVIDIA/Megatron-LM tests", "model": "Megatron GPT 12 layers h512", "hidden": "512", "layers": "12",
    "heads": "8", "kv_heads": "8", "ffn": "2048", "vocab": "50257", "n_params": "", "seq_len": "1024",
    "micro_batch_per_gpu": "4", "gpu_type": "H100-80GB", "gpu_gib": "80", "n_gpus": "8", "param_dtype": "bf16+fp32 master",
    "compute_dtype": "bf16", "optimizer": "Adam (fused)", "attention": "unfused",
    "notes": "read on the last rank (last pipeline stage); transformer_engine layers; flags: attention-backend=unfused",
}  # fmt: skip
_T5 = _GPT | {
    "model": "Megatron T5 12 enc + 12 dec layers h768", "hidden": "768", "layers": "12 enc + 12 dec", "heads": "12",
    "kv_heads": "12", "ffn": "3072", "vocab": "", "seq_len": "512 enc / 128 dec", "attention": "local unfused",
    "notes": "local layers; tokenizer BertWordPieceCase",
}  # fmt: skip


@pytest.mark.parametrize(
    ("base", "cells", "measured", "within"),
    [
        (_GPT, {"strategy": "zero1+dp8+tp1+pp1"}, 4702430720, 0.1),
        (_GPT, {"strategy": "zero1+dp2+tp4+pp1", "grad_accum": "4"}, 1543416320, 0.3),
        (_GPT, {"strategy": "zero1+dp8+tp1+pp1", "param_dtype": "fp16+fp32 master", "compute_dtype": "fp16",
                "notes": "local layers", "attention": "local unfused"}, 4608815616, 0.1),
        (_T5, {"strategy": "ddp+dp8+tp1+pp1"}, 6186639360, 1.0),
        (_T5, {"strategy": "ddp+dp2+tp4+pp1", "grad_accum": "4"}, 1831392256, 1.0),
    ],
)  # fmt: skip
def test_megatrons_golden_values(base: dict[str, str], cells: dict[str, str], measured: int, within: float) -> None:
    """Bytes that NVIDIA's own tests hold every change to."""
    found = score(row_of(base, **cells, value_gib=str(measured / 2**30)))
    assert found.skipped is None
    assert found.error_pct is not None
    assert abs(found.error_pct) < within
