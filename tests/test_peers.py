"""What other estimators say: held by equality where they are right, with the reason where they are not.

The figures are of the releases named in docs/validation/peers.md, of the project's own documentation or of its tests.
"""

from __future__ import annotations

import dataclasses
from math import prod

import pytest

from memcalc.bench.boundary import states
from memcalc.estimate import estimate
from memcalc.layout import Layout
from memcalc.ledger import ledger
from memcalc.models import MODELS, Model
from memcalc.plan import Plan
from memcalc.precision import DTYPE_BYTES
from tests.figures import (
    GIB,
    MB,
    MIB,
    kept_by_a_layer,
    largest,
    parameters,
    peak,
    sized,
    trained,
)


def gpt(layers: int, hidden: int, heads: int, tokens: int, vocab: int = 50304) -> Model:
    return Model(
        name="gpt", family="gpt2", layers=layers, hidden=hidden, heads=heads, kv_heads=heads, ffn=4 * hidden, vocab=vocab,
        context=tokens, tied=True,
    )  # fmt: skip


def biases(plan: Plan) -> int:
    """Parameters in the biases of matrix products; those of norms are not among them."""
    named = ((weight.name, weight.numel) for weight in plan.family.weights(plan.model))
    return sum(count for name, count in named if name.endswith(".bias") and ".ln" not in name and "ln_f" not in name)


def test_accelerates_sizes_of_bert_base_cased() -> None:
    """accelerate estimate-memory, 1.15.0 and its tests: 433,249,280 B in all and 90,669,056 B in the largest layer, the
    embeddings. It counts BertModel, with a pooler (h·h + h) in the place of the word predictor, and two int64 buffers
    of 512 positions (8192 B). Its documentation has other numbers, 418.18 and 84.95 MB, which neither gives."""
    plan = trained(dataclasses.replace(MODELS["bert-base"], vocab=28996))
    weights, h = plan.family.weights(plan.model), plan.model.hidden
    encoder = sum(weight.numel for weight in weights if not weight.name.startswith("predictions"))
    tables = sum(weight.numel for weight in weights if weight.name.startswith("embeddings"))
    buffers = 2 * 512 * DTYPE_BYTES["int64"]
    assert 4 * (encoder + h * h + h) + buffers == 433_249_280
    assert 4 * tables + buffers == 90_669_056


def test_accelerates_training_step_is_the_model_states() -> None:
    """accelerate, estimate_training_usage: four times the weights, gpt2 1,991,036,928 B in float32. It has no
    activations, no temporaries of the step, and takes 16-bit training for two times the float32 weights."""
    plan = trained("gpt2", tokens=64, precision="fp32", optimizer_kind="fused", device="cpu")
    held = ledger(plan)
    buffers = held.at_moment("start", "parameters") - 497_759_232
    counters = 4 * len(plan.family.weights(plan.model))
    assert 4 * parameters(plan) == 497_759_232
    assert states(held) - buffers - counters == 1_991_036_928
    half = trained("gpt2", tokens=64, precision="bf16", optimizer_kind="fused", device="cpu")
    assert states(ledger(half)) < 0.51 * 1_991_036_928


def test_accelerates_sizes_of_resnet_50() -> None:
    """accelerate's documentation, timm/resnet50.a1_in1k: 102,441,032 B with the statistics of batch normalisation, and
    9,437,184 B in the largest layer, a convolution of 512 x 512 x 3 x 3."""
    plan = trained("resnet-50")
    statistics = sum(prod(shape) * DTYPE_BYTES[dtype] for _, shape, dtype in plan.family.buffers(plan))
    assert 4 * parameters(plan) + statistics == 102_441_032
    assert max(4 * weight.numel for weight in plan.family.weights(plan.model)) == 9_437_184


@pytest.mark.parametrize(
    ("model", "batch", "eager", "gib"),
    [
        (gpt(44, 6144, 64, 2048), 1, False, 17.53),
        (gpt(32, 4096, 32, 4096), 1, True, 97.00),
        (gpt(12, 768, 12, 1024, 50257), 8, True, 8.02),
        (gpt(12, 768, 12, 1024, 50257), 8, False, 2.39),
    ],
)
def test_the_cookbooks_activations_on_one_gpu(model: Model, batch: int, eager: bool, gib: float) -> None:
    """EleutherAI/cookbook, calc_transformer_mem.py of March 2026: 34·s·b·h a layer, and 5·a·s²·b without its -ca.

    Beside them are what a LayerNorm keeps (8 B a row), and the logarithms of a fused kernel (4 B a row and head). Its
    other lines are no measure: gradients are not divided by tensor or pipeline parallel, ZeRO divides by all GPUs,
    fixed buffers of 5e8 and 1e9 elements make small models larger under ZeRO-3, logits do not exist.
    """
    kind = "eager" if eager else "flash"
    plan = trained(
        dataclasses.replace(model, layers=2), micro_batch=batch, precision="bf16", attention=kind, dropout=0.1
    )
    rows = batch * model.context
    beside = 2 * 8 * rows + (0 if eager else 4 * model.heads * rows)
    assert model.layers * (kept_by_a_layer(plan) - beside) / GIB == pytest.approx(gib, abs=0.005)


