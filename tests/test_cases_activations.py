"""Public reports about activations, attention, logits and checkpoints: docs/validation/cases.md lists them by number."""

from __future__ import annotations

import dataclasses

import pytest

from memcalc import ops
from memcalc.adapters import Adapter
from memcalc.bench.boundary import states
from memcalc.estimate import estimate
from memcalc.graph import Tensor
from memcalc.implementation import Implementation
from memcalc.ledger import ledger
from memcalc.loss import Loss
from memcalc.models import MODELS, Model
from memcalc.plan import Plan
from memcalc.recommend import recommend
from memcalc.remedies import remedies
from memcalc.reserved import replayed
from memcalc.search import search
from memcalc.spec import Weight
from memcalc.tape import Tape
from memcalc.units import format_both, format_bytes
from tests.figures import (
    GB,
    GIB,
    MIB,
    kept_by_a_layer,
    largest,
    parameters,
    peak,
    trained,
)

PHI_3 = Model(
    name="phi-3 shape", family="gpt2", layers=1, hidden=3072, heads=32, kv_heads=32, ffn=8192, vocab=1000, context=4096,
    tied=True,
)  # fmt: skip
QWEN_VOCAB = 151936


def test_c09_bert_large_takes_15_gb_and_its_weights_1_3() -> None:
    """Hugging Face's guides on training on one GPU: 335,143,938 float32 parameters with AdamW are 8,681 MiB by NVML at
    one sample of 512 tokens and accumulation, of which 1343 are the context; 16 B a parameter are states."""
    model = dataclasses.replace(MODELS["bert-large"], classes=2)
    plan = trained(
        model, attention="eager", dropout=0.1, accumulation=4, set_to_none=False, torch="1.10", gpu="v100-16gb",
        optimizer_kind="for-loop",
    )  # fmt: skip
    assert parameters(plan) == 335_143_938
    timeline = ledger(plan)
    assert states(timeline) == pytest.approx(16 * 335_143_938, rel=0.01)
    held = replayed(plan, timeline).peak_reserved
    assert held / MIB + 1343 == pytest.approx(8681, rel=0.03)
    # Accumulation adds no activations: the peak of four rounds is that of two.
    assert peak(plan) == peak(dataclasses.replace(plan, accumulation=2))


@pytest.mark.parametrize("micro_batch", [1, 3])
def test_up_to_torch_1_10_softmax_kept_its_input_beside_its_output(micro_batch: int) -> None:
    """pytorch issue 49600: both softmax and log-softmax did; pull request 65242 of autumn 2021 mended it."""
    plans = [
        trained("bert-base", attention="eager", torch=torch, tokens=128, micro_batch=micro_batch)
        for torch in ("1.10", "1.11")
    ]
    old, new = (kept_by_a_layer(plan) for plan in plans)
    assert old - new == 4 * micro_batch * 12 * 128 * 128
    old, new = (ledger(plan).at_moment("backward", "activations") for plan in plans)
    assert old - new == 4 * micro_batch * (12 * 12 * 128 * 128 + 128 * 30522)


def test_c17_lora_keeps_activations_and_no_states_of_what_is_frozen() -> None:
    """Lightning-AI/litgpt, tutorials/resource-tables.md: Llama-2-7B with LoRA of 4,194,304 parameters, 1304 tokens in
    bfloat16: 21.30 and 29.07 GB for one and two samples, and a card of 40 GB is too small for four."""
    plans = [
        trained(
            "llama-2-7b", tokens=1304, micro_batch=batch, precision="bf16", gpu="a100-40gb", torch="2.1",
            adapter=Adapter(kind="lora", rank=8, targets="query-value", dropout=0.05), loss_dtype="logits",
            loss=Loss(chunks=11, chunk_head=True), implementation=Implementation(norm="chain", grouped="repeat"),
        )
        for batch in (1, 2, 4)
    ]  # fmt: skip
    found = [estimate(plan) for plan in plans]
    for each in found:
        assert each.peak.by_category["parameters"] / GB == pytest.approx(13.48, abs=0.03)
        assert each.peak.by_category["optimizer"] < 20e6
        assert each.parameters in (4_194_304, 6_738_415_616, 6_738_415_616 + 4_194_304)
    sizes = [each.peak.bytes / GB for each in found]
    assert sizes[:2] == pytest.approx([21.30, 29.07], rel=0.08)
    assert (sizes[2] - sizes[1]) / 2 == pytest.approx(sizes[1] - sizes[0], rel=0.001)
    assert found[2].verdict != "fits"


