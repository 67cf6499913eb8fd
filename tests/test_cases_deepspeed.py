"""Public reports about DeepSpeed's ZeRO: docs/validation/cases.md lists them by number."""

from __future__ import annotations

import dataclasses

import pytest

from memcalc.bench.boundary import states
from memcalc.deepspeed import DeepSpeed
from memcalc.estimate import estimate
from memcalc.hardware import GPUS
from memcalc.host import host_tensors
from memcalc.ledger import ledger
from memcalc.models import MODELS, Model
from memcalc.offload import Offload
from memcalc.plan import Plan
from memcalc.startup import Startup
from memcalc.timeline import Timeline
from tests.figures import GB, GIB, largest, parameters, sized, trained

LLADA = dataclasses.replace(MODELS["llama-2-7b"], name="llada-8b", ffn=12288, vocab=126464)
QWEN = dataclasses.replace(MODELS["llama-2-7b"], name="qwen1.5-7b", vocab=151936, biases=("qkv",))


def zero(stage: int, model: Model | str, ranks: int, **fields: object) -> Plan:
    return trained(model, **{"strategy": f"deepspeed-{stage}", "ranks": ranks, "precision": "fp16-master"} | fields)


def refused(timeline: Timeline, capacity: float) -> tuple[float, float]:
    """GiB allocated and tried at the first allocation that exceeds a capacity of so many GiB."""
    live = 0
    for delta in timeline.delta.tolist():
        if live + delta > capacity * GIB:
            return live / GIB, delta / GIB
        live += delta
    raise AssertionError("everything fits")


def test_c01_zero_2_dies_in_the_second_temporary_of_the_step() -> None:
    """hiyouga/LlamaFactory issue 1221, LLaMA-7B over 8 V100 of 31.75 GiB, of which 1.95 were free: 28.28 allocated, 3.14
    tried. Resident are 2 B a parameter and 16 B over 8, 25.10 GiB; stage 3 runs. Before torch 2.0, foreach was not
    the default."""
    plan = zero(2, "llama-2-7b", 8, tokens=1024, checkpoint_every=1, optimizer_kind="for-loop", gpu="v100-32gb")
    found = ledger(plan)
    share = 4 * 6738415616 / 8 / GIB
    allocated, tried = refused(found, 28.28 + 1.95)
    assert allocated == pytest.approx(28.28, rel=0.003)
    assert allocated - share == pytest.approx(25.10, rel=0.003)
    assert tried == pytest.approx(share, rel=0.003) == pytest.approx(3.14, rel=0.003)
    assert found.peak().moment == "step"
    usable = GPUS["v100-32gb"].usable_bytes
    whole, divided = (estimate(dataclasses.replace(plan, strategy=f"deepspeed-{stage}")) for stage in (2, 3))
    assert whole.verdict != "fits" and whole.device.point > usable
    assert divided.verdict != "does-not-fit" and divided.device.point < usable


def test_c02_what_arithmetic_leaves_out_of_zero_2() -> None:
    """hiyouga/LlamaFactory issue 4133, Qwen1.5-7B over 8 A100 of 40 GB: by hand 26.25 GB. It has 7.72e9 parameters,
    2 B of them and 18 B over 8 are 30.56 GiB, two buckets of 5e8 elements 1.86, the temporary of the step 3.60."""
    plan = zero(2, QWEN, 8, tokens=512, optimizer_kind="for-loop", gpu="a100-40gb")
    assert parameters(plan) == 7_721_324_544
    found = ledger(plan).peak()
    assert found.bytes / GIB > 30.56 + 3.60
    assert estimate(plan).verdict != "fits"
    overlapping = ledger(dataclasses.replace(plan, deepspeed=DeepSpeed(overlap_comm="on")))
    buckets = [largest(overlapping, f"reduce bucket {index}") for index in (0, 1)]
    assert sum(buckets) / GIB == pytest.approx(1.86, abs=0.005)
    assert found.by_category["temporary"] / GIB == pytest.approx(2 * 3.60, rel=0.01)


