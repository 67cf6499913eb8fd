"""What a recommendation says: why a plan, what does not fit, what would do, and the plan after an out of memory."""

from __future__ import annotations

from dataclasses import replace

import pytest

from memcalc.adapters import Adapter
from memcalc.estimate import estimate
from memcalc.fitting import needed_bytes
from memcalc.hardware import GPUS
from memcalc.models import MODELS, Model
from memcalc.peaks import peak_of
from memcalc.plan import Plan
from memcalc.recommend import TIE, next_plan, recommend
from memcalc.remedies import remedies
from memcalc.search import search
from tests.searches import FEW, FLAT, GPT2, PARALLEL, TINY


def test_quantised_weights_are_a_remedy_where_frozen_ones_do_not_fit() -> None:
    plan = replace(
        GPT2, model=MODELS["llama-3-8b"], tokens=256, ranks=1, strategy="single", precision="bf16", gpu="rtx-3060",
        adapter=Adapter(kind="lora", dtype="float32"),
    )  # fmt: skip
    assert not recommend(replace(plan, micro_batch=1), **FEW).plans
    assert "--quantize nf4-double" in remedies(search(plan, **FEW))


# -- reasons ---------------------------------------------------------------------------------------


def test_reasons_speak_of_what_was_searched() -> None:
    whole = recommend(GPT2, top=20, **FEW)
    by_strategy = {c.plan.strategy: c.reason for c in reversed(whole.plans)}
    assert by_strategy["ddp"].startswith("fits without sharding anything, so there are no gathers")
    big = recommend(
        replace(GPT2, model=MODELS["gpt2-xl"], ranks=4, gpu="t4"),
        micro_batches=[1],
        **{**FEW, "checkpoints": [0]},
    )
    assert big.plans[0].reason.startswith("the plainest that fits: shards everything")
    tight = recommend(replace(GPT2, model=MODELS["llama-3-70b"], tokens=8192, ranks=64, nodes=8, gpu="h100"),
                      strategies=["fsdp-full-shard"], **FEW)  # fmt: skip
    assert "without checkpointing it does not fit" in tight.plans[0].reason


def test_reasons_claim_nothing_that_was_not_tried() -> None:
    (choice,) = recommend(GPT2, strategies=["fsdp-full-shard"], **{**FEW, "checkpoints": [1]}).plans
    assert "does not fit" not in choice.reason
    assert "plainest" not in choice.reason


def test_checkpointing_is_the_cure_when_activations_are_the_trouble() -> None:
    """Sharding does not divide activations: a large fixed micro batch needs checkpointing, and then plain DDP will do."""
    base = replace(GPT2, ranks=2, gpu="a100-40gb")
    found = recommend(base, micro_batches=[40], **FEW)
    assert found.plans[0].plan.checkpoint_every == 1
    assert found.plans[0].plan.strategy == "ddp"
    without = [refusal for refusal in found.refused if not refusal.plan.checkpoint_every]
    assert {refusal.plan.strategy for refusal in without} == set(PARALLEL)
    assert {refusal.category for refusal in without} == {"activations"}


def test_gathered_weights_break_shard_grad_op_at_any_world_size() -> None:
    """46.7B parameters keep 93.4 GB of 16-bit weights on every GPU; divided over 32 they fit (xtuner's Mixtral notes)."""
    model = Model(name="46.7B", family="size", parameters=46_700_000_000, layers=32)
    for ranks in (8, 64, 512):
        base = Plan(model=model, ranks=ranks, strategy="ddp", gpu="h100-80gb")
        kept = next(r for r in recommend(base, top=20, without=FLAT).refused if r.plan.strategy == "fsdp-shard-grad-op")
        assert kept.missing > 0
    assert [c.plan.strategy for c in recommend(replace(base, ranks=32)).plans] == ["fsdp-full-shard"]
    assert not recommend(replace(base, ranks=8)).plans