def test_c10_one_linear_layer_in_decimal_units() -> None:
    """Hugging Face's blog on GPU memory in PyTorch (train_memory.md): Linear(10000, 50000) in float32 holds 2 GB of
    weights, an input of 5000 rows 200 MB, its output 1 GB."""
    weights = [Weight("linear.weight", (50000, 10000)), Weight("linear.bias", (50000,))]
    tape = Tape(weights, weight_dtype="float32", compute_dtype="float32", device="cuda")
    x = Tensor(tape.allocate("input", (10000,), "float32", "inputs"), (10000,), "float32", None)
    y = ops.linear(tape, x, "linear")
    sizes = dict(zip(tape.skeleton(1).names, tape.skeleton(1).sizes(5000).tolist(), strict=True))
    assert sizes["input"] == 200 * 10**6
    assert sizes["linear output"] == GB
    assert y.shape == (50000,)
    held = sum(4 * weight.numel for weight in weights)
    assert held == 2_000_200_000
    assert (format_bytes(held), format_bytes(held, binary=True)) == ("2 GB", "1.863 GiB")


def test_c11_activations_of_llama_7b_written_out() -> None:
    """OpenLMLab/LOMO issue 16 and cli99/llm-analysis issue 18: LLaMA-7B, batch 8 of 512 tokens in float16 keeps 45.61 GB
    by the LOMO paper; 12·b·s·h·L is 12.0 GB and 34·s·b·h + 5·a·s²·b is 27.0 GiB, both too low: three products of the
    MLP, norms and softmax in float32, logits."""
    plan = trained(
        "llama-2-7b", tokens=512, micro_batch=8, precision="fp16", attention="eager", torch="2.0",
        implementation=Implementation(norm="python", softmax="float32"),
    )  # fmt: skip
    timeline = ledger(plan)
    kept = timeline.at_moment("loss", "activations") + timeline.at_moment("loss", "temporary")
    assert 36 < kept / GB < 50
    s, b, h, a, layers = 512, 8, 4096, 32, 32
    assert kept > layers * (34 * s * b * h + 5 * a * s * s * b) > 12 * b * s * h * layers


def test_c12_attention_matrices_of_phi_3() -> None:
    """NVIDIA/Megatron-LM issue 965: 32 heads, 4096 tokens, 16 bit: 1024 MiB of scores, 2560 MiB kept by a layer
    with dropout; nothing of it with a fused kernel."""
    eager = trained(PHI_3, precision="bf16", attention="eager", dropout=0.1)
    assert largest(ledger(eager), "h.0.attn scores") == 1024 * MIB
    flash = dataclasses.replace(eager, attention="flash")
    # Flash keeps a logarithm per row and head (float32) where eager keeps the square.
    assert kept_by_a_layer(eager) - (kept_by_a_layer(flash) - 4 * 32 * 4096) == 2560 * MIB


def test_c13_logits_of_a_vocabulary_of_151936_at_32k_tokens() -> None:
    """modelscope/ms-swift issue 6966: float32 logits of 32768 tokens are 18.55 GiB; they are alive together with their
    16-bit form's gradient and the log-softmax, each on a line of its own."""
    model = dataclasses.replace(MODELS["llama-3-8b"], layers=1, vocab=QWEN_VOCAB, context=32768)
    timeline = ledger(trained(model, precision="bf16"))
    assert largest(timeline, "logits as float32") / GIB == pytest.approx(18.55, abs=0.005)
    for name, size in (
        ("lm_head output", 2), ("logits as float32", 4), ("log-softmax of the logits", 4), ("log-softmax gradient", 4),
        ("logits gradient", 4),
    ):  # fmt: skip
        assert largest(timeline, name) == 32768 * QWEN_VOCAB * size
    assert timeline.peak().moment == "backward"
    assert timeline.peak().by_category["temporary"] >= 2 * 32768 * QWEN_VOCAB * 4


def test_c13_a_loss_in_chunks_is_named_as_the_remedy() -> None:
    """The same report, a model of one layer: whole logits do not fit a card of 80 GB, and in 8 chunks they do."""
    model = dataclasses.replace(MODELS["llama-3-8b"], layers=1, vocab=QWEN_VOCAB, context=32768)
    plan = trained(model, precision="bf16", gpu="a100-80gb")
    assert "--loss-chunks 8 --chunk-head" in remedies(search(plan, precisions=["bf16"], checkpoints=[1]))


