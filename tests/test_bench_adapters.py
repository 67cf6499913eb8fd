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
        kind="lora", rank=8, targets="query-value", dropout=0.05, dtype="weights", scattered=True
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


def test_fused_lora_without_dropout_keeps_its_input_only() -> None:
    axolotl = LLAMA | {"source": "axolotl-ai-cloud/axolotl PR #3800", "optimizer": "", "lora_rank": "16"}
    plan = plan_of(axolotl, notes="LoRA on all linear layers with fused LoRA kernels; Liger RMSNorm")
    assert (plan.adapter.fused, plan.adapter.targets, plan.optimizer_kind) == (True, "all-linear", "fused")
    assert (plan.implementation.gate_up, plan.implementation.norm) == ("kernel", "fused")
    assert not plan_of(PEFT, lora_rank="16", notes="fused LoRA on q,k,v,o, dropout 0.1").adapter.fused


def test_deepspeed_chat_trains_all_but_the_adapted_matrices() -> None:
    chat = LLAMA | {"source": "deepspeedai/DeepSpeedExamples issue #551", "lora_rank": "128"}
    plan = plan_of(chat, grad_dtype="bf16")
    frozen = [weight.name for weight in plan.weights if not weight.trainable]
    assert frozen and all("_proj.weight" in name for name in frozen)
    assert not plan_of(chat, grad_dtype="adapter only").adapter.trains_rest


def test_fsdp_1_computes_adapters_in_the_dtype_of_its_policy() -> None:
    sharded = {"strategy": "fsdp_full_shard2", "n_gpus": "2", "lora_rank": "16", "notes": "LoRA on q,k,v,o"}
    plan = plan_of(PEFT, **sharded, activation_checkpointing="full")
    assert (plan.fsdp.version, plan.fsdp.adapter_units, plan.adapter.autocast, plan.reentrant) == (
        "1",
        True,
        True,
        True,
    )


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
