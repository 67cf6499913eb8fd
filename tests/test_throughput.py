"""Step times: counted FLOPs and bytes by ``==``, and the order of plans that public measurements show."""

from __future__ import annotations

import math
from dataclasses import fields, replace
from itertools import pairwise

import pytest
from hypothesis import given, settings

from memcalc.adapters import Adapter
from memcalc.coefficients import COEFFICIENTS, published
from memcalc.compute import Compute
from memcalc.errors import PlanError
from memcalc.hardware import GPUS
from memcalc.layout import Layout
from memcalc.models import MODELS, Model
from memcalc.offload import Offload
from memcalc.plan import Plan
from memcalc.rank_hardware import hardware_of
from memcalc.strategies import STRATEGIES
from memcalc.throughput import StepTime, crowded, step_time, step_times
from tests.plans import plans

PARALLEL = [name for name, row in STRATEGIES.items() if row.parallel and not row.masters]
GPT2 = Plan(model=MODELS["gpt2"], tokens=1024, micro_batch=8, precision="amp-bf16", gpu="a100-80gb")
EIGHT = replace(GPT2, ranks=8, strategy="ddp")


def seconds(plan: Plan, **changes: object) -> float:
    """Predicted seconds per sample of a plan with some fields changed."""
    return step_time(replace(plan, **changes)).seconds_per_sample  # type: ignore[arg-type]


# -- counted, so equal -----------------------------------------------------------------------------

PLAIN = {name: row.value for name, row in COEFFICIENTS.items()} | {"attention-efficiency": 1.0}
"""The table's own values, whatever was fitted; attention as fast as other products."""


def counted(plan: Plan, **changes: object) -> tuple[StepTime, float]:
    """Times by the table's values, without a fixed time for collectives, and the FLOP/s of wide products."""
    changed = replace(plan, **changes)  # type: ignore[arg-type]
    hardware = replace(hardware_of(changed, PLAIN), hops=0.0)
    wide = hardware.float32_efficiency if changed.precision_row.compute == "float32" else hardware.efficiency
    return step_time(changed, hardware, PLAIN), hardware.flops[changed.precision_row.compute] * wide


def test_flops_are_those_of_the_usual_formula() -> None:
    """6 N + 12 L H S a token (PaLM, appendix B; llm-foundry's benchmarks), half the attention skipped by flash, which
    computes scores twice: 14 instead of 12 (Dao 2023, section 3.1)."""
    time, speed = counted(GPT2)
    h, layers, s, vocab = 768, 12, 1024, 50257
    products = vocab * h + layers * 12 * h * h
    assert time.compute * speed == pytest.approx(8 * s * (6 * products + 14 * layers * h * s / 2), rel=1e-12)
    parameters = 124439808
    assert time.model_flops == s * (6 * parameters + 12 * layers * h * s)
    assert time.mfu == pytest.approx(8 * time.model_flops / time.total / 312e12)
    assert time.tokens_per_second == pytest.approx(8 * s / time.total)


def test_frozen_weights_count_four_flops_a_token_and_adapters_six() -> None:
    lora = Adapter(kind="lora", rank=8, targets="c_attn")
    factors = 12 * 8 * (768 + 3 * 768)
    time, _ = counted(GPT2, adapter=lora)
    assert time.model_flops == 1024 * (4 * 124439808 + 6 * factors + 12 * 12 * 768 * 1024)


def test_eager_attention_does_not_skip_what_the_mask_hides() -> None:
    (flash, speed), (eager, _) = (counted(GPT2, attention=kind) for kind in ("flash", "eager"))
    skipped = 8 * 1024 * (12 - 14 / 2) * 12 * 768 * 1024
    assert (eager.compute - flash.compute) * speed == pytest.approx(skipped, rel=1e-9)
    scores = 8 * 12 * 12 * 1024**2 * 2 * PLAIN["score-passes"] / GPUS["a100-80gb"].memory_bandwidth
    assert eager.pointwise - flash.pointwise == pytest.approx(scores, rel=1e-9)