@pytest.mark.parametrize(("model", "gib", "untied"), [(gpt(44, 6144, 64, 2048), 38.32, 51200), (gpt(12, 768, 12, 1024, 50257), 0.30, 50257)])  # fmt: skip
def test_the_cookbooks_weights_in_16_bit(model: Model, gib: float, untied: int) -> None:
    """The same script: 2 B a parameter of a model whose head is not tied, and 12 B of optimizer; biases of products are
    left out."""
    model = dataclasses.replace(model, vocab=untied)
    plan = trained(model, tokens=8, precision="bf16")
    head = untied * model.hidden
    assert 2 * (parameters(plan) - biases(plan) + head) / GIB == pytest.approx(gib, abs=0.005)


def test_megatrons_count_of_gpt_2_leaves_out_biases_and_positions() -> None:
    """NVIDIA/Megatron-LM, theoretical_memory_usage.py of August 2026: 2121.85 MiB are 18 B of 123,606,528 parameters,
    where GPT-2 with 50,304 words has 124,475,904: 82,944 biases and 786,432 of the table of positions are left out."""
    plan = trained(gpt(12, 768, 12, 1024))
    positions = 1024 * 768
    assert (biases(plan), positions) == (82_944, 786_432)
    assert 18 * (parameters(plan) - biases(plan) - positions) / MIB == pytest.approx(2121.85, abs=0.005)


def test_megatrons_states_of_llama_2_7b() -> None:
    """The same report: 48,196.90 MiB are 6 + 12/8 B a parameter with the distributed optimizer over 8."""
    assert (6 + 12 / 8) * parameters(trained("llama-2-7b", tokens=8)) / MIB == pytest.approx(48196.90, abs=0.01)


def test_megatrons_states_of_llama_2_7b_in_tensor_parallel_8() -> None:
    """The same report: 14,463.07 MiB are 18 B of what the fullest rank holds, whose norms are whole."""
    plan = trained("llama-2-7b", tokens=8, precision="bf16", ranks=8, layout=Layout(tensor=8))
    assert 18 / 2 * ledger(plan).at_moment("start", "parameters") / MIB == pytest.approx(14463.07, abs=0.005)


def test_megatrons_layer_of_gpt_3_with_sequence_parallel() -> None:
    """The same report, GPT-3 175B over 8 ranks of tensor and sequence parallel: 102.0 MiB a layer for one sample, with
    the scores recomputed or fused; what norms and the kernel keep for each token and head stands beside it."""
    model = gpt(2, 12288, 96, 2048, 51200)
    layout = Layout(tensor=8, sequence=True)
    plan = trained(
        dataclasses.replace(model, family="megatron"), precision="bf16", attention="flash", dropout=0.1, ranks=8,
        layout=layout,
    )  # fmt: skip
    assert kept_by_a_layer(plan) == 102 * MIB + (2 * 8 + 4 * 96) * 2048 // 8


def test_gradients_are_divided_with_the_weights() -> None:
    """The cookbook's own example of pythia-6.9B in tensor parallel 2 prints the gradients of the whole model."""
    held = [
        ledger(trained("gpt2", tokens=64, precision="bf16", ranks=ranks, layout=Layout(tensor=ranks)))
        for ranks in (1, 2)
    ]
    gradients, weights = ([each.at_moment("step", name) for each in held] for name in ("gradients", "parameters"))
    # The token table alone has a gradient of the whole (DTensor): each rank's half of 50257 rows, twice.
    assert [gradients[0], gradients[1] - 2 * 768 * 25129] == weights
    assert weights[1] < 0.51 * weights[0]