def test_c03_what_zero_2_makes_when_it_starts() -> None:
    """ZHZisZZ/dllm issue 9, LLaDA-8B over 2 A100 of 40 GB with the optimizer offloaded: 14.9 GiB are refused, one flat
    copy of all 16-bit weights beside the weights; neither a smaller batch nor more ranks change that."""
    offload = Offload(optimizer="cpu")
    plans = [
        zero(2, LLADA, ranks, precision="bf16-master", tokens=tokens, micro_batch=batch, offload=offload, checkpoint_every=1)
        for ranks, tokens, batch in ((2, 1024, 2), (2, 128, 1), (8, 1024, 2))
    ]  # fmt: skip
    assert parameters(plans[0]) == 8_015_581_184
    for found in (ledger(plan).peak() for plan in plans):
        assert found.moment == "init"
        assert found.bytes == pytest.approx(2 * 2 * 8_015_581_184, rel=1e-4)
        assert found.by_category["temporary"] / GIB == pytest.approx(14.93, abs=0.005)


@pytest.mark.parametrize(
    ("offload", "size"),
    [(Offload(), 18), (Offload(optimizer="cpu"), 2), (Offload(optimizer="cpu", parameters="cpu"), 0)],
)
def test_c04_states_of_zero_3_by_what_is_offloaded(offload: Offload, size: int) -> None:
    """deepspeedai/DeepSpeed issue 4527, 6805e6 parameters over 4 GPUs: 29.01, 3.66 and 0.49 GiB are 18, 2 or 0 B of a
    quarter of them, and 4 B of the largest layer, of 131e6: its weights and gradients in 16 bit."""
    layers, each = 52, 131_000_000
    lean = DeepSpeed(prefetch_bucket_size=0, reduce_bucket_size=1, max_live_parameters=1)
    plan = Plan(
        model=sized(layers * each, layers=layers), strategy="deepspeed-3", ranks=4, precision="fp16-master",
        optimizer_kind="fused", offload=offload, deepspeed=lean,
    )  # fmt: skip
    found = ledger(plan).peak()
    held = found.by_category["parameters"] + found.by_category["optimizer"]
    # Float32 gradients, 4 of the 18 B, are there in the step.
    assert held + (4 * layers * each / 4 if size == 18 else 0) == pytest.approx(size * layers * each / 4, rel=1e-3)
    # Buckets and what is gathered come on top, even where both are as small as they can be.
    assert found.bytes > size * layers * each / 4 + 4 * each


@pytest.mark.parametrize("ranks", [2, 4])
def test_c04_without_zero_init_the_model_is_whole_at_first(ranks: int) -> None:
    """The same issue: nvidia-smi shows 14,678 MiB after start, where 0.49 GB were expected: 12,980 MiB are the whole
    model in 16 bit. DeepSpeed issue 4093: GPT-J-6B, 6,050,882,784 parameters, takes 11.27 GiB of about 13 G so, on 2
    GPUs as on 4."""
    offload = Offload(optimizer="cpu", parameters="cpu")
    for count, gib in ((6805 * 10**6, 12980 / 1024), (6_050_882_784, 11.27)):
        plan = Plan(
            model=sized(count, layers=28), strategy="deepspeed-3", ranks=ranks, precision="fp16-master", offload=offload,
            startup=Startup(build="whole"),
        )  # fmt: skip
        found = ledger(plan).peak()
        assert found.moment == "init"
        # The first layer's share is made while all of it is there.
        share = 2 * count / 28 / ranks / GIB
        assert found.bytes / GIB == pytest.approx(gib + share, rel=0.001)


def test_c04_the_host_holds_what_is_offloaded() -> None:
    """The same issue: 152.1 and 171.1 GiB of RAM are 1.5 times 16 and 18 B a parameter. What is asked for are 18 B, 16-bit
    and float32 gradients among them, and 20 B with the weights; page-locked memory is rounded to powers of two, which
    is what the factor stands for."""
    for parameters_to, size in (("none", 18), ("cpu", 20)):
        plan = Plan(
            model=sized(6805 * 10**6, layers=52), strategy="deepspeed-3", ranks=4, precision="fp16-master",
            offload=Offload(optimizer="cpu", parameters=parameters_to),
        )  # fmt: skip
        asked = sum(tensor.size for tensor in host_tensors(plan))
        assert 4 * asked == pytest.approx(size * 6805e6, rel=1e-4)
        held = 4 * estimate(plan).host
        assert 4 * asked < held < 1.5 * (size - 2) * 6805e6