def test_recomputation_stops_before_the_product_that_ends_a_checkpoint() -> None:
    """torch/utils/checkpoint.py, early_stop: nothing after a checkpoint's last saved tensor is run again."""
    tokens, h, layers = 8 * 1024, 768, 12
    blocks = layers * (2 * 12 * h * h + 2 * h * 1024)
    again = {
        name: counted(GPT2, **changes)[0].recompute  # type: ignore[arg-type]
        for name, changes in {
            "each": {"checkpoint_every": 1},
            "thirds": {"checkpoint_every": 4},
            "reentrant": {"checkpoint_every": 1, "reentrant": True},
            "dropout": {"checkpoint_every": 1, "dropout": 0.1},
            "both": {"checkpoint_every": 1, "dropout": 0.1, "reentrant": True},
        }.items()
    }
    _, speed = counted(GPT2)
    ending = tokens * layers * 2 * 4 * h * h / speed
    assert again["dropout"] == again["both"] > again["reentrant"] > tokens * blocks / speed
    assert again["reentrant"] - again["each"] == pytest.approx(ending)
    assert again["reentrant"] - again["thirds"] == pytest.approx(ending / 4)


def test_products_move_their_factors_and_results() -> None:
    """A product of m x k and k x n: m k + k n + m n elements; backward has two of the same sizes."""
    time, _ = counted(replace(GPT2, precision="bf16", micro_batch=1))
    h, s, layers, vocab = 768, 1024, 12, 50257
    sizes = [(3 * h, h), (h, h), (4 * h, h), (h, 4 * h)] * layers + [(vocab, h)]
    elements = 3 * sum(s * k + n * k + s * n for n, k in sizes)
    gradients = 2 * 2 * 124439808
    moved = PLAIN["narrow-products"] * 2 * elements + gradients
    assert time.traffic * GPUS["a100-80gb"].memory_bandwidth == pytest.approx(moved, rel=1e-9)


def test_all_reduces_hide_behind_the_last_backward_only() -> None:
    plan = replace(EIGHT, gpu="t4", micro_batch=1, precision="amp-fp16")
    one, four = counted(plan)[0], counted(plan, accumulation=4)[0]
    assert one.communication == four.communication
    assert four.exposed == pytest.approx(one.exposed)
    assert four.exposed > 0.1 * one.communication
    least = (1 - PLAIN["overlap-ddp"]) * one.communication
    assert least <= one.exposed <= one.communication


@pytest.mark.parametrize(
    ("strategy", "accumulation", "units"),
    [
        # Rajbhandari et al. 2020, section 7: all-reduce 2, gather and reduce-scatter 1, times (N-1)/N.
        ("ddp", 1, 2), ("ddp", 4, 2), ("fsdp-no-shard", 1, 2), ("fsdp-no-shard", 4, 2),
        ("fsdp-shard-grad-op", 1, 2), ("fsdp-shard-grad-op", 4, 5),
        ("fsdp-full-shard", 1, 3), ("fsdp-full-shard", 4, 9),
    ],
)  # fmt: skip
def test_bytes_sent_are_whole_copies_of_the_model(strategy: str, accumulation: int, units: int) -> None:
    model = Model(name="all in blocks", family="size", parameters=10**9, layers=10)
    plan = Plan(model=model, ranks=8, strategy=strategy, accumulation=accumulation, gpu="a100-80gb")
    sent = counted(plan)[0].communication * hardware_of(plan, PLAIN).inside
    assert sent == pytest.approx(units * 4 * 10**9 * 7 / 8, rel=1e-9)


def test_zero_1_sends_the_weights_again_where_nothing_hides_it() -> None:
    model = Model(name="all in blocks", family="size", parameters=10**9, layers=10)
    plan = Plan(model=model, ranks=8, strategy="zero-1", gpu="a100-80gb")
    broadcasts = 10 * COEFFICIENTS["broadcast-seconds"].value
    time, link = counted(plan)[0], hardware_of(plan, PLAIN).inside
    assert (time.communication - broadcasts) * link == pytest.approx(3 * 4 * 10**9 * 7 / 8, rel=1e-9)
    assert time.exposed >= 4 * 10**9 * 7 / 8 / link + broadcasts