def test_what_does_not_fit_says_which_term_breaks_it() -> None:
    base = replace(GPT2, model=MODELS["gpt2-xl"], ranks=1, strategy="single", gpu="t4")
    found = recommend(base, **FEW)
    assert not found.plans
    closest = found.refused[0]
    assert {refusal.plan.micro_batch for refusal in found.refused} == {1}
    peak = estimate(closest.plan).peak
    assert (closest.moment, closest.category_bytes) == (
        peak.moment,
        max(peak.by_category.values()),
    )
    assert peak.by_category[closest.category] == closest.category_bytes
    assert 0 < closest.missing <= estimate(closest.plan).device.high - GPUS["t4"].usable_bytes
    assert found.refused == tuple(sorted(found.refused, key=lambda refusal: refusal.needed))


def test_remedies_are_enough_and_no_more_than_needed() -> None:
    job = search(replace(GPT2, model=MODELS["gpt2-xl"], ranks=1, strategy="single", gpu="t4"), offloads=[False], **FEW)
    words = remedies(job)
    count = next(int(word.split()[1]) for word in words if word.startswith("--gpus "))
    card = next(word.split()[1] for word in words if word.startswith("--gpu "))
    assert recommend(replace(job.base, ranks=count, strategy="ddp"), offloads=[False], **FEW).plans
    assert not recommend(
        replace(job.base, ranks=count // 2, strategy="ddp" if count > 2 else "single"), offloads=[False], **FEW
    ).plans
    assert recommend(replace(job.base, gpu=card), **FEW).plans
    smaller = [gpu for gpu in GPUS.values() if GPUS["t4"].usable_bytes < gpu.usable_bytes < GPUS[card].usable_bytes]
    least = replace(job, precisions=("amp-fp16",), micro_batches=(1,), checkpoints=(1,))
    others = [replace(least, capacity=gpu.usable_bytes, base=replace(job.base, gpu=gpu.name)) for gpu in smaller]
    assert others
    assert not any(recommend(other).plans for other in others)


def test_remedies_name_the_choice_that_was_fixed() -> None:
    job = search(replace(GPT2, ranks=2, gpu="a100-40gb"), checkpoints=[0], micro_batches=[40])
    assert {"--batch-size 1", "--checkpointing full"} <= set(remedies(job))


# -- after an out of memory ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "failed",
    [
        replace(GPT2, precision="amp-bf16", micro_batch=64),
        replace(GPT2, precision="fp32", micro_batch=16, accumulation=2, ranks=4),
        replace(GPT2, precision="amp-bf16", micro_batch=32, ranks=1, strategy="single"),
        replace(TINY, device="cpu", gpu=None, micro_batch=64, optimizer_kind="for-loop"),
    ],
    ids=["ddp", "accumulating", "single", "cpu"],
)
def test_the_next_plan_is_the_same_job_in_less_memory(failed: Plan) -> None:
    capacity = 80 * 10**9
    after = next_plan(failed, capacity)
    assert after is not None
    for field in (
        "model",
        "ranks",
        "precision",
        "optimizer",
        "tokens",
        "device",
        "global_batch",
    ):
        assert getattr(after, field) == getattr(failed, field)
    assert estimate(after).device.high <= 0.95 * estimate(failed).device.high or failed.device == "cpu"
    assert estimate(after).peak.bytes < estimate(failed).peak.bytes
    assert estimate(after).device.high <= capacity


def test_there_may_be_no_next_plan() -> None:
    assert next_plan(GPT2, 0) is None
    assert next_plan(GPT2, 10**9) is None
    assert (
        next_plan(
            replace(GPT2, model=MODELS["gpt2-xl"], micro_batch=2, ranks=1, strategy="single"),
            16 * 10**9,
        )
        is None
    )


def test_what_more_memory_would_make_possible() -> None:
    job = search(
        GPT2,
        strategies=["ddp"],
        capacity=20 * 10**9,
        offloads=[False],
        **{**FEW, "checkpoints": [0]},
    )
    found = recommend(job)
    assert found.change is not None and found.change.speed > 1 + TIE
    more = replace(job, capacity=job.capacity + found.change.missing)
    assert needed_bytes(found.change.plan, peak_of(found.change.plan)) == more.capacity
    # The next larger card, and none smaller.
    assert found.change.card is not None
    sizes = sorted(row.usable_bytes for row in GPUS.values() if row.usable_bytes >= more.capacity)
    assert GPUS[found.change.card].usable_bytes == sizes[0]