def test_c18_mixtral_needs_stage_3_and_offload_or_16_gpus() -> None:
    """hiyouga/LLaMA-Factory issue 2518 and InternLM/xtuner pull request 275, Mixtral-8x7B: ZeRO-2 keeps 2 B of
    46,702,792,704 parameters, 93.4 GB, on every GPU of 80 GB, however many there are. ZeRO-3 needs 87.0 GiB of states
    on 8, 43.5 on 16; with the optimizer offloaded 10.9, and 696 GiB of RAM at least."""
    fields = {"precision": "bf16-master", "tokens": 1024, "checkpoint_every": 1, "gpu": "a100-80gb"}
    for ranks in (8, 64, 512):
        plan = zero(2, "mixtral-8x7b", ranks, **fields)
        assert ledger(plan).at_moment("forward", "parameters") / GB == pytest.approx(93.4, abs=0.05)
        assert estimate(plan).verdict == "does-not-fit"
    plan = zero(3, "mixtral-8x7b", 8, **fields)
    assert states(ledger(plan)) / GIB > 12 / 16 * 87.0
    assert estimate(plan).verdict == "does-not-fit"
    assert estimate(dataclasses.replace(plan, ranks=16)).verdict in ("fits", "tight")
    offloaded = estimate(dataclasses.replace(plan, offload=Offload(optimizer="cpu")))
    assert offloaded.verdict == "fits"
    assert offloaded.timeline.at_moment("start", "parameters") / GIB == pytest.approx(10.9, abs=0.05)
    assert 8 * offloaded.host / GIB > 696


def test_a_moment_made_when_zero_2_starts() -> None:
    """zai-org/ChatGLM2-6B issue 488, ZeRO-2 on one card of 79.35 GiB: 58.15 allocated, 23.26 tried. 2 B weights, 4 B
    masters and 4 B of zero gradients a parameter are there, and the first moment is made."""
    plan = Plan(model=sized(6_243_584_000, layers=28), strategy="deepspeed-2", precision="fp16-master")
    assert refused(ledger(plan), 79.35) == pytest.approx((58.15, 23.26), rel=0.003)


def test_the_first_step_of_a_16_bit_optimizer() -> None:
    """facebookresearch/fairseq issue 2576: 2.38 GiB allocated, 0.795 tried: 2 B weights, 2 B gradients, 4 B masters and
    one moment of 213,385,216 parameters, and the second moment of 4 B."""
    held = ledger(Plan(model=sized(213_385_216, layers=12), strategy="deepspeed-0", precision="fp16-master"))
    moment = 4 * 213_385_216
    gradients = held.at_moment("backward", "gradients")
    kept = held.at_moment("forward", "parameters") + gradients + held.at_moment("forward", "optimizer")
    assert (kept - moment) / GIB == pytest.approx(2.38, rel=0.003)
    assert moment / GIB == pytest.approx(0.795, rel=0.003)


@pytest.mark.parametrize(("stage", "gb"), [(0, 120), (1, 31.4), (2, 16.6), (3, 1.9)])
def test_zeros_own_figure(stage: int, gb: float) -> None:
    """Rajbhandari et al. 2020, ZeRO, figure 1: 7.5e9 parameters over 64 GPUs with Adam, 2 + 2 + 12 B a parameter: 120,
    31.4, 16.6 and 1.9 GB of states, gradients in 16 bit."""
    plan = Plan(model=sized(7_500_000_000, layers=48), strategy=f"deepspeed-{stage}", ranks=64, precision="fp16-master")
    held = ledger(plan)
    whole, share = 2 * 7.5, 2 * 7.5 / 64
    parameters_held = held.at_moment("forward", "parameters") / GB
    assert parameters_held == pytest.approx(whole if stage < 3 else share, rel=0.001)
    optimizer = held.at_moment("forward", "optimizer") / GB
    gradients = whole if stage < 2 else share
    assert parameters_held + gradients + optimizer == pytest.approx(gb, rel=0.02)
    # A layer's gradients are whole until they are reduced.
    assert held.at_moment("backward", "gradients") / GB <= gradients + 2 * 2 * 7.5 / 48
