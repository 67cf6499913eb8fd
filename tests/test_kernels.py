"""Which attention kernel is taken, condition by condition (sdp_utils.cpp), and what the fused ones hold in backward."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memcalc.errors import PlanError
from memcalc.estimate import estimate
from memcalc.hardware import GPUS
from memcalc.kernels import Attends, chosen, refusal
from memcalc.ledger import ledger
from memcalc.models import MODELS
from memcalc.plan import Plan

HALVES = ("float16", "bfloat16")
ORDER = ("flash", "efficient", "math")


def asked(gpu: str | None = None, dtype: str = "bfloat16", head: int = 64, **more: object) -> Attends:
    fields = {"device": "cuda", "dtype": dtype, "head": head, "value": head, "gpu": GPUS[gpu] if gpu else None}
    return Attends(**fields | more)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("gpu", "dtype", "kernel"),
    [  # check_flash_attention_hardware_support: sm80 on; less_than_sm80_mem_efficient_dtypes: half and float
        ("p100", "float16", "efficient"), ("p100", "bfloat16", "math"), ("p100", "float32", "efficient"),
        ("v100", "float16", "efficient"), ("v100", "bfloat16", "math"), ("v100", "float32", "efficient"),
        ("t4", "float16", "efficient"), ("t4", "bfloat16", "math"), ("t4", "float32", "efficient"),
        ("a100", "float16", "flash"), ("a100", "bfloat16", "flash"), ("a100", "float32", "efficient"),
        ("rtx-4090", "bfloat16", "flash"), ("h100", "bfloat16", "flash"), ("b200", "bfloat16", "flash"),
        ("mi300x", "bfloat16", "flash"), (None, "bfloat16", "flash"), (None, "float32", "efficient"),
    ],
)  # fmt: skip
def test_the_card_and_the_dtype_say_which(gpu: str | None, dtype: str, kernel: str) -> None:
    assert chosen(asked(gpu, dtype)) == kernel


@pytest.mark.parametrize(
    ("gpu", "dtype", "head", "dropout", "kernel"),
    [
        ("a100", "bfloat16", 256, 0.1, "flash"),
        ("a100", "bfloat16", 264, 0.0, "efficient"),  # check_head_dim_size_flash
        ("a100", "bfloat16", 260, 0.0, "math"),  # minimum_gemm_alignment: 128 bit of tensor cores
        ("a100", "bfloat16", 60, 0.0, "flash"),  # padded to a multiple of 8
        ("a100", "float32", 60, 0.0, "efficient"), ("a100", "float32", 62, 0.0, "math"),
        ("t4", "float32", 62, 0.0, "efficient"), ("t4", "float16", 60, 0.0, "math"), ("p100", "float16", 61, 0.0, "efficient"),
        # check_requires_grad_and_head_dim_gt192_constraints_on_sm86_89_or_120
        ("rtx-4090", "bfloat16", 192, 0.1, "flash"), ("rtx-4090", "bfloat16", 208, 0.0, "efficient"),
        ("rtx-4090", "bfloat16", 256, 0.0, "flash"), ("rtx-4090", "bfloat16", 256, 0.1, "efficient"),
        ("rtx-3090", "bfloat16", 224, 0.0, "efficient"), ("rtx-5090", "bfloat16", 200, 0.0, "efficient"),
        ("h100", "bfloat16", 208, 0.1, "flash"),
    ],
)  # fmt: skip
def test_the_width_of_a_head_says_which(gpu: str, dtype: str, head: int, dropout: float, kernel: str) -> None:
    assert chosen(asked(gpu, dtype, head, dropout=dropout)) == kernel


def test_a_mask_keeps_flash_away_on_cuda_only() -> None:
    """check_for_attn_mask is among flash's checks in cuda/sdp_utils.cpp, not in sdp_utils_cpp.cpp."""
    assert chosen(asked(masked=True)) == "efficient"
    assert chosen(asked("t4", masked=True)) == "math"
    assert chosen(asked(device="cpu", masked=True)) == "flash"


@pytest.mark.parametrize("dtype", ["float32", *HALVES])
def test_dropout_keeps_flash_away_on_the_cpu_only(dtype: str) -> None:
    """check_for_dropout is among flash's checks in sdp_utils_cpp.cpp, not in cuda/sdp_utils.cpp."""
    assert chosen(asked(device="cpu", dtype=dtype, dropout=0.1)) == "math"
    assert chosen(asked(device="cpu", dtype=dtype)) == "flash"
    assert chosen(asked(dtype=dtype, dropout=0.1)) == chosen(asked(dtype=dtype))


def test_values_of_another_width_are_for_the_efficient_kernel() -> None:
    assert chosen(asked(head=192, value=128)) == "efficient"
    assert chosen(asked(head=192, value=128, device="cpu")) == "math"