def test_the_root_unit_is_gathered_once() -> None:
    """gpt2's embeddings stay gathered from forward to backward (fully_shard's default for the root)."""
    sent = [
        counted(EIGHT, strategy=name)[0].communication * hardware_of(EIGHT, PLAIN).inside * 8 / 7
        for name in ("fsdp-shard-grad-op", "fsdp-full-shard")
    ]
    blocks = 124439808 - 50257 * 768 - 1024 * 768 - 2 * 768
    assert sent[1] - sent[0] == pytest.approx(2 * blocks, rel=1e-9)


def test_a_fused_adam_step_reads_four_and_writes_three() -> None:
    time = step_time(replace(GPT2, optimizer_kind="fused"))
    assert time.optimizer * GPUS["a100-80gb"].memory_bandwidth == pytest.approx(28 * 124439808, rel=1e-12)


def test_between_nodes_the_slower_link_counts() -> None:
    plan = replace(EIGHT, gpu="rtx-4090")
    inside, between = (counted(plan, nodes=n)[0].communication for n in (1, 2))
    network = PLAIN["node-link-other"] * PLAIN["node-efficiency"]
    assert between / inside == pytest.approx(32e9 * PLAIN["link-efficiency"] / network)


def test_a_ring_takes_a_step_for_each_rank() -> None:
    """The same bytes go round more ranks: only the fixed time of each step is more."""
    plan = replace(EIGHT, strategy="fsdp-full-shard", ranks=64, nodes=8)
    more = replace(plan, ranks=512, nodes=64)
    bare = counted(more)[0].communication / counted(plan)[0].communication
    assert bare == pytest.approx(511 / 512 / (63 / 64), rel=1e-9)
    assert step_time(more, coefficients=PLAIN).communication > 1.2 * step_time(plan, coefficients=PLAIN).communication


@pytest.mark.parametrize("row", COEFFICIENTS.values(), ids=lambda row: row.name)
def test_every_coefficient_says_what_it_means_and_where_it_is_from(row: object) -> None:
    assert row.value > 0  # type: ignore[attr-defined]
    assert len(row.meaning) > 10  # type: ignore[attr-defined]
    assert len(row.source) > 20  # type: ignore[attr-defined]


# -- laws ------------------------------------------------------------------------------------------


@given(plans())
@settings(max_examples=60, deadline=None)
def test_parts_are_sound_and_add_up(plan: Plan) -> None:
    time = step_time(plan)
    assert all(math.isfinite(part) and part >= 0 for part in parts(time))
    card = time.compute + time.recompute + time.traffic + time.pointwise + time.kernels + time.tensor
    busy = card + time.host if plan.device == "cpu" else max(card, time.host)
    rest = time.hooks + time.bubble + time.exposed + time.optimizer + time.offload
    assert busy + rest <= time.total * (1 + 1e-9)
    assert time.total <= card + time.host + rest + 1e-12
    assert time.exposed <= time.communication * (1 + 1e-9)
    assert time.low <= time.total <= time.high


def parts(time: StepTime) -> list[float]:
    return [getattr(time, field.name) for field in fields(time) if field.name != "tokens"]


@pytest.mark.parametrize("strategy", PARALLEL)
def test_one_rank_sends_nothing(strategy: str) -> None:
    time = step_time(replace(GPT2, strategy=strategy))
    assert time.communication == time.exposed == 0


@pytest.mark.parametrize("strategy", PARALLEL)
def test_a_larger_micro_batch_never_costs_more_per_sample(strategy: str) -> None:
    """34B FSDP gains 10 % from micro batch 2 to 8, 70B 3 to 6 % from 2 to 6 (llm-foundry): less and less."""
    times = [seconds(EIGHT, strategy=strategy, micro_batch=2**k) for k in range(8)]
    assert times == sorted(times, reverse=True)
    gains = [before / after for before, after in pairwise(times)]
    assert gains[-1] < gains[0]


# -- what public measurements show -----------------------------------------------------------------

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


# -- laws of the model -----------------------------------------------------------------------------


