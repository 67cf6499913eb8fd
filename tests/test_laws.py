"""What must hold for every plan, whatever its numbers."""

from __future__ import annotations

import dataclasses

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from memcalc.adapters import Adapter
from memcalc.allocator import Allocator
from memcalc.allocator_options import AllocatorOptions
from memcalc.checkpointing import Checkpointing
from memcalc.compute import Compute
from memcalc.deepspeed import DeepSpeed
from memcalc.estimate import estimate
from memcalc.layout import Layout
from memcalc.ledger import ledger, peaks
from memcalc.models import FAMILIES, Model
from memcalc.offload import Offload
from memcalc.optimizers import OPTIMIZERS
from memcalc.plan import Plan
from memcalc.reserved import replayed, run
from memcalc.timeline import CATEGORIES, MOMENTS, Timeline
from memcalc.update import Update
from tests.drawn_models import shaped_models, token_models
from tests.plans import plans

settings.register_profile("laws", deadline=None, max_examples=60)
settings.load_profile("laws")

MIB = 2**20
STATES = ("parameters", "gradients", "optimizer")


def kept_activations(timeline: Timeline) -> int:
    """Activation bytes alive when the model's forward pass is done."""
    last = np.flatnonzero(timeline.moment == MOMENTS.index("forward"))[-1]
    of_kind = np.where(timeline.category == CATEGORIES.index("activations"), timeline.delta, 0)
    return int(of_kind[: last + 1].sum())


def model_states(plan: Plan) -> int:
    """Parameters, gradients and optimizer states when the step begins."""
    timeline = ledger(plan)
    first = np.flatnonzero(timeline.moment == MOMENTS.index("step"))
    upto = first[0] if len(first) else len(timeline.delta)
    kinds = np.isin(timeline.category[:upto], [CATEGORIES.index(name) for name in STATES])
    return int(timeline.delta[:upto][kinds].sum())


QUANTISING = tuple(name for name in OPTIMIZERS if name.endswith(("-8bit", "-ao")) or name.startswith("paged"))


def with_states_that_divide(plan: Plan) -> Plan:
    """Some states are quantised, paged or counted only for large tensors, so that a smaller shard may cost more."""
    plan = replaced(plan, update=dataclasses.replace(plan.update, in_backward=False))
    if plan.optimizer not in ("adamw", "sgd", "adafactor"):
        plan = replaced(plan, optimizer="adamw", optimizer_kind="foreach", update=Update(ema=plan.update.ema))
    return plan


def divided_by_strategy_alone(plan: Plan) -> Plan:
    """Data parallel of what any strategy can train: no other layout, and no master copies."""
    precision = "fp32" if plan.precision_row.master else plan.precision
    update = dataclasses.replace(plan.update, in_backward=False)
    return replaced(
        plan,
        ranks=plan.data_parallel,
        nodes=1,
        layout=Layout(),
        precision=precision,
        attention="auto",
        update=update,
        compute=Compute(compile=plan.compute.compile),
    )


def at_home(plan: Plan) -> Plan:
    """Nothing waits on the host, where small tensors do not go: a larger one may then leave and take less."""
    return replaced(plan, compute=dataclasses.replace(plan.compute, offload_activations=False))


def padding(plan: Plan) -> int:
    """Bytes by which buffers of a plan's strategy may be longer than their weights, with 20 bytes of states each."""
    if plan.strategy == "megatron-distributed":
        return 20 * 128 * plan.shards
    # FSDP 1 begins each weight at a multiple of 16 bytes, and pads to a multiple of the ranks.
    return 20 * (8 + plan.shards) * len(plan.weights) if plan.fsdp.version == "1" else 0


def adaptable(plan: Plan) -> Plan:
    """Divided by a strategy that can train adapters."""
    plan, row = replaced(divided_by_strategy_alone(plan), offload=Offload(), update=Update()), plan.strategy_row
    other = row.main_grads or row.zero_stage is not None or plan.fsdp.version == "1"
    return replaced(plan, strategy="ddp", loss_dtype="float32") if other else plan


def replaced(plan: Plan, **changes: object) -> Plan:
    """The plan with other fields, and without what belongs to the device or the strategy that it had."""
    if changes.get("device") == "cpu" or "strategy" in changes:
        changes = {"offload": Offload()} | changes
    if "adapter" in changes:
        changes = {"fsdp": dataclasses.replace(plan.fsdp, version="2"), "offload": Offload()} | changes
    if "strategy" in changes or "ranks" in changes:
        changes = {"fsdp": dataclasses.replace(plan.fsdp, replicas=0)} | changes
    return dataclasses.replace(plan, **changes)  # type: ignore[arg-type]


