"""Numbers nobody here computed: published counts, tables and formulas the ledger must meet."""

from __future__ import annotations

import dataclasses

import pytest

from memcalc.estimate import estimate
from memcalc.ledger import ledger
from memcalc.models import MODELS, Model
from memcalc.plan import Plan
from tests.figures import GB, MIB, largest, sized
from tests.laws import kept_activations


def gpt2(layers: int, *, hidden: int = 512, heads: int = 8, tokens: int = 256) -> Model:
    return Model(
        name="anchor", family="gpt2", layers=layers, hidden=hidden, heads=heads, kv_heads=heads, ffn=4 * hidden,
        vocab=1000, context=tokens, tied=True,
    )  # fmt: skip


@pytest.mark.parametrize(("hidden", "heads", "tokens", "batch"), [(512, 8, 256, 4), (64, 4, 128, 1), (192, 3, 128, 2)])
def test_eager_block_saves_what_korthikanti_et_al_count(hidden: int, heads: int, tokens: int, batch: int) -> None:
    """Reducing Activation Recomputation in Large Transformer Models (2022), equation 1: 34·s·b·h + 5·a·s²·b bytes
    a layer in 16 bit with dropout, beside the mean and deviation of the two LayerNorms (4 B a row each)."""

    def kept(layers: int) -> int:
        model = gpt2(layers, hidden=hidden, heads=heads, tokens=tokens)
        plan = Plan(model=model, tokens=tokens, micro_batch=batch, precision="bf16", attention="eager", dropout=0.1)
        return kept_activations(ledger(plan))

    s, b, h, a = tokens, batch, hidden, heads
    assert kept(3) - kept(2) == 34 * s * b * h + 5 * a * s * s * b + 2 * 2 * 4 * b * s


def test_a_plain_gpt_measured_by_others_on_meta_tensors() -> None:
    """GPT blocks in pure bfloat16, V = 50304, foreach AdamW, measured with a dispatch-mode tracker (torch 2.14.1):
    start 712.3, forward and loss 6976.4, backward 7762.4, step 1187.2 MiB at batch 8 of 1024 tokens."""
    model = dataclasses.replace(MODELS["gpt2"], vocab=50304)
    peak = ledger(Plan(model=model, tokens=1024, micro_batch=8, precision="bf16")).peak()
    assert peak.moment == "backward"
    measured = {"start": 712.3, "loss": 6976.4, "backward": 7762.4, "step": 1187.2}
    for moment, mib in measured.items():
        assert peak.by_moment[moment] / MIB == pytest.approx(mib, rel=0.0005)
    # The same at batch 1 of 128 tokens, with a position table of 128 rows: the step wins.
    short = dataclasses.replace(model, context=128)
    peak = ledger(Plan(model=short, tokens=128, micro_batch=1, precision="bf16")).peak()
    assert peak.moment == "step"
    assert peak.bytes / MIB == pytest.approx(1180.5, rel=0.0005)
    assert peak.by_moment["backward"] / MIB == pytest.approx(1091.8, rel=0.005)


LIGHTNING = {"ddp": 26953, "fsdp-no-shard": 23181, "fsdp-shard-grad-op": 11815, "fsdp-full-shard": 11578}


@pytest.mark.parametrize(("strategy", "mib"), LIGHTNING.items())
def test_lightnings_table_of_a_billion_parameters_on_two_gpus(strategy: str, mib: int) -> None:
    """Lightning-AI/pytorch-lightning, docs/source-fabric/advanced/model_parallel/fsdp.rst: 1,008,763,390 parameters
    in 64 layers, fp32, Adam, 2 ranks, activations negligible; foreach Adam of that time kept two lists."""
    plan = Plan(model=sized(1_008_763_390, layers=64), optimizer="adam", strategy=strategy, ranks=2, torch="2.0")
    assert ledger(plan).peak().bytes / MIB == pytest.approx(mib, rel=0.03)


def test_the_adam_step_needs_20_bytes_a_parameter() -> None:
    """torch's MemTracker on an MLP 1024-4096-1024-10 with batch 256: 20.1 B a parameter with foreach AdamW; the
    rule of 16 B a parameter leaves the list of square roots out."""
    found = estimate(Plan(model=sized(10**9), optimizer="adam"))
    assert found.peak.by_category["parameters"] == found.peak.by_category["gradients"] == 4 * GB
    assert found.peak.by_category["optimizer"] == 8 * GB
    assert found.peak.bytes == 20 * GB
    assert estimate(Plan(model=sized(10**9), optimizer="adam", optimizer_kind="fused")).peak.bytes == 16 * GB


TRACKED = {"plain": (651.74, {}), "checkpointing": (411.36, {"checkpoint_every": 1}),
           "shard-grad-op": (545.96, {"strategy": "fsdp-shard-grad-op", "ranks": 8})}  # fmt: skip


