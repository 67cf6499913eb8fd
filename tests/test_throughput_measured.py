"""Step times: the order of plans that public measurements show, and about how far they are apart."""

from __future__ import annotations

from dataclasses import replace

import pytest

from memcalc.coefficients import published
from memcalc.compute import Compute
from memcalc.layout import Layout
from memcalc.models import MODELS, Model
from memcalc.offload import Offload
from memcalc.plan import Plan
from memcalc.throughput import crowded, step_time
from tests.speeds import EIGHT, GPT2, LLAMA, seconds, total

# Lightning's documentation on FSDP: nn.Transformer with 1,008,763,390 parameters in 64 blocks, float32, Adam, batch 1,
# 35 tokens, two A100-40GB. Known here by its size; each token multiplies all weights once, so 35 samples.
LIGHTNING = Plan(
    model=Model(name="1B", family="size", parameters=1_008_763_390, layers=64, features=1024),
    micro_batch=35, ranks=2, strategy="ddp", optimizer="adam", gpu="a100-40gb",
)  # fmt: skip


def test_when_all_fit_ddp_beats_shard_grad_op_beats_full_shard() -> None:
    """DDP 4.31 it/s, SHARD_GRAD_OP 3.61, FULL_SHARD 3.19, NO_SHARD 3.04."""
    measured = {"ddp": 4.31, "fsdp-shard-grad-op": 3.61, "fsdp-full-shard": 3.19, "fsdp-no-shard": 3.04}
    times = {name: seconds(LIGHTNING, strategy=name) for name in measured}
    assert sorted(times, key=times.__getitem__) == list(measured)
    assert times["fsdp-full-shard"] / times["ddp"] == pytest.approx(4.31 / 3.19, rel=0.15)
    assert times["fsdp-full-shard"] / times["fsdp-shard-grad-op"] == pytest.approx(3.61 / 3.19, rel=0.15)


@pytest.mark.parametrize("gpu", ["a100-40gb", "h100-80gb"])
def test_the_same_order_for_a_small_gpt(gpu: str) -> None:
    """In float32, where all send equally wide numbers (under autocast FSDP gathers 16-bit weights). On PCIe, where links are
    the limit, gathers hide behind forward, which DDP's all-reduces cannot."""
    small = replace(EIGHT, gpu=gpu, micro_batch=1, tokens=128, precision="fp32", optimizer_kind="fused")
    times = [seconds(small, strategy=name) for name in ("ddp", "fsdp-shard-grad-op", "fsdp-full-shard")]
    assert times == sorted(times)


def test_accumulation_widens_the_lead_of_ddp() -> None:
    """OLMo-1B on 4 GPUs with accumulation 32: DDP 4.6 times FSDP (OLMo#762)."""
    plan = replace(EIGHT, ranks=4, gpu="rtx-4090", micro_batch=1)
    leads = [
        seconds(plan, accumulation=n, strategy="fsdp-full-shard") / seconds(plan, accumulation=n) for n in (1, 4, 32)
    ]
    assert leads == sorted(leads)
    assert leads[-1] > 1.5


def test_accumulation_pays_on_slow_links() -> None:
    """Two RTX 4090 on PCIe: DDP with accumulation 4 is 1.8 times DDP without."""
    plan = replace(EIGHT, ranks=2, gpu="rtx-4090", micro_batch=1, tokens=256)
    assert seconds(plan) > 1.2 * seconds(plan, accumulation=4)


V100S = Plan(model=MODELS["gpt2-large"], tokens=1024, micro_batch=1, ranks=16, nodes=2, strategy="ddp",
             precision="amp-fp16", gpu="v100-32gb")  # fmt: skip


@pytest.mark.parametrize("model", ["gpt2-medium", "gpt2-large"])
def test_sharding_wins_once_it_buys_micro_batch(model: str) -> None:
    """16 V100: GPT-2 large DDP with micro batch 1 27.9 samples/s, ZeRO-1 with 3 69.1; medium 2.28 times."""
    plan = replace(V100S, model=MODELS[model])
    assert seconds(plan) > 1.3 * seconds(plan, strategy="zero-1", micro_batch=3)
    assert seconds(plan, micro_batch=3) < 1.1 * seconds(plan, strategy="zero-1", micro_batch=3)


def test_the_lowest_stage_that_fits_is_fastest_between_nodes() -> None:
    """16 V100, GPT-2 XL: ZeRO-2 33.0 samples/s, ZeRO-3 12.9."""
    plan = replace(V100S, model=MODELS["gpt2-xl"])
    assert seconds(plan, strategy="fsdp-shard-grad-op") < seconds(plan, strategy="fsdp-full-shard")


# 3.3B on eight A100-80GB (OpenTau): ZeRO-2 is faster than ZeRO-3 at equal batch, ZeRO-3 at 192 beats ZeRO-2 at 32.
OPENTAU = Plan(
    model=Model(name="3.3B", family="size", parameters=3_300_000_000, layers=36, features=1024),
    micro_batch=8 * 50, ranks=8, strategy="ddp", precision="amp-bf16", gpu="a100-80gb",
)  # fmt: skip


