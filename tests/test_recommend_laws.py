"""Laws of the search: nothing of the searched set that fits is better, and what it takes for granted holds."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memcalc.checkpointing import Checkpointing
from memcalc.errors import InputError, PlanError
from memcalc.estimate import estimate
from memcalc.fitting import state_bound
from memcalc.fsdp import Fsdp
from memcalc.layout import Layout
from memcalc.peaks import peak_of
from memcalc.plan import Plan
from memcalc.recommend import TIE, candidates, recommend
from memcalc.search import Search, search
from memcalc.strategies import STRATEGIES
from memcalc.structures import FILL
from memcalc.throughput import step_time
from tests.drawn_models import models
from tests.plans import plans
from tests.searches import PARALLEL


def brute_force(job: Search) -> list[Plan]:
    """Every plan of a job that fits, by itertools and the public estimate, one plan at a time."""
    found = []
    for name, tensor, pipeline, (every, policy), precision, kind, loss, size in itertools.product(
        job.strategies, job.tensors, job.pipelines,
        [*((every, "recompute-all") for every in job.checkpoints), *((1, policy) for policy in job.policies)],
        job.precisions, job.kinds, job.losses, job.micro_batches,
    ):  # fmt: skip
        accumulation = job.accumulation or (FILL * pipeline if pipeline > 1 else 1)
        base = job.base
        if base.ranks % (tensor * pipeline) or (base.ranks == tensor * pipeline) != (name == "single"):
            continue
        layout = Layout(
            tensor=tensor,
            pipeline=pipeline,
            sequence=tensor > 1 and base.tokens % tensor == 0,
        )
        chooses = STRATEGIES[name].gathers and accumulation > 1 and pipeline == 1
        for sync in job.syncs if chooses else (False,):
            with contextlib.suppress(PlanError):
                found.append(replace(
                    base, strategy=name, layout=layout, checkpoint_every=every, checkpointing=Checkpointing(policy=policy),
                    precision=precision, optimizer_kind=kind, loss=loss, micro_batch=size,
                    accumulation=accumulation, fsdp=Fsdp(sync_every_micro_batch=sync),
                ))  # fmt: skip
    return found


@st.composite
def small_jobs(draw: st.DrawFn) -> Search:
    """A search of few choices around the edge of what fits."""
    model = draw(models().filter(lambda model: model.family != "size"))
    tokens = model.context - model.position_offset if model.context else 0
    base = Plan(
        model=model,
        tokens=tokens,
        micro_batch=1,
        ranks=draw(st.integers(1, 4)),
        strategy="ddp",
        gpu="a100-80gb",
    )
    open_ = search(base)

    def some(choices: Sequence[object], most: int = 2) -> list[Any]:
        return draw(st.lists(st.sampled_from(choices), min_size=1, max_size=most, unique=True))

    least = estimate(replace(base, precision="bf16", strategy="fsdp-full-shard")).device.high
    return search(
        base,
        capacity=least + draw(st.integers(-(2**20), 3 * 2**20)),
        strategies=["single", *some(PARALLEL, 3)],
        tensors=some(open_.tensors),
        pipelines=some(open_.pipelines),
        checkpoints=some(open_.checkpoints),
        policies=open_.policies if draw(st.booleans()) else (),
        precisions=["fp32", "bf16"],
        kinds=some(open_.kinds),
        losses=some(open_.losses),
        offloads=[False],
        micro_batches=some([1, 2, 3, 5, 17, 64], 3),
        accumulation=draw(st.sampled_from([None, 3])),
    )


@given(small_jobs())
@settings(max_examples=25, deadline=None)
def test_what_is_recommended_fits_and_nothing_that_fits_is_better(job: Search) -> None:
    made = brute_force(job)
    assert sorted(c.plan.to_json() for c in candidates(job)) == sorted(plan.to_json() for plan in made)
    if not made:
        with pytest.raises(PlanError, match="no plan can be made"):
            recommend(job)
        return
    fitting = [plan for plan in made if estimate(plan).device.high <= job.capacity]
    found = recommend(job, top=3)
    assert found.tried == len(made)
    assert bool(found.plans) == bool(fitting)
    for choice in found.plans:
        assert choice.plan in fitting
        assert choice.peak == estimate(choice.plan).peak.bytes
        assert choice.headroom == job.capacity - estimate(choice.plan).device.high >= 0
    if fitting:
        fastest = min(step_time(plan).seconds_per_sample for plan in fitting)
        first = found.plans[0]
        assert first.time.seconds_per_sample <= (1 + TIE) * fastest
        assert first.speed == pytest.approx(fastest / first.time.seconds_per_sample)
        assert max(choice.speed for choice in found.plans) <= 1
    for refusal in found.refused:
        assert job.capacity < refusal.needed <= estimate(refusal.plan).device.high


def fastest(job: Search) -> float:
    """Seconds of a sample by the fastest plan; without end where none fits."""
    with contextlib.suppress(PlanError):
        return min((c.time.seconds_per_sample / c.speed for c in recommend(job, top=2).plans), default=math.inf)
    return math.inf


@given(small_jobs(), st.integers(0, 2**30))
@settings(max_examples=10, deadline=None)
def test_with_more_memory_or_less_of_a_model_the_best_plan_is_never_slower(job: Search, more: int) -> None:
    best, model = fastest(job), job.base.model
    assert fastest(replace(job, capacity=job.capacity + more)) <= best * (1 + 1e-9)
    with contextlib.suppress(InputError):
        if model.layers == model.blocks and model.layers:
            deeper = replace(job, base=replace(job.base, model=replace(model, layers=2 * model.layers)))
            assert best <= fastest(deeper) * (1 + 1e-9)


@given(plans())
@settings(max_examples=60, deadline=None)
def test_states_alone_are_never_more_than_the_ledger(plan: Plan) -> None:
    assert state_bound(plan) <= peak_of(plan) == estimate(plan).peak.bytes


@given(plans(), st.integers(1, 3), st.integers(1, 3))
@settings(max_examples=40, deadline=None)
def test_a_plan_with_less_of_everything_is_never_slower(plan: Plan, micro_batch: int, rounds: int) -> None:
    with contextlib.suppress(InputError):
        more = replace(
            plan, micro_batch=plan.micro_batch * micro_batch, accumulation=plan.accumulation * rounds,
            model=replace(plan.model, layers=2 * plan.model.layers) if plan.model.layers == plan.model.blocks else plan.model,
        )  # fmt: skip
        assert step_time(plan).total <= step_time(more).total * (1 + 1e-12)