@pytest.mark.parametrize("name", TRACKED)
def test_torchs_own_memory_trackers_agree(name: str) -> None:
    """torch.distributed._tools MemTracker and FSDPMemTracker (torch 2.13.0) on a GPT of 4 layers: V = 8192, h = 512,
    512 tokens, batch 4, fp32, foreach AdamW, 8 ranks of a fake process group: MiB at the peak."""
    mib, changes = TRACKED[name]
    model = dataclasses.replace(gpt2(4, hidden=512, heads=8, tokens=512), vocab=8192)
    plan = dataclasses.replace(Plan(model=model, tokens=512, micro_batch=4), **changes)
    assert ledger(plan).peak().bytes / MIB == pytest.approx(mib, abs=0.02)


BERT_SAVED = {"fp32": 666.5, "bf16": 340.3, "amp-bf16": 732.6}


@pytest.mark.parametrize("precision", BERT_SAVED)
def test_bert_saves_what_transformers_bert_saves(precision: str) -> None:
    """BertForMaskedLM of transformers 4.57 with 4 layers of bert-base: batch 4 of 512 tokens, dropout 0.1, fused
    attention; MiB of distinct storages saved for backward, labels given.

    transformers takes the loss in the dtype of the logits; autocast keeps the 16-bit log-softmax beside the float32
    one, which is 2 B an element more than with a loss in float32.
    """
    model = dataclasses.replace(MODELS["bert-base"], layers=4)
    loss = "float32" if precision == "amp-bf16" else "logits"
    plan = Plan(model=model, tokens=512, micro_batch=4, dropout=0.1, precision=precision, loss_dtype=loss)
    beside = 2 * 4 * 512 * model.vocab if precision == "amp-bf16" else 0
    saved = ledger(plan).at_moment("backward", "activations") + beside
    assert saved / MIB == pytest.approx(BERT_SAVED[precision], abs=0.1)


@pytest.mark.parametrize(("precision", "mib"), [("bf16", 451.3), ("amp-bf16", 671.3)])
def test_vit_base_saves_what_torchvisions_saves(precision: str, mib: float) -> None:
    """torchvision's vit_b_16 at batch 8, without dropout: MiB of distinct storages saved for backward, images included
    (under autocast in 16 bit, as the convolution keeps them)."""
    model = MODELS["vit-base-16"]
    plan = Plan(model=model, micro_batch=8, precision=precision)
    images = 8 * model.features * 2 if precision == "bf16" else 0
    assert (ledger(plan).at_moment("backward", "activations") + images) / MIB == pytest.approx(mib, abs=0.1)


RESNET_SAVED = {
    "resnet-18": {"fp32": 676.9, "bf16": 363.0, "amp-bf16": 385.2},
    "resnet-50": {"fp32": 2622.0, "bf16": 1335.6, "amp-bf16": 1384.2},
}


@pytest.mark.parametrize(("name", "precision"), [(n, p) for n, found in RESNET_SAVED.items() for p in found])
def test_resnets_save_what_torchvisions_save(name: str, precision: str) -> None:
    """torchvision's resnet18 and resnet50 at batch 32 of 224 x 224: MiB of distinct storages saved for backward, images
    included. In 16 bit it is more than half, because pooling keeps int64 indices in any precision."""
    model = MODELS[name]
    timeline = ledger(Plan(model=model, micro_batch=32, precision=precision))
    images = 0 if precision == "amp-bf16" else 32 * model.features * (4 if precision == "fp32" else 2)
    saved = timeline.at_moment("backward", "activations") + images
    assert saved / MIB == pytest.approx(RESNET_SAVED[name][precision], abs=0.2)
    assert largest(timeline, "pool indices") == 32 * 64 * 56 * 56 * 8 == 49 * MIB


def test_experts_keep_rows_for_each_of_their_tokens() -> None:
    """Counted by hand from the module: one more expert a token keeps, in 16 bit, its rows (h), gate, silu, up and
    product (4 f), what it says (h) and that times its share (h), and 30 B: three int64 indices, a float32
    probability and a 16-bit share."""

    def kept(top_k: int) -> int:
        model = dataclasses.replace(MODELS["mixtral-8x7b"], layers=1, top_k=top_k)
        return ledger(Plan(model=model, tokens=512, micro_batch=1, precision="bf16")).at_moment("loss", "activations")

    model = MODELS["mixtral-8x7b"]
    assert kept(3) - kept(2) == 512 * (2 * (4 * model.ffn + 3 * model.hidden) + 30)


def test_t5_keeps_its_softmax_in_float32_and_a_copy() -> None:
    """Counted by hand from the module: the part of a block that grows by the square of the tokens is 4 + 2 bytes an
    element of the scores in 16 bit, and 4 in float32."""

    def block(tokens: int, precision: str) -> int:
        two, three = (dataclasses.replace(MODELS["t5-base"], layers=layers) for layers in (2, 3))
        return kept(three, tokens, precision) - kept(two, tokens, precision)

    def kept(model: Model, tokens: int, precision: str) -> int:
        plan = Plan(model=model, tokens=tokens, micro_batch=2, precision=precision)
        return ledger(plan).at_moment("loss", "activations")

    for precision, size in (("bf16", 6), ("fp32", 4)):
        square = 12 * (512**2 - 2 * 256**2) * 2
        assert block(512, precision) - 2 * block(256, precision) == size * square