def total(plan: Plan, **changes: object) -> float:
    return step_time(replace(plan, **changes), coefficients=PLAIN).total  # type: ignore[arg-type]


@given(plans())
@settings(max_examples=40, deadline=None)
def test_many_micro_batches_at_once_are_each_alone(plan: Plan) -> None:
    """The vector form is the scalar one, element by element."""
    sizes = [(plan.micro_batch, plan.accumulation), (2 * plan.micro_batch, 1), (plan.micro_batch + 3, 5)]
    if plan.model.family == "size":
        sizes = sizes[:1]
    found = step_times(plan, [b for b, _ in sizes], [a for _, a in sizes])
    for index, (b, a) in enumerate(sizes):
        try:
            alone = step_time(replace(plan, micro_batch=b, accumulation=a))
        except PlanError:  # some schedules and losses refuse some sizes
            continue
        assert found.total[index] == pytest.approx(alone.total, rel=1e-12)
        assert found.samples[index] == alone.samples


@given(plans())
@settings(max_examples=40, deadline=None)
def test_more_of_everything_is_never_faster(plan: Plan) -> None:
    found = step_times(plan, [plan.micro_batch, plan.micro_batch + 1], [plan.accumulation] * 2)
    more = step_times(plan, [plan.micro_batch] * 2, [plan.accumulation, plan.accumulation + 1])
    assert found.total[0] <= found.total[1] * (1 + 1e-12)
    assert more.total[0] <= more.total[1] * (1 + 1e-12)


@given(plans())
@settings(max_examples=40, deadline=None)
def test_compute_goes_with_accumulation(plan: Plan) -> None:
    found = step_times(plan, [plan.micro_batch] * 2, [1, 3])
    for name in ("compute", "recompute", "traffic", "pointwise", "kernels", "host", "hooks", "tensor"):
        one, three = getattr(found, name)
        assert three == pytest.approx(3 * one, rel=1e-12)


@given(plans())
@settings(max_examples=40, deadline=None)
def test_faster_links_and_cards_are_never_slower(plan: Plan) -> None:
    hardware = hardware_of(plan)
    least = step_time(plan, hardware).total
    for field in ("link", "inside", "memory_bandwidth", "host_link"):
        quicker = replace(hardware, **{field: 2 * getattr(hardware, field)})
        assert step_time(plan, quicker).total <= least * (1 + 1e-12)


@pytest.mark.parametrize("changes", [
    {"tokens": 2048}, {"micro_batch": 9}, {"checkpoint_every": 1}, {"precision": "fp32"}, {"attention": "eager"},
    {"dropout": 0.1}, {"optimizer_kind": "foreach"}, {"accumulation": 2}, {"nodes": 2},
], ids=str)  # fmt: skip
def test_a_plan_with_more_work_is_slower(changes: dict[str, object]) -> None:
    plan = replace(EIGHT, optimizer_kind="fused", model=replace(EIGHT.model, context=4096))
    assert total(plan, **changes) > total(plan)


LLAMA = Plan(model=MODELS["llama-3-8b"], tokens=4096, micro_batch=1, accumulation=8, ranks=8, strategy="ddp",
             precision="bf16", gpu="h100-80gb")  # fmt: skip


def test_tensor_parallel_divides_products_and_sends_activations() -> None:
    """Korthikanti et al. 2022: four all-reduces a block of tokens x width, and one each of embedding and head."""
    divided = replace(LLAMA, layout=Layout(tensor=4))
    one, four = step_time(LLAMA, coefficients=PLAIN), step_time(divided, coefficients=PLAIN)
    assert four.compute == pytest.approx(one.compute / 4, rel=0.01)  # the embedding's rows round up
    sent = 2 * 3 / 4 * (32 * 4 + 2) * 4096 * 4096 * 2 * divided.accumulation
    link = hardware_of(divided, PLAIN).inside * PLAIN["tensor-share"]
    calls = (32 * 4 + 2) * divided.accumulation * 2 * 3 * PLAIN["hop-seconds-inside"]
    assert four.tensor == pytest.approx(sent / link + calls, rel=1e-9)


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
