"""Step times: counted FLOPs and bytes by ``==``."""

from __future__ import annotations

from dataclasses import replace

import pytest

from memcalc.adapters import Adapter
from memcalc.coefficient_table import COEFFICIENTS
from memcalc.hardware import GPUS
from memcalc.layout import Layout
from memcalc.models import Model
from memcalc.plan import Plan
from memcalc.rank_hardware import hardware_of
from memcalc.throughput import step_time
from tests.speeds import EIGHT, GPT2, LLAMA, PLAIN, counted


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


def test_tensor_parallel_divides_products_and_sends_activations() -> None:
    """Korthikanti et al. 2022: four all-reduces a block of tokens x width, and one each of embedding and head."""
    divided = replace(LLAMA, layout=Layout(tensor=4))
    one, four = step_time(LLAMA, coefficients=PLAIN), step_time(divided, coefficients=PLAIN)
    assert four.compute == pytest.approx(one.compute / 4, rel=0.01)  # the embedding's rows round up
    sent = 2 * 3 / 4 * (32 * 4 + 2) * 4096 * 4096 * 2 * divided.accumulation
    link = hardware_of(divided, PLAIN).inside * PLAIN["tensor-share"]
    calls = (32 * 4 + 2) * divided.accumulation * 2 * 3 * PLAIN["hop-seconds-inside"]
    assert four.tensor == pytest.approx(sent / link + calls, rel=1e-9)