def test_megatrons_activations_of_gpt_2_are_34_bytes() -> None:
    """The same report: 204.0 MiB a layer, batch 8 of 1024 tokens of width 768."""
    plan = trained(gpt(2, 768, 12, 1024), micro_batch=8, precision="bf16", attention="flash", dropout=0.1)
    beside = (2 * 8 + 4 * 12) * 8 * 1024
    assert kept_by_a_layer(plan) - beside == 204 * MIB


@pytest.mark.parametrize(
    ("change", "least"),
    [
        ({"ffn": 2 * 11008}, 1.2), ({"kv_heads": 4}, 0.0), ({"attention": "eager"}, 1.2), ({"checkpoint_every": 1}, 0.0),
    ],
)  # fmt: skip
def test_activations_depend_on_what_megatrons_formula_leaves_out(change: dict[str, object], least: float) -> None:
    """Without sequence parallelism and selective recomputation its formula is (10 + 24/t)·s·b·h whatever the width of
    the MLP, the key-value heads, the attention kernel, or full recomputation."""
    model = dataclasses.replace(MODELS["llama-2-7b"], layers=1)
    plan = trained(model, precision="bf16")
    of_model = {name: value for name, value in change.items() if hasattr(model, name)}
    of_plan = {name: value for name, value in change.items() if name not in of_model}
    other = dataclasses.replace(plan, model=dataclasses.replace(model, **of_model), **of_plan)  # type: ignore[arg-type]
    ratio = kept_by_a_layer(other) / kept_by_a_layer(plan)
    assert ratio > least if least else ratio < 0.95


def test_llm_analysis_presets_are_not_the_models_they_name() -> None:
    """cli99/llm-analysis 0.2.2 says 55.29e9 parameters for Llama-2-70B and 6.57e9 for 7B: two matrices of width 32,768
    in the place of three of 28,672."""
    assert parameters(trained("llama-2-70b", tokens=8)) == 68_976_648_192
    assert parameters(trained("llama-2-7b", tokens=8)) == 6_738_415_616


def test_a_model_without_storage_is_still_counted() -> None:
    """DeepSpeed's estimate_zero3_model_states_mem_needs_all_live counts 768 parameters of a GPT-2 on the meta device,
    where every data_ptr() is 0."""
    assert estimate(trained("gpt2", tokens=8)).parameters == 124_439_808


def test_the_step_of_adam_has_temporaries() -> None:
    """No formula has them: torch's MemTracker shows 20.1 B a parameter with foreach and 16 with fused. An MLP of
    8,403,978 parameters in 6 tensors, batch 256 of 1024 features in float32: 169,128,160 B, six step counters among
    them, which a model known by its size does not have."""
    plan = Plan(model=dataclasses.replace(sized(8_403_978), features=1024), micro_batch=256, device="cpu")
    assert peak(plan) + 6 * 4 == 169_128_160
    fused = dataclasses.replace(plan, optimizer_kind="fused")
    assert peak(plan) - ledger(fused).peak().by_moment["step"] == 4 * 8_403_978


def test_activations_of_transformers_are_not_near_zero() -> None:
    """torch-kitsune 0.7.0: 0.776 GB of activations for bert-large at batch 512 in its own README, less than one layer
    of it keeps."""
    plan = trained("bert-large", micro_batch=512, tokens=512, precision="bf16")
    assert kept_by_a_layer(plan) > 776 * MB


def test_a_fused_kernel_keeps_no_square_of_the_length() -> None:
    """furiousteabag/vram-calculator keeps the scores of every layer, also with a fused kernel."""
    one, two = (kept_by_a_layer(trained("gpt2", tokens=tokens, precision="bf16")) for tokens in (512, 1024))
    assert two == 2 * one
    names = ledger(trained("gpt2", precision="bf16")).names
    assert not any("scores" in name for name in names)


def test_checkpointing_keeps_the_inputs_of_blocks() -> None:
    """IBM fm-training-estimator divides activations by the number of layers, and so drops the inputs that are kept."""
    plan = trained("gpt2", micro_batch=4, precision="bf16", checkpoint_every=1)
    assert kept_by_a_layer(plan) == 4 * 1024 * 768 * 2


def test_two_float32_copies_of_the_logits() -> None:
    """torch's MemTracker on GPT-2, batch 8 of 1024 tokens: 3141 MiB of each peak are two float32 copies of the logits."""
    timeline = ledger(trained("gpt2", micro_batch=8, precision="amp-bf16"))
    copies = [largest(timeline, name) for name in ("log-softmax gradient", "logits gradient")]
    assert sum(copies) / MIB == pytest.approx(3141, abs=0.5)
