"""What the cells of a row say of a run: strategy, dtypes, optimizer, and what memcalc has no term for."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memcalc.bench.layouts import parse_layout
from memcalc.bench.run import score
from memcalc.compute import Compute
from memcalc.loss import Loss
from tests.published_rows import lacks_of, plan_of, row_of


def test_a_row_said_in_full_becomes_its_plan() -> None:
    plan = plan_of()
    assert (plan.model.family, plan.model.context, plan.model.tied) == ("gpt2", 1024, True)
    assert (plan.tokens, plan.micro_batch, plan.precision, plan.optimizer, plan.optimizer_kind) == (
        1024, 4, "bf16", "adamw", "foreach",
    )  # fmt: skip
    assert plan.gpu == "a100-80gb"


@pytest.mark.parametrize(
    ("text", "cards", "strategy", "ranks"),
    [
        ("single", "1", "single", 1),
        ("ddp4", "4", "ddp", 4),
        ("ddp", "4", "ddp", 4),
        ("fsdp_full_shard8 (FSDP2)", "8", "fsdp-full-shard", 8),
        ("fsdp_full_shard8", "", "fsdp-full-shard", 8),
        ("fsdp8+cp1", "8", "fsdp-full-shard", 8),
        ("fsdp_shard_grad_op2", "2", "fsdp-shard-grad-op", 2),
        ("fsdp_no_shard2", "2", "fsdp-no-shard", 2),
        ("zero1+dp2 (torch ZeroRedundancyOptimizer)", "2", "zero-1", 2),
        ("ddp+dp8+tp1+pp1", "8", "ddp", 8),
        ("fsdp2+tp4", "8", "fsdp-full-shard", 8),
        ("zero3[8]", "8", "deepspeed-3", 8),
        ("hsdp8", "8", "fsdp-hybrid-shard", 8),
        ("fsdp_full_shard8 + CPU offload", "8", "fsdp-full-shard", 8),
        ("dp8 (DataParallel, one process)", "8", "data-parallel", 8),
        ("fsdp2+cp4", "8", "fsdp-full-shard", 8),
        ("ddp+dp1+tp1+pp4", "4", "ddp", 4),
        ("ddp+dp2+tp2+pp2+vp2", "8", "ddp", 8),
    ],
)
def test_strategies_that_are_there(text: str, cards: str, strategy: str, ranks: int) -> None:
    plan = plan_of(strategy=text, n_gpus=cards)
    assert (plan.strategy, plan.ranks) == (strategy, ranks)


@pytest.mark.parametrize(
    ("text", "cards", "missing"),
    [
        ("tp4+pp16+dp2", "128", ["data parallel of a kind that is not stated"]),
        ("fsdp_full_shard8 (fairscale)", "8", ["fairscale's FSDP"]),
        ("fsdp_shard_grad_op8 (zero2, thunder fsdp)", "8", ["thunder's own FSDP"]),
        ("dp8", "8", ["data parallel of a kind that is not stated"]),
        ("gemini8", "8", ["ColossalAI's Gemini"]),
        ("fsdp or ddp (not stated)", "8", ["strategy is not stated"]),
        ("", "8", ["strategy is not stated"]),
        ("a cluster", "8", ["strategy 'a cluster' is of no known form"]),
        ("ddp4", "8", ["strategy says 4 ranks, n_gpus says 8"]),
        ("ddp", "", ["n gpus is not stated"]),
    ],
)  # fmt: skip
def test_strategies_that_are_not(text: str, cards: str, missing: list[str]) -> None:
    assert lacks_of(strategy=text, n_gpus=cards) == missing


@given(st.text(max_size=40))
def test_any_text_is_a_layout_or_none(text: str) -> None:
    parsed = parse_layout(text)
    assert parsed is None or all(degree >= 0 for degree in parsed[0].values())


@pytest.mark.parametrize(
    ("cells", "precision"),
    [
        ({"param_dtype": "fp32", "compute_dtype": "fp32"}, "fp32"),
        ({"param_dtype": "fp32", "compute_dtype": "amp_bf16", "grad_dtype": "fp32"}, "amp-bf16"),
        ({"param_dtype": "fp32", "compute_dtype": "bf16 (autocast)", "optimizer_state_dtype": "fp32"}, "amp-bf16"),
        ({"param_dtype": "fp32", "compute_dtype": "fp16 (amp), channels_last"}, "amp-fp16"),
        ({"param_dtype": "bf16", "compute_dtype": "bf16", "reduce_dtype": "bf16"}, "bf16"),
    ],
)
def test_dtypes_that_are_there(cells: dict[str, str], precision: str) -> None:
    assert plan_of(**cells).precision == precision


@pytest.mark.parametrize(
    ("cells", "missing"),
    [
        ({"compute_dtype": "nvfp4"}, "8-bit and 4-bit matrix products"),
        ({"param_dtype": "nf4 base + bf16"}, "LoRA of a rank that is not stated"),
        ({"param_dtype": "fp16+fp32 master"}, "weights in fp16+fp32 master with compute in bf16"),
        ({"param_dtype": ""}, "dtypes are not stated"),
        ({"compute_dtype": "bf16 (autocast)"}, "weights in bf16 with compute in bf16 autocast"),
        ({"optimizer_state_dtype": "fp32"}, "optimizer state dtype fp32 beside weights in bf16"),
        ({"grad_dtype": "fp32"}, "grad dtype fp32 beside weights in bf16"),
        ({"optimizer": ""}, "optimizer is not stated"),
        ({"optimizer": "Shampoo"}, "optimizer Shampoo"),
        ({"activation_checkpointing": "selective(attn)"}, "selective activation checkpointing"),
        ({"activation_checkpointing": "every other"}, "checkpointing every other"),
        ({"attention": "flex"}, "attention flex"),
        ({"lora_rank": "8", "notes": "DoRA"}, "LoRA of another kind"),
        ({"notes": "tier B; QLoRA on q"}, "LoRA of a rank that is not stated"),
        ({"param_dtype": "int4 (awq) base", "lora_rank": "8"}, "quantised weights"),
        ({"lora_rank": "config default"}, "LoRA of a rank that is not stated: config default"),
        ({"notes": "tier A; thunder-cudnn"}, "thunder's own compiler"),
        ({"offload": "gradients->cpu"}, "offload gradients->cpu"),
        ({"micro_batch_per_gpu": ""}, "micro batch per gpu is not stated"),
        ({"micro_batch_per_gpu": "8 (local batch)"}, "micro batch per gpu is '8 (local batch)', not a number"),
        ({"seq_len": "<=512", "n_params": ""}, "seq len is '<=512', not a number"),
        ({"grad_accum": "4 printed"}, "grad accum is '4 printed', not a number"),
        ({"vocab": ""}, "vocab is not stated"),
        ({"attention": "flash", "param_dtype": "fp32", "compute_dtype": "fp32"},
         "no sound plan: attention flash: on CUDA it computes in 16 bit, not float32, take --attention efficient"),
    ],
)  # fmt: skip
def test_what_memcalc_has_no_term_for_is_named(cells: dict[str, str], missing: str) -> None:
    found = score(row_of(**cells))
    assert found.skipped == missing
    assert found.estimated_gib is found.error_pct is found.verdict is None


def test_a_skipped_row_names_all_that_lacks() -> None:
    found = score(row_of(strategy="gemini8", n_gpus="8", optimizer="Shampoo", attention="flex"))
    assert found.skipped == "ColossalAI's Gemini; optimizer Shampoo; attention flex"


def test_optimizers() -> None:
    assert (plan_of(optimizer="AdamW (fused)").optimizer_kind, plan_of(optimizer="SGD").optimizer) == ("fused", "sgd")
    eight_bit = plan_of(optimizer="AdamW8bit (bnb)", optimizer_state_dtype="int8")
    assert (eight_bit.optimizer, eight_bit.optimizer_kind) == ("adamw-8bit", "fused")
    assert plan_of(optimizer="decoupled_adamw").optimizer_kind == "for-loop"


@pytest.mark.parametrize(
    ("cells", "loss"),
    [
        ({}, Loss()),
        ({"source": "mosaicml/llm-foundry"}, Loss(form="fused")),
        ({"source": "Lightning-AI/litgpt"}, Loss(chunks=8)),
        ({"source": "huggingface/transformers"}, Loss(shift_copy=True)),
        ({"notes": "tier A; fused linear cross-entropy (no full logits)"}, Loss(form="fused-linear")),
        ({"notes": "tier A; cut-cross-entropy"}, Loss(form="cut")),
        ({"notes": "tier A; fused Triton RMSNorm/RoPE/cross-entropy"}, Loss(form="in-place", shift_copy=True)),
        ({"notes": "tier A; chunked cross entropy"}, Loss(chunks=8, chunk_head=True)),
        ({"notes": "tier A; chunked CE", "compile": "yes"}, Loss(form="compiled", chunks=8, chunk_head=True)),
        ({"source": "pytorch/torchtune README.md"}, Loss(chunks=8, chunk_head=True)),
        ({"source": "pytorch/torchtune README.md", "notes": "tier A; cumulative step: + packed dataset"}, Loss()),
    ],
)
def test_how_the_loss_was_computed(cells: dict[str, str], loss: Loss) -> None:
    assert plan_of(**cells).loss == loss


@pytest.mark.parametrize(
    ("text", "optimizer", "in_backward"),
    [
        ("PagedAdamW8bit", "paged-adamw-8bit", False),
        ("PagedAdamW (low memory config)", "paged-adamw", True),
        ("AdamW4bit (torchao)", "adamw-4bit-ao", False),
        ("FusedAdam (apex)", "fused-adam", False),
        ("Muon", "muon", False),
    ],
)
def test_optimizers_of_other_libraries(text: str, optimizer: str, in_backward: bool) -> None:
    plan = plan_of(optimizer=text)
    assert (plan.optimizer, plan.update.in_backward) == (optimizer, in_backward)


def test_a_step_in_backward_is_said_by_the_notes() -> None:
    assert plan_of(notes="tier A; cumulative step: + optimizer step fused in backward").update.in_backward
    assert plan_of(notes="tier A; cumulative step: + activation offloading").update.in_backward
    assert not plan_of(notes="tier A; no optimizer_in_bwd").update.in_backward


@pytest.mark.parametrize(
    ("cells", "compute"),
    [
        ({"compile": "yes"}, Compute(compile=True)),
        ({"compute_dtype": "fp8(linear)+bf16"}, Compute(float8="tensorwise")),
        ({"compute_dtype": "fp8(linear)+bf16", "notes": "tier A; float8 rowwise"}, Compute(float8="rowwise")),
        ({"compute_dtype": "mxfp8+bf16"}, Compute(float8="mxfp8")),
        ({"offload": "activations->cpu"}, Compute(offload_activations=True)),
    ],
)
def test_how_it_was_computed(cells: dict[str, str], compute: Compute) -> None:
    assert plan_of(**cells).compute == compute