def test_c14_checkpoints_of_131072_tokens() -> None:
    """huggingface/accelerate pull request 4175: 36 layers of width 4096 in bfloat16 keep 36 GiB (38.65 GB) of inputs to
    checkpointed blocks for 131,072 tokens."""
    model = dataclasses.replace(MODELS["llama-3-8b"], layers=2, context=131072)
    each = kept_by_a_layer(trained(model, precision="bf16", checkpoint_every=1))
    assert 36 * each == 36 * GIB
    assert format_both(36 * each) == "38.655 GB (36 GiB)"


def test_c24_sharding_is_no_cure_where_activations_dominate() -> None:
    """discuss.pytorch.org topic 167734 and facebookresearch/fairscale issue 1050: FSDP saves nothing for a small model
    with large inputs, checkpointing about 40 %. A recommendation recomputes or shrinks the batch, and does not shard."""
    plan = trained("vit-base-16", micro_batch=128, precision="fp32", strategy="ddp", ranks=8, gpu="t4")
    assert estimate(plan).verdict == "does-not-fit"
    found = ledger(plan).peak()
    assert found.by_category["activations"] + found.by_category["temporary"] > 0.7 * found.bytes
    sharded = peak(dataclasses.replace(plan, strategy="fsdp-full-shard"))
    recomputed = peak(dataclasses.replace(plan, checkpoint_every=1))
    assert sharded > 0.85 * found.bytes
    assert recomputed < 0.6 * found.bytes
    first = recommend(plan, global_batch=8 * 128, precisions=["fp32"]).plans[0].plan
    assert first.strategy == "ddp"
    assert first.checkpoint_every or first.micro_batch < 128


def test_scores_are_what_two_messages_ask_for() -> None:
    """huggingface/accelerate issue 1864, StarCoder at 8192 tokens: 12.00 GiB are 48 heads' scores in float32.
    tloen/alpaca-lora issue 329, LLaMA-7B, 8 samples of 512 tokens: 128 MiB are 32 heads' scores in float16."""
    written_out = Implementation(softmax="float32")
    starcoder = dataclasses.replace(MODELS["starcoder"], layers=1)
    timeline = ledger(trained(starcoder, tokens=8192, precision="bf16", attention="eager", implementation=written_out))
    assert 12 * GIB in timeline.delta
    llama = dataclasses.replace(MODELS["llama-2-7b"], layers=1)
    timeline = ledger(trained(llama, tokens=512, micro_batch=8, precision="fp16", attention="eager"))
    assert largest(timeline, "layers.0.self_attn scores") == 128 * MIB


def test_c33_a_formula_in_bytes_needs_no_element_size() -> None:
    """manuelescobar-dev/LLM-Tools issue 4: 34·s·b·h + 5·a·s²·b is bytes in 16 bit already. In float32 all of it doubles
    but the masks of dropout, two of 1 B in 34 and one in 5: 66·s·b·h + 9·a·s²·b. Training has no cache of keys."""
    model = MODELS["gpt2"]
    s, b, h, a = 1024, 8, model.hidden, model.heads
    norms = 2 * 2 * 4 * b * s  # mean and deviation of two LayerNorms, float32 a row
    for precision, linear, square in (("bf16", 34, 5), ("fp32", 66, 9)):
        plan = trained(model, micro_batch=b, precision=precision, attention="eager", dropout=0.1)
        assert kept_by_a_layer(plan) == linear * s * b * h + square * a * s * s * b + norms
    names = ledger(Plan(model=model, tokens=64, micro_batch=1)).names
    assert not [name for name in names if "cache" in name]


def test_c42_logits_have_the_size_of_their_dtype() -> None:
    """jax-ml/jax pull request 35915: 8192 tokens of a vocabulary of 128,256 are 1.96 GiB (2.10 GB) in bfloat16 and
    3.91 GiB in float32; a table said 4.0 GB of bfloat16."""
    plan = trained(dataclasses.replace(MODELS["llama-3-8b"], layers=1), tokens=8192, precision="bf16")
    timeline = ledger(plan)
    assert largest(timeline, "lm_head output") == 8192 * 128256 * 2
    assert format_both(largest(timeline, "lm_head output")) == "2.101 GB (1.957 GiB)"
    assert largest(timeline, "logits as float32") / GIB == pytest.approx(3.91, abs=0.005)
