"""What must hold for parameters, gradients and optimizer states of every plan, however they are divided."""

from __future__ import annotations

import dataclasses

from hypothesis import given
from hypothesis import strategies as st

from memcalc.adapters import Adapter
from memcalc.deepspeed import DeepSpeed
from memcalc.estimate import estimate
from memcalc.ledger import ledger
from memcalc.models import FAMILIES, Model
from memcalc.plan import Plan
from memcalc.precision import DTYPE_BYTES
from tests.drawn_models import shaped_models, token_models
from tests.laws import (
    adaptable,
    divided_by_strategy_alone,
    model_states,
    padding,
    replaced,
    with_states_that_divide,
)
from tests.plans import plans


@given(plans())
def test_on_one_rank_every_strategy_holds_the_same_states(plan: Plan) -> None:
    if plan.strategy_row.zero_stage is not None:
        return  # DeepSpeed pads its flat weights, and updates a copy of them also in float32; laws below
    if plan.strategy == "megatron-distributed":
        return  # whose buffers are padded
    plan = replaced(divided_by_strategy_alone(plan), loss_dtype="float32")
    alone = replaced(plan, strategy="single", ranks=1, nodes=1)
    if plan.strategy == "fsdp-no-shard" or plan.fsdp.version == "1":  # flat gradients hold frozen weights, too
        plan, alone = (replaced(p, adapter=Adapter()) for p in (plan, alone))
    if plan.strategy != "single" and plan.bucket_views:
        alone = replaced(alone, bucket_views=False)
        plan = replaced(plan, bucket_views=False)
    if plan.device == "cuda" or plan.strategy == "fsdp-no-shard" or plan.fsdp.version == "1":
        plan, alone = (replaced(p, device="cpu", attention="auto", dropout=0.0, model=p.model) for p in (plan, alone))
    plan = replaced(plan, ranks=1, nodes=1)
    assert 0 <= model_states(plan) - model_states(alone) <= padding(plan)


@given(plans(max_ranks=6))
def test_the_fullest_rank_holds_an_equal_share_or_more_and_never_more_than_everything(plan: Plan) -> None:
    if plan.strategy_row.zero_stage is not None:
        return
    plan = with_states_that_divide(divided_by_strategy_alone(plan))
    plan = replaced(plan, device="cpu", attention="auto", bucket_views=False, loss_dtype="float32")
    if plan.strategy == "fsdp-no-shard":  # whose flat gradients hold frozen weights, too
        plan = replaced(plan, adapter=Adapter())
    whole = model_states(replaced(plan, strategy="single", ranks=1, nodes=1))
    here = model_states(plan)
    # Flat gradients hold those of frozen weights (Whisper's table of places), too.
    flat = plan.strategy == "fsdp-no-shard" or plan.fsdp.version == "1"
    frozen = sum(w.numel for w in plan.weights if not w.trainable) if flat else 0
    assert here <= whole + padding(plan) + DTYPE_BYTES[plan.precision_row.weights] * frozen
    parts = plan.shards if plan.strategy_row.gathers else plan.ranks
    # FSDP 1's shards hold unequal numbers of tensors, each with a step counter of 4 bytes.
    counters = 4 * len(plan.weights) if plan.fsdp.version == "1" else 0
    assert here * parts + counters >= whole


@given(plans(max_ranks=6))
def test_one_more_rank_never_needs_more_states_per_rank(plan: Plan) -> None:
    # ZeRO-1 packs whole tensors greedily: with more ranks the fullest may hold more of them, and so more rounding.
    # DeepSpeed keeps gradients of whole weights where a boundary cuts one; Megatron's padding grows with the ranks.
    if plan.strategy in ("single", "zero-1", "deepspeed-1", "deepspeed-2", "megatron-distributed"):
        return
    plan = with_states_that_divide(divided_by_strategy_alone(plan))
    more = replaced(plan, ranks=plan.ranks + 1)
    assert model_states(more) <= model_states(plan) + padding(more)


