"""Public reports about weights, gradients and optimizer states: docs/validation/cases.md lists them by number."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from memcalc.allocator_options import AllocatorOptions
from memcalc.bench.boundary import states
from memcalc.estimate import estimate
from memcalc.ledger import ledger
from memcalc.models import MODELS
from memcalc.plan import Plan
from memcalc.precision import PRECISIONS
from memcalc.reserved import replayed
from memcalc.startup import Startup
from memcalc.timeline import CATEGORIES, MOMENTS
from tests.figures import GB, GIB, MIB, parameters, peak, sized, trained


def sharded(ranks: int, **fields: object) -> Plan:
    """torchtitan's run of Llama-3.1-8B: 2 samples of 8192 tokens, float32 shards, bfloat16 compute."""
    return trained(
        "llama-3.1-8b", tokens=8192, micro_batch=2, strategy="fsdp-full-shard", ranks=ranks, precision="amp-bf16",
        torch="2.6", **fields,
    )  # fmt: skip


def test_c07_fsdp_from_8_to_128_gpus_takes_16_bytes_a_parameter() -> None:
    """pytorch/torchtitan, benchmarks/llama3_h100_202412_torchtitan.md, tables 1 and 3: 82.4 to 67.0 GiB reserved in
    eager mode and 77.0 to 62.0 compiled, 15.4 and 15.0 apart; 16 B a parameter are 14.02, 12 B would be 10.5.

    Reserved keeps the sharded gradients, which come from the pool of the reduce-scatter's stream, also at the loss,
    where they are not alive; allocated therefore falls by less.
    """
    few, many = (ledger(sharded(ranks, checkpoint_every=1)) for ranks in (8, 128))
    assert (states(few) - states(many)) / GIB == pytest.approx(16 * 8030261248 * (1 / 8 - 1 / 128) / GIB, rel=1e-4)
    options = AllocatorOptions.parse("expandable_segments:True")
    held = [
        replayed(sharded(ranks, checkpoint_every=1), step, options).peak_reserved
        for ranks, step in ((8, few), (128, many))
    ]
    assert 13.3 < (held[0] - held[1]) / GIB < 16.2


@pytest.mark.parametrize(
    ("optimizer", "kind", "decimal_gb"),
    [("sgd", "foreach", 27), ("adamw", "for-loop", 54), ("adamw", "foreach", 67.4), ("adamw-8bit", "fused", 40.4)],
)
def test_c08_llama_2_7b_all_in_bfloat16(optimizer: str, kind: str, decimal_gb: float) -> None:
    """meta-pytorch/torchtune pull request 389, Llama-2-7B on one A100: 27, 54, 67 and 40.4 GB."""
    plan = trained("llama-2-7b", tokens=1, precision="bf16", optimizer=optimizer, optimizer_kind=kind)
    assert peak(plan) / GB == pytest.approx(decimal_gb, rel=0.02)


def test_c08_autocast_keeps_float32_weights() -> None:
    """The same thread: with autocast in the place of pure bfloat16 the weights are 4 B a parameter."""
    held = {
        name: ledger(trained("llama-2-7b", tokens=1, precision=name)).at_moment("start", "parameters")
        for name in ("bf16", "amp-bf16")
    }
    assert held["amp-bf16"] == 2 * held["bf16"]
    assert held["bf16"] / GB == pytest.approx(13.5, rel=0.002)


def test_c15_optimizer_states_of_rf_detr_and_vgg_16() -> None:
    """roboflow/rf-detr pull request 1342: weights and AdamW's moments of 32,111,170 parameters are 385.3 MB, 389.3
    measured. pytorch issue 9439: VGG-16 needs 4 B a parameter more with Adam than with SGD and momentum, 527.8 MiB."""
    timeline = ledger(Plan(model=sized(32_111_170)))
    at_start = timeline.at_moment("start", "parameters") + timeline.at_moment("start", "optimizer")
    assert at_start == pytest.approx(12 * 32_111_170, abs=3 * 512)
    assert at_start == pytest.approx(389.3e6, rel=0.015)
    adam, momentum = (
        states(ledger(Plan(model=sized(138_357_544), optimizer=name, device="cpu")))
        for name in ("adam", "sgd-momentum")
    )
    assert adam - momentum == 4 * 138_357_544
    assert (adam - momentum) / MIB == pytest.approx(527.8, abs=0.05)


def test_c16_ddp_buckets_double_the_gradients_unless_they_are_views() -> None:
    """pytorch pull request 41954: the peak of ResNet-50 (25,557,032 parameters, 97.5 MiB of gradients) falls by 101 MB
    with gradient_as_bucket_view; one of about 1 GB of gradients falls by 1067 MB."""
    model = sized(25_557_032, layers=50)
    plain, views = (
        peak(Plan(model=model, strategy="ddp", ranks=2, optimizer_kind="fused", bucket_views=views))
        for views in (False, True)
    )
    gradients = ledger(Plan(model=model, optimizer_kind="fused")).at_moment("step", "gradients")
    assert gradients / MIB == pytest.approx(97.5, abs=0.05)
    assert plain - views == pytest.approx(4 * 25_557_032, rel=0.05)
    assert plain - views == pytest.approx(101e6, rel=0.05)