def test_bfloat16_on_a_t4_keeps_scores_which_an_a100_does_not() -> None:
    plan = Plan(model=MODELS["gpt2"], tokens=1024, micro_batch=8, precision="amp-bf16")
    t4, a100 = (dataclasses.replace(plan, gpu=gpu) for gpu in ("t4", "a100"))
    assert (t4.kernel, a100.kernel, plan.kernel) == ("math", "flash", "flash")
    scores = 4 * 8 * 12 * 1024**2  # float32 probabilities of one layer
    kept = [ledger(each).at_moment("forward", "activations") for each in (t4, a100)]
    assert kept[0] - kept[1] >= 12 * scores
    assert "no other can be taken (flash: it needs compute capability 8.0, t4 has 7.5" in "\n".join(
        estimate(t4).assumptions
    )


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"attention": "flash", "precision": "bf16", "gpu": "v100"},
         "attention flash: it needs compute capability 8.0, v100-16gb has 7.0; take --attention math"),
        ({"attention": "efficient", "precision": "bf16", "gpu": "t4"},
         "attention efficient: it computes in bfloat16 from compute capability 8.0 on, t4 has 7.5; take --attention math"),
        ({"attention": "flash", "precision": "fp16", "gpu": "t4"},
         "attention flash: it needs compute capability 8.0, t4 has 7.5; take --attention efficient"),
        ({"attention": "flash", "precision": "fp32"},
         "attention flash: on CUDA it computes in 16 bit, not float32; take --attention efficient"),
        ({"attention": "efficient", "device": "cpu"},
         "attention efficient: it runs on CUDA only; take --attention flash"),
        ({"attention": "flash", "device": "cpu", "dropout": 0.1},
         "attention flash: on the CPU it has no dropout (dropout 0.1); take --attention math"),
    ],
)  # fmt: skip
def test_a_kernel_that_cannot_run_is_refused_with_one_that_can(fields: dict[str, object], said: str) -> None:
    with pytest.raises(PlanError) as caught:
        Plan(model=MODELS["gpt2"], tokens=64, micro_batch=1, **fields)  # type: ignore[arg-type]
    assert str(caught.value) == said


def test_what_is_chosen_is_never_refused() -> None:
    for gpu in [None, *GPUS]:
        for dtype in ("float32", *HALVES):
            for head in (33, 64, 80, 208, 256, 512):
                it = asked(gpu, dtype, head, dropout=0.1)
                assert not refusal(chosen(it), it)
                assert all(refusal(kernel, it) for kernel in ORDER[: ORDER.index(chosen(it))])


def workspace(name: str, kernel: str, **fields: object) -> dict[str, int]:
    """Bytes of what attention allocates in the backward pass of one block, by name."""
    plan = Plan(model=dataclasses.replace(MODELS[name], layers=1), attention=kernel, **fields)  # type: ignore[arg-type]
    step = ledger(plan)
    sizes = {step.names[ident]: int(delta) for ident, delta in zip(step.ident, step.delta, strict=True) if delta > 0}
    return {key: size for key, size in sizes.items() if key.startswith("attention ")}


def test_the_efficient_kernel_accumulates_the_query_gradient_in_tiles() -> None:
    """kernel_backward.h: tiles of 64 x 64 floats and 16 bytes, 4 batches x 12 heads x 16 of them; where heads are
    few keys are split (attention_backward.cu), into 200 // 48 = 4 here: 192 tiles for each of the others, at most 236."""
    fields = {"tokens": 1024, "micro_batch": 4, "precision": "fp32"}
    found = workspace("gpt2", "efficient", **fields)
    tile = 4 * 64 * 64
    assert found["attention query accumulator"] == 4 * 12 * 16 * (tile + 16)
    assert found["attention output times gradient"] == 4 * 4 * 1024 * 768
    assert found["attention key accumulator"] + found["attention key accumulator, split"] == (48 + 188) * tile
    half = workspace("gpt2", "efficient", **fields | {"precision": "bf16"})
    assert "attention key accumulator" not in half and "attention output times gradient" not in half


@given(heads=st.integers(1, 64), batch=st.integers(1, 32), tokens=st.integers(1, 4096))
def test_split_keys_are_bounded_closely(heads: int, batch: int, tokens: int) -> None:
    """num_splits_key as attention_backward.cu has it: never more than counted, nor 200 tiles fewer."""
    blocks, parallel = -(-tokens // 64), batch * heads
    real = parallel * max(min(blocks, 200 // parallel), 1)
    counted = parallel + max(200 - max(heads, 200 // blocks), 0)
    assert real <= counted <= real + 200


def test_flash_makes_gradients_of_grouped_keys_for_every_head() -> None:
    """mha_bwd: dk_expanded and dv_expanded."""
    model, fields = "llama-3-8b", {"tokens": 256, "micro_batch": 2, "precision": "bf16"}
    found = workspace(model, "flash", **fields)
    whole = 2 * 2 * 256 * 4096
    assert found["attention key gradient of every head"] == found["attention value gradient of every head"] == whole
    assert "attention key gradient of every head" not in workspace("llama-2-7b", "flash", **fields)


def test_flash_keeps_heads_padded_to_a_multiple_of_eight() -> None:
    model = dataclasses.replace(MODELS["gpt2"], layers=1, hidden=720, heads=12)  # 60 wide
    fields = {"tokens": 256, "micro_batch": 2, "precision": "bf16", "attention": "flash"}
    step = ledger(Plan(model=model, **fields))  # type: ignore[arg-type]
    sizes = {step.names[i]: int(d) for i, d in zip(step.ident, step.delta, strict=True) if d > 0}
    padded = [size for name, size in sizes.items() if name.endswith(("padded q", "padded k", "padded v"))]
    assert padded == [2 * 2 * 256 * 12 * 64] * 3