@given(plans())
def test_every_allocation_is_freed_at_most_once_and_the_step_closes(plan: Plan) -> None:
    timeline = ledger(plan)
    freed: dict[int, bool] = {}
    for ident, delta in zip(timeline.ident.tolist(), timeline.delta.tolist(), strict=True):
        if ident not in freed:
            assert delta >= 0, "freed before it was allocated"
            freed[ident] = False
        else:
            assert not freed[ident], "freed twice"
            freed[ident] = True
    live = timeline.live()
    assert (live >= 0).all()
    if plan.strategy_row.engine == "deepspeed" and plan.layout.pipeline > 1:
        return  # whose buffers keep the last outputs until they are used again
    # The step ends with what it began with: states, one batch, and gradients where they are kept.
    first_forward = np.flatnonzero(timeline.moment == MOMENTS.index("forward"))[0]
    assert live[-1] == live[first_forward - 1]


@given(plans())
def test_parts_add_up_to_the_peak(plan: Plan) -> None:
    peak = ledger(plan).peak()
    assert sum(peak.by_category.values()) == peak.bytes == max(peak.by_moment.values())
    assert min(peak.by_category.values()) >= 0


@given(plans(), st.integers(1, 9))
def test_a_skeleton_serves_every_micro_batch(plan: Plan, micro_batch: int) -> None:
    other = replaced(plan, micro_batch=micro_batch)
    assert peaks(plan, [micro_batch]) == [ledger(other).peak().bytes]


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
    assert here <= whole + padding(plan)
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


@given(plans(model=shaped_models()))
def test_kept_activations_are_linear_in_the_micro_batch(plan: Plan) -> None:
    plan = replaced(plan, device="cpu", attention="auto", optimizer="sgd", optimizer_kind="foreach", update=Update())
    one, two, three = (kept_activations(ledger(replaced(plan, micro_batch=b), 0)) for b in (1, 2, 3))
    assert three - two == two - one


@given(plans(model=token_models()))
def test_kept_activations_are_linear_in_tokens_with_fused_attention(plan: Plan) -> None:
    plan = at_home(plan)
    alike = plan.model.head_width if plan.model.kv_lora else 0  # flash takes values only as wide as keys
    plan = replaced(plan, model=dataclasses.replace(plan.model, context=99, value_dim=alike))
    plan = replaced(plan, device="cpu", attention="flash" if not plan.dropout else "auto", dropout=0.0)
    if plan.model.experts:  # whose every second product is of another expert, of other rows by rounding
        plan = replaced(plan, checkpointing=Checkpointing())
    one, two, three = (kept_activations(ledger(replaced(plan, tokens=s), 0)) for s in (8, 16, 24))
    assert three - two == two - one


@given(plans(model=shaped_models()))
def test_more_of_anything_never_needs_less(plan: Plan) -> None:
    if plan.strategy_row.zero_stage is not None:
        return  # a wider weight may cross a threshold: DeepSpeed no longer keeps it gathered, or fills a bucket sooner
    plan = at_home(plan)
    # The fullest moment of Adafactor's step is told before sizes are rounded to blocks; others keep large tensors in fewer
    # bits, or elsewhere.
    if plan.optimizer in ("adafactor", "adafactor-hf", *QUANTISING):
        plan = replaced(plan, optimizer="adamw", optimizer_kind="foreach")
    base = ledger(plan).peak().bytes
    model = plan.model
    assert ledger(replaced(plan, micro_batch=plan.micro_batch + 1)).peak().bytes >= base
    deeper = deeper_model(model, max(plan.checkpoint_every, 1))
    assert ledger(replaced(plan, model=deeper)).peak().bytes >= base
    wider = wider_model(model)
    assert ledger(replaced(plan, model=wider)).peak().bytes >= base
    more = max(plan.loss.chunks, 1)  # 5 rows in 4 chunks are 3 of them, fewer than 4 rows make
    if plan.tokens and plan.tokens + more <= model.context:
        assert ledger(replaced(plan, tokens=plan.tokens + more)).peak().bytes >= base


def deeper_model(model: Model, blocks: int) -> Model:
    if model.stages:
        return dataclasses.replace(model, stages=(*model.stages[:-1], model.stages[-1] + blocks))
    widths = (*model.widths, *[model.widths[-1]] * blocks) if model.widths else ()
    return dataclasses.replace(model, layers=model.layers + blocks, widths=widths)