def test_c23_no_sync_keeps_whole_gradients_under_fsdp() -> None:
    """huggingface/accelerate pull request 2531: accumulating without synchronisation keeps 4 B a parameter whole:
    29.9 GiB for Llama-3-8B where 3.7 GiB are kept otherwise."""

    def held(accumulation: int) -> int:
        plan = trained("llama-3-8b", tokens=8, strategy="fsdp-full-shard", ranks=8, accumulation=accumulation)
        timeline = ledger(plan)
        # Alive when the last forward pass ends: the gradients of the micro batches before.
        last = np.flatnonzero(timeline.moment == MOMENTS.index("forward"))[-1]
        kinds = np.where(timeline.category == CATEGORIES.index("gradients"), timeline.delta, 0)
        return int(kinds[: last + 1].sum())

    assert held(1) == 0
    assert held(2) / GIB == pytest.approx(29.9, rel=0.01)
    plan = trained("llama-3-8b", tokens=8, strategy="fsdp-full-shard", ranks=8)
    assert ledger(plan).at_moment("step", "gradients") / GIB == pytest.approx(3.74, rel=0.01)


def test_c25_resuming_and_saving_are_moments_of_their_own() -> None:
    """NVIDIA/Megatron-LM pull requests 4638 and 3920: a fresh run fits, and a resumed one, whose states are there from
    the start, dies in its first forward. pytorch issue 110479 and others: a full state dict on every rank needs the
    whole model as often in RAM, 4 B a parameter of Llama-3-8B on each of 8 ranks."""
    plan = trained("gpt2", tokens=512, micro_batch=8, precision="bf16", attention="flash", optimizer_kind="fused")
    resumed = dataclasses.replace(plan, startup=Startup(resume="host"))
    first = [replayed(each, ledger(each), steps=1).peak_allocated for each in (plan, resumed)]
    assert first[1] - first[0] == pytest.approx(4 * 124439808, rel=0.05)
    loaded = ledger(dataclasses.replace(plan, startup=Startup(resume="device"))).peak().by_moment
    assert loaded["resume"] == pytest.approx((2 + 2 + 4) * 124439808, rel=0.02)
    sharded = estimate(trained("llama-3-8b", tokens=64, strategy="fsdp-full-shard", ranks=8))
    assert any("a whole state dict takes 32.121 GB (29.915 GiB) of RAM on every rank" in s for s in sharded.assumptions)


@pytest.mark.parametrize(
    ("precision", "size", "gb", "gib"), [("bf16", 8, 564.4, 525.7), ("amp-bf16", 16, 1128.9, 1051)]
)
def test_c27_llama_3_1_70b_is_8_or_16_bytes_a_parameter_by_recipe(
    precision: str, size: int, gb: float, gib: float
) -> None:
    """huggingface/blog issue 2245, full fine-tuning of Llama 3.1 70B said to take 300 GB: it is 564 GB with everything
    in 16 bit and 1128.9 GB with float32 weights and states. An estimate names the recipe."""
    plan = trained("llama-3.1-70b", tokens=8, precision=precision, optimizer_kind="fused")
    held = states(ledger(plan))
    assert held == pytest.approx(size * parameters(plan), rel=1e-5)
    assert held / GB == pytest.approx(gb, abs=0.1)
    assert held / GIB == pytest.approx(gib, abs=0.5)
    assert estimate(plan).to_dict()["plan"]["precision"] == precision


def test_c29_mixed_precision_saves_activations_and_no_states() -> None:
    """deepspeedai/DeepSpeed issue 3442: 16 B a parameter both in float32 and in mixed precision is no mistake."""
    full, mixed = (
        ledger(trained("gpt2", micro_batch=8, precision=name, optimizer_kind="fused")) for name in ("fp32", "amp-bf16")
    )
    assert states(full) == states(mixed) == pytest.approx(16 * 124439808, rel=0.01)
    kept = [timeline.at_moment("forward", "activations") for timeline in (mixed, full)]
    assert kept[0] < 0.7 * kept[1]
    assert "float32 weights and states" in PRECISIONS["amp-bf16"].summary


def test_c51_sharded_states_of_llama_3_8b_by_recipe() -> None:
    """huggingface/accelerate pull request 2674: FSDP with mixed precision keeps 16 B a parameter, in pure bfloat16 8:
    14.96 against 7.48 GiB on 8 GPUs."""
    for precision, gib in (("amp-bf16", 14.96), ("bf16", 7.48)):
        plan = trained("llama-3-8b", tokens=8, strategy="fsdp-full-shard", ranks=8, precision=precision)
        assert states(ledger(plan)) / GIB == pytest.approx(gib, rel=0.001)


def test_c32_parameters_of_modules_inside_modules() -> None:
    """TylerYep/torchinfo issue 366: Linear(3, 5) and Linear(5, 5) are 50 parameters and 200 bytes, not 120."""
    model = dataclasses.replace(MODELS["mlp-tiny"], layers=1, features=3, hidden=5, classes=5)
    plan = Plan(model=model, micro_batch=1, device="cpu")
    assert parameters(plan) == 50
    assert ledger(plan).at_moment("start", "parameters") == 200
