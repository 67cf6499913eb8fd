"""The same step is the same step: losses do not depend on strategy, number of ranks, accumulation or checkpointing.

test_matrix.py has four ranks.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from itertools import product
from typing import Any

import pytest

from memcalc.strategies import STRATEGIES
from tests.trainers.runs import Job, Result, plan, run

PARALLEL = [row.name for row in STRATEGIES.values() if row.parallel and row.plain]
FAMILIES = ["gpt2-tiny", "llama-tiny", "mlp-tiny"]
VARIANTS: dict[str, dict[str, Any]] = {
    "accumulation": {"accumulation": 2},
    "checkpoint-1": {"checkpoint_every": 1},
    "checkpoint-2": {"checkpoint_every": 2, "reentrant": True},
}
ROUNDED: dict[str, dict[str, Any]] = {"bf16": {"precision": "bf16"}, "amp-bf16": {"precision": "amp-bf16"}}


def on_two(variants: Iterable[str]) -> list[tuple[str, str]]:
    """Strategies with variants: like one colour of a chessboard, so that each meets each second; with ALL_RUNS all."""
    board = product(enumerate(PARALLEL), enumerate(variants))
    return [
        (name, variant)
        for (row, name), (column, variant) in board
        if os.environ.get("ALL_RUNS") or (row + column) % 2 == 0
    ]


ON_TWO, PLAIN_ON_TWO, ROUNDED_ON_TWO = on_two(FAMILIES), on_two(VARIANTS), on_two(ROUNDED)


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Result]:
    """Runs on one rank; those on more are held against them."""
    jobs = {model: Job(plan(model)) for model in FAMILIES}
    jobs |= {name: Job(plan(ranks=1, strategy=name)) for name in PARALLEL}
    jobs |= {
        "accumulation": Job(plan(accumulation=4)),
        "checkpoint-1": Job(plan(checkpoint_every=1)),
        "checkpoint-2": Job(plan(checkpoint_every=2)),
        "checkpoint-1-reentrant": Job(plan(checkpoint_every=1, reentrant=True)),
        "mlp-reentrant": Job(plan("mlp-tiny", checkpoint_every=3, reentrant=True)),
        "dropout": Job(plan(dropout=0.2)),
        "dropout-checkpoint": Job(plan(dropout=0.2, checkpoint_every=1)),
        "keep-gradients": Job(plan(set_to_none=False)),
        "bf16": Job(plan(precision="bf16")),
        "amp-bf16": Job(plan(precision="amp-bf16")),
        "amp-fp16": Job(plan(precision="amp-fp16")),
        "text": Job(plan(), steps=40),
    }
    return run(jobs, 1, tmp_path_factory.mktemp("one"))


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Result]:
    jobs = {f"{name}-{model}": Job(plan(model, ranks=2, strategy=name)) for name, model in ON_TWO}
    for name, variant in [*PLAIN_ON_TWO, *ROUNDED_ON_TWO]:
        jobs[f"{name}-{variant}"] = Job(plan(ranks=2, strategy=name, **(VARIANTS | ROUNDED)[variant]))
    jobs["ddp-views"] = Job(plan(ranks=2, strategy="ddp", bucket_views=True))
    return run(jobs, 2, tmp_path_factory.mktemp("two"))


def equal(result: Result, reference: Result, places: float = 5e-5) -> None:
    assert result.losses == pytest.approx(reference.losses, abs=places, rel=0)
    assert result.evaluation == pytest.approx(reference.evaluation, abs=places, rel=0)


def test_a_run_learns_from_real_text(one: dict[str, Result]) -> None:
    losses = one["text"].losses
    assert sum(losses[-5:]) < sum(losses[:5]) - 5 * 1.0
    assert one["text"].evaluation < losses[0] - 1.0
    assert one["text"].speed > 0


@pytest.mark.parametrize("name", PARALLEL)
def test_one_rank_is_the_plain_run(one: dict[str, Result], name: str) -> None:
    equal(one[name], one["gpt2-tiny"])


@pytest.mark.parametrize(
    "name", ["accumulation", "checkpoint-1", "checkpoint-2", "checkpoint-1-reentrant", "keep-gradients"]
)
def test_what_saves_memory_does_not_change_losses(one: dict[str, Result], name: str) -> None:
    equal(one[name], one["gpt2-tiny"])


def test_reentrant_checkpoints_reach_the_first_layer(one: dict[str, Result]) -> None:
    equal(one["mlp-reentrant"], one["mlp-tiny"])


def test_recomputed_dropout_meets_the_same_masks(one: dict[str, Result]) -> None:
    equal(one["dropout-checkpoint"], one["dropout"])
    assert one["dropout"].losses != one["gpt2-tiny"].losses


@pytest.mark.parametrize("precision", ["bf16", "amp-bf16", "amp-fp16"])
def test_sixteen_bit_runs_stay_near(one: dict[str, Result], precision: str) -> None:
    """bfloat16 has 8 bits of mantissa: losses around 5 are good to a few hundredths."""
    equal(one[precision], one["gpt2-tiny"], places=0.05)
    assert one[precision].losses != one["gpt2-tiny"].losses


@pytest.mark.parametrize(("name", "model"), ON_TWO)
def test_two_ranks(one: dict[str, Result], two: dict[str, Result], name: str, model: str) -> None:
    equal(two[f"{name}-{model}"], one[model])


@pytest.mark.parametrize(("name", "variant"), PLAIN_ON_TWO)
def test_variants_on_two_ranks(one: dict[str, Result], two: dict[str, Result], name: str, variant: str) -> None:
    equal(two[f"{name}-{variant}"], one["gpt2-tiny"])


@pytest.mark.parametrize(("name", "precision"), ROUNDED_ON_TWO)
def test_sixteen_bit_on_two_ranks(one: dict[str, Result], two: dict[str, Result], name: str, precision: str) -> None:
    equal(two[f"{name}-{precision}"], one["gpt2-tiny"], places=0.05)


def test_bucket_views(one: dict[str, Result], two: dict[str, Result]) -> None:
    equal(two["ddp-views"], one["gpt2-tiny"])