def wider_model(model: Model) -> Model:
    step = model.heads or 1
    extra = {"features": model.features + 1} if model.family == "mlp" else {"ffn": model.ffn + 1} if model.ffn else {}
    width = 2 * step if model.family in ("llama", "decoder", "moe") else step
    return dataclasses.replace(model, hidden=model.hidden + width, **extra)


@given(plans(model=shaped_models()))
def test_checkpointing_never_keeps_more_activations(plan: Plan) -> None:
    plan, none = at_home(plan), Checkpointing()
    plain = replaced(plan, checkpoint_every=0, reentrant=False, device="cpu", attention="auto", checkpointing=none)
    for every in (1, 2):
        checkpointed = replaced(plain, checkpoint_every=every)
        # Every checkpoint keeps its input, which the plain run may share with what a layer saves anyway.
        assert kept_activations(ledger(checkpointed, 0)) <= kept_activations(ledger(plain, 0))


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


@given(plans(model=token_models()))
def test_a_policy_keeps_more_than_its_checkpoints_and_less_than_all(plan: Plan) -> None:
    plan = replaced(adaptable(plan), checkpoint_every=1, reentrant=False, device="cpu", attention="auto", dropout=0.0)
    plan = replaced(plan, adapter=Adapter(), checkpointing=Checkpointing())
    full = kept_activations(ledger(plan))
    for policy in ("matrix-products", "core-attention"):
        some = kept_activations(ledger(replaced(plan, checkpointing=Checkpointing(policy=policy))))
        assert some >= full
    assert kept_activations(ledger(replaced(plan, checkpointing=Checkpointing(one_in=2)))) >= full


@given(plans())
def test_meters_are_in_order(plan: Plan) -> None:
    found = estimate(plan)
    assert found.peak.bytes <= found.reserved.low <= found.reserved.high
    assert found.reserved.low <= found.device.low <= found.device.high
    assert found.reserved.high <= found.device.high
    assert found.host >= 0


@given(plans())
def test_steps_leave_as_much_as_they_found(plan: Plan) -> None:
    if plan.device == "cpu":
        return
    timeline = ledger(plan)
    two, three = (replayed(plan, timeline, steps=steps) for steps in (2, 3))
    assert two.allocated == three.allocated and two.peak_allocated == three.peak_allocated


@given(plans())
def test_reserved_lies_between_the_tensors_and_all_that_was_ever_asked_for(plan: Plan) -> None:
    if plan.device == "cpu":
        return
    found, timeline = estimate(plan), ledger(plan)
    assert found.reserved.low == found.peak.bytes <= found.reserved.point <= found.reserved.high
    held = replayed(plan, timeline)
    assert held.peak_reserved % (2 * MIB) == 0
    assert held.peak_allocated <= held.peak_reserved
    # Were nothing ever reused, each request would have a segment of its own.
    options, asked = plan.allocator_options, [size for _, size in run(plan, timeline) if size > 0]
    segment = Allocator(options).segment_size
    streams = len(held.by_stream)
    assert held.peak_reserved <= sum(segment(options.round(size)) for size in asked) + 2 * streams * 20 * MIB


@given(plans())
def test_expandable_segments_hold_no_more_than_a_page_for_each_hole(plan: Plan) -> None:
    """No law says that they hold less: best fit may split a block that a segment of its own had spared."""
    if plan.device == "cpu":
        return
    timeline = ledger(plan)
    held = replayed(plan, timeline, AllocatorOptions(expandable_segments=True))
    assert held.peak_allocated == timeline.peak().bytes  # also where a free waits for another stream
    assert held.segments <= 2 * len(held.by_stream)


@given(plans())
def test_a_card_with_room_changes_nothing_and_a_full_one_only_lowers_reserved(plan: Plan) -> None:
    if plan.device == "cpu":
        return
    timeline = ledger(plan)
    free = replayed(plan, timeline)
    assert replayed(plan, timeline, capacity=free.peak_reserved).peak_reserved == free.peak_reserved
    full = replayed(plan, timeline, capacity=free.peak_reserved - 2 * MIB)
    assert full.peak_reserved < free.peak_reserved


@given(plans())
def test_weights_are_named_once_and_belong_to_a_block_or_the_root(plan: Plan) -> None:
    assert len({weight.name for weight in plan.weights}) == len(plan.weights)
    assert estimate(plan).parameters == sum(weight.numel for weight in plan.weights if weight.trainable)
    if not plan.adapter.freezes:
        assert plan.weights == FAMILIES[plan.model.family].weights(plan.model)


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
