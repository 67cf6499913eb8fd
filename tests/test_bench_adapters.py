"""Rows that train adapters, store weights in fewer bits, or checkpoint selectively."""

from __future__ import annotations

import pytest

from memcalc.adapters import Adapter
from memcalc.checkpointing import Checkpointing
from tests.published_rows import LLAMA, plan_of

LITGPT = LLAMA | {"source": "Lightning-AI/litgpt tutorials/resource-tables.md"}
PEFT = LLAMA | {"source": "foundation-model-stack/fms-acceleration scripts/benchmarks/refs/a100_80gb.csv"}


def test_litgpt_keeps_adapters_like_the_weights() -> None:
    assert plan_of(LITGPT, lora_rank="8").adapter == Adapter(
        kind="lora", rank=8, targets="query-value", dropout=0.05, dtype="weights"
    )
    quantised = plan_of(LITGPT, lora_rank="8", param_dtype="bnb.nf4-dq base + bf16")
    assert quantised.precision == "bf16"
    assert (quantised.adapter.quantize, quantised.adapter.quantize_head) == ("nf4-double", True)
    assert quantised.adapter.quantized_saves_input
    assert plan_of(LITGPT, notes="tier B; Adapter; one GPU").adapter.kind == "adapter"
    assert plan_of(LITGPT, notes="tier B; Adapter v2; one GPU").adapter.kind == "adapter-v2"


def test_peft_keeps_adapters_in_float32() -> None:
    notes = "LoRA on q,k,v,o, alpha 16, dropout 0.1"
    plain = plan_of(PEFT, lora_rank="16", notes=notes, activation_checkpointing="full")
    assert plain.adapter == Adapter(
        kind="lora", rank=16, targets="attention", dropout=0.1, dtype="float32", input_gradients=True
    )
    four = plan_of(PEFT, lora_rank="16", notes=notes, param_dtype="nf4 base + bf16", compute_dtype="bf16 (autocast)")
    assert (four.adapter.quantize, four.adapter.autocast, four.precision) == ("nf4-double", True, "bf16")
    gptq = plan_of(PEFT, lora_rank="16", notes=notes, param_dtype="int4 (gptq) base", compute_dtype="fp16 (autocast)")
    assert (gptq.adapter.quantize, gptq.precision) == ("gptq", "fp16")


def test_what_is_not_quantised_may_be_made_float32() -> None:
    cells = {"lora_rank": "16", "param_dtype": "nf4 base + bf16", "compute_dtype": "bf16 (autocast)"}
    assert plan_of(PEFT, **cells, notes="framework=baseline-peft-bnb").precision == "amp-bf16"
    assert plan_of(PEFT, **cells, notes="framework=accelerated-peft-bnb").precision == "bf16"


@pytest.mark.parametrize(
    ("said", "every", "found"),
    [
        ("full", 1, Checkpointing()),
        ("selective(op)", 1, Checkpointing(policy="matrix-products")),
        ("selective (every 2nd layer)", 1, Checkpointing(one_in=2)),
        ("none", 0, Checkpointing()),
    ],
)
def test_checkpointing(said: str, every: int, found: Checkpointing) -> None:
    plan = plan_of(LLAMA, activation_checkpointing=said)
    assert (plan.checkpoint_every, plan.checkpointing) == (every, found)
