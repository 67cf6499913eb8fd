"""What must hold for every plan, whatever its numbers."""

from __future__ import annotations

import dataclasses

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from memcalc.adapters import Adapter
from memcalc.checkpointing import Checkpointing
from memcalc.estimate import estimate
from memcalc.ledger import ledger, peaks
from memcalc.models import FAMILIES, Model
from memcalc.plan import Plan
from memcalc.timeline import MOMENTS
from memcalc.update import Update
from tests.drawn_models import shaped_models, token_models
from tests.laws import (
    QUANTISING,
    adaptable,
    at_home,
    kept_activations,
    replaced,
)
from tests.plans import plans


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
    plan = replaced(plan, device="cpu", attention="flash", dropout=0.0)
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
    if plan.model.heads and plan.kernel in ("efficient", "math"):  # which is taken depends on the width of a head
        plan = replaced(plan, attention="math")
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
    step = max(model.heads, model.decoder_heads) or 1
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
def test_weights_are_named_once_and_belong_to_a_block_or_the_root(plan: Plan) -> None:
    assert len({weight.name for weight in plan.weights}) == len(plan.weights)
    assert estimate(plan).parameters == sum(weight.numel for weight in plan.weights if weight.trainable)
    if not plan.adapter.freezes:
        assert plan.weights == FAMILIES[plan.model.family].weights(plan.model)