@given(plans())
def test_dividing_more_never_holds_more(plan: Plan) -> None:
    if plan.strategy == "single" or plan.strategy_row.zero_stage is not None or not plan.optimizer_row.shardable:
        return
    plan = with_states_that_divide(divided_by_strategy_alone(plan))
    plan = replaced(plan, bucket_views=False, device="cpu", attention="auto", loss_dtype="float32")
    held = [model_states(replaced(plan, strategy=name)) for name in ("ddp", "zero-1")]
    assert held[0] >= held[1]
    sharded = [model_states(replaced(plan, strategy=name)) for name in ("fsdp-shard-grad-op", "fsdp-full-shard")]
    assert sharded[0] == sharded[1] <= held[0] + padding(plan)


@given(plans(model=token_models()), st.integers(1, 9))
def test_an_adapter_never_needs_more_states_and_more_rank_never_less(plan: Plan, rank: int) -> None:
    plan = adaptable(plan)
    if plan.strategy == "fsdp-no-shard":  # whose flat gradients hold frozen weights, too
        plan = replaced(plan, strategy="ddp")
    plan = replaced(plan, adapter=Adapter(kind="lora", rank=rank, targets="query-value"))
    more = replaced(plan, adapter=dataclasses.replace(plan.adapter, rank=rank + 1))
    assert model_states(more) >= model_states(plan)
    assert ledger(more).peak().bytes >= ledger(plan).peak().bytes
    # Frozen weights beside none that are trained: nothing but the weights themselves is left.
    trained = [weight for weight in plan.weights if weight.trainable]
    full = replaced(plan, adapter=Adapter())
    if sum(weight.numel for weight in trained) < sum(weight.numel for weight in full.weights) / 4:
        rounding = 512 * len(plan.weights)  # an allocation's, of tensors this small
        assert model_states(with_states_that_divide(plan)) < model_states(with_states_that_divide(full)) + rounding


@given(plans(model=token_models()), st.integers(1, 9))
def test_lora_trains_rank_times_both_widths_of_each_layer(plan: Plan, rank: int) -> None:
    plan = replaced(adaptable(plan), adapter=Adapter(kind="lora", rank=rank, targets="all-linear"))
    layers = [
        weight for weight in plan.weights if len(weight.shape) == 2 and "." in weight.group and not weight.trainable
    ]
    assert estimate(plan).parameters == sum(rank * sum(weight.shape) for weight in layers)


@given(shaped_models(), st.integers(1, 6), st.sampled_from(["bf16-master", "fp16-master"]))
def test_each_stage_of_zero_holds_no_more_than_the_one_before(model: Model, ranks: int, precision: str) -> None:
    plan = Plan(
        model=model, strategy="deepspeed-0", ranks=ranks, precision=precision, optimizer_kind="fused", micro_batch=1,
        tokens=1 if model.context else 0, device="cpu", deepspeed=DeepSpeed(reduce_bucket_size=1),
    )  # fmt: skip
    held = [model_states(replaced(plan, strategy=f"deepspeed-{stage}")) for stage in range(4)]
    weights = FAMILIES[model.family].weights(model)
    # Padding to two elements a rank, or in stage 3 of each weight to the ranks, at 16 bytes and less an element.
    slack = 16 * 2 * ranks * (1 + len(weights))
    assert held[0] + slack >= held[1]
    assert held[1] == held[2]  # before the step; in backward stage 1 holds all gradients
    assert held[2] + slack >= held[3]


@given(st.integers(10, 10**9), st.integers(1, 64))
def test_zero_holds_what_its_authors_say(count: int, ranks: int) -> None:
    """Rajbhandari et al. 2020, ZeRO, section 3.1 and figure 1: 2 + 2 + 12 bytes a parameter, of which stage 1 divides
    the 12, stage 2 the gradients' 2 as well, and stage 3 all."""
    model = Model(name="n", family="size", parameters=count)
    plan = Plan(model=model, ranks=ranks, strategy="deepspeed-0", precision="fp16-master", optimizer="adam")
    share = count / ranks
    for stage, said in ((0, 16 * count), (2, 2 * count + 14 * share), (3, 16 * share)):
        found = model_states(replaced(plan, strategy=f"deepspeed-{stage}"))
        assert said <= found <= said + 16 * 2 * ranks + 512 * 8