def test_fit_and_batch_decide_between_the_stages() -> None:
    shard_grad_op = [seconds(OPENTAU, strategy="fsdp-shard-grad-op", micro_batch=50 * b) for b in (8, 16, 32)]
    full_shard = [seconds(OPENTAU, strategy="fsdp-full-shard", micro_batch=50 * b) for b in (8, 16, 32, 192)]
    assert all(two < three for two, three in zip(shard_grad_op, full_shard, strict=False))
    assert full_shard[-1] < shard_grad_op[-1]


@pytest.mark.parametrize(
    ("model", "tokens", "reentrant"),
    [("llama-2-7b", 4096, False), ("gpt2-xl", 1024, False), ("gpt2-xl", 1024, True), ("llama-3-8b", 2048, False)],
)
def test_checkpointing_costs_a_fifth_to_a_third(model: str, tokens: int, reentrant: bool) -> None:
    """+26 % (1.3B on V100), +25 % (Llama-7B on 8 H100), +27 % (3B, torchtune; BERT-base), +21 % (MAR-L)."""
    plan = Plan(model=MODELS[model], tokens=tokens, micro_batch=16384 // tokens, ranks=8, strategy="fsdp-full-shard",
                precision="amp-bf16", gpu="h100-80gb")  # fmt: skip
    cost = seconds(plan, checkpoint_every=1, reentrant=reentrant) / seconds(plan)
    assert 1.18 < cost < 1.33


def test_checkpointing_is_free_where_links_are_the_limit() -> None:
    """InternEvo, 1024 GPUs, 4M tokens: 2341 tokens/s with, 2346 without."""
    plan = Plan(model=MODELS["llama-2-7b"], tokens=512, micro_batch=1, ranks=64, nodes=8, strategy="fsdp-full-shard",
                precision="amp-bf16", gpu="a100-80gb")  # fmt: skip
    assert seconds(plan, checkpoint_every=1) < 1.02 * seconds(plan)


def test_zero_1_may_beat_ddp_but_not_by_much() -> None:
    """ZeRO-1 beats DDP by 6 % (fairscale#800); BERT-base is equal (DeepSpeedExamples). Torch's own broadcasts 148 weights one
    by one."""
    plan = replace(EIGHT, micro_batch=16, optimizer_kind="fused")
    assert seconds(plan, strategy="zero-1") == pytest.approx(seconds(plan), rel=0.08)


def test_wide_layers_make_tensor_parallel_cheaper() -> None:
    """SimuMax, B200: of the 405B shape TP8 takes 1.03 times TP4, of the 70B shape 1.36 times."""

    def cost(hidden: int, heads: int, ffn: int) -> float:
        model = replace(MODELS["llama-3-70b"], layers=4, hidden=hidden, heads=heads, head_dim=128, ffn=ffn)
        plan = Plan(model=model, tokens=4096, micro_batch=1, ranks=8, strategy="ddp", precision="bf16", gpu="b200")
        times = {
            t: step_time(replace(plan, layout=Layout(tensor=t, sequence=True), accumulation=t)).total for t in (4, 8)
        }
        return times[8] / times[4]

    assert 1 < cost(16384, 128, 53248) < cost(8192, 64, 28672)


def test_a_pipeline_waits_for_its_slowest_stage() -> None:
    """(a - 1) times the slowest and all of them once; interleaved stages wait for a part only (Narayanan et al. 2021)."""
    plan = replace(LLAMA, strategy="single", ranks=4, layout=Layout(pipeline=4))
    few, many = step_time(plan), step_time(replace(plan, accumulation=64))
    assert few.bubble == pytest.approx(many.bubble)
    assert few.bubble / few.total > 0.15 > 0.05 > many.bubble / many.total
    halves = step_time(replace(plan, layout=Layout(pipeline=4, schedule="interleaved", chunks=2)))
    assert halves.bubble < 0.6 * few.bubble


def test_offload_costs_the_link_and_the_host() -> None:
    """Falcon-7B on eight A100: ZeRO-3 2.86 s, parameters offloaded 6.05, states as well 13.7 (DeepSpeed#3901)."""
    plan = replace(LLAMA, strategy="deepspeed-3", precision="bf16-master", accumulation=1)
    times = [
        total(plan, offload=offload)
        for offload in (Offload(), Offload(parameters="cpu"), Offload(parameters="cpu", optimizer="cpu"))
    ]
    assert times == sorted(times)
    assert times[0] < times[1] < times[2]


def test_compiling_saves_what_is_not_products() -> None:
    """1.16 to 1.28 times as fast (torchtitan, fms-fsdp, torchtune)."""
    plan = replace(LLAMA, micro_batch=2, strategy="fsdp-full-shard", precision="amp-bf16")
    assert 1.05 < seconds(plan) / seconds(plan, compute=Compute(compile=True)) < 1.35


def test_a_full_card_is_slower() -> None:
    """91 % reserved 7.0 samples/s, 98 % 6.2 (OpenTau#273)."""
    assert crowded(0.91) == 1.0 < crowded(0.98) <= crowded(1.0)
    assert 1.05 < crowded(0.98) < 1.43


def test_the_range_is_that_of_published_runs() -> None:
    time = step_time(GPT2)
    v = published()
    assert (time.low, time.high) == (time.total * v["range-fast"], time.total * v["range-slow"])
    assert v["range-fast"] < 1 < v["range-slow"]
