"""How tensors are cut: nothing is lost, and the fullest rank is the one that counts."""

from __future__ import annotations

from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memcalc.ledger import ledger
from memcalc.models import MODELS
from memcalc.plan import Plan
from memcalc.sharding import ddp_buckets, fullest, greedy_partition, rows_per_rank
from memcalc.spec import Weight

shapes = st.lists(st.integers(1, 40), min_size=1, max_size=3).map(tuple)
weights = st.lists(shapes, min_size=1, max_size=12).map(
    lambda drawn: [Weight(f"w{index}", shape) for index, shape in enumerate(drawn)]
)
ranks = st.integers(1, 9)


@given(shapes, ranks)
def test_padded_rows_hold_the_tensor_with_less_than_a_row_a_rank_to_spare(shape: tuple[int, ...], ranks: int) -> None:
    local = rows_per_rank(shape, ranks)
    assert local[1:] == shape[1:]
    assert 0 <= local[0] * ranks - shape[0] < ranks


@given(weights, ranks)
def test_every_tensor_goes_to_one_rank_and_no_rank_holds_a_tensor_too_many(weights: list[Weight], ranks: int) -> None:
    parts = greedy_partition(weights, ranks)
    assert len(parts) == ranks
    assert sorted(weight.name for part in parts for weight in part) == sorted(weight.name for weight in weights)
    sizes = [sum(weight.numel for weight in part) for part in parts]
    # A tensor goes to the emptiest rank, so the fullest is ahead of it by its last tensor at most.
    assert max(sizes) - min(sizes) <= max(weight.numel for weight in weights)


@given(weights, ranks)
def test_the_fullest_part_holds_most_and_among_equals_most_tensors(weights: list[Weight], ranks: int) -> None:
    parts = greedy_partition(weights, ranks)
    keys = [(sum(weight.numel for weight in part), len(part)) for part in parts]
    assert keys[fullest(parts)] == max(keys)
    assert keys.index(max(keys)) == fullest(parts)


@given(weights, st.sampled_from([2, 4]), st.integers(1, 30))
def test_buckets_hold_every_gradient_once(weights: list[Weight], itemsize: int, bucket_mb: int) -> None:
    assert sum(ddp_buckets(weights, itemsize, bucket_mb)) == itemsize * sum(weight.numel for weight in weights)


def test_buckets_close_once_they_are_full() -> None:
    weights = [Weight(f"w{index}", (300_000,)) for index in range(50)]  # 1.2 MB each, 60 MB in all
    sizes = ddp_buckets(weights, 4, 25)
    assert sizes[0] == 1_200_000  # the first closes at 1 MiB, so that communication starts early
    assert sizes[1:] == [22 * 1_200_000, 22 * 1_200_000, 5 * 1_200_000]


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_zero_1_shows_the_rank_that_holds_most(ranks: int) -> None:
    plan = Plan(model=MODELS["gpt2"], tokens=64, micro_batch=1, strategy="zero-1", ranks=ranks, optimizer="adam")
    weights = plan.family.weights(plan.model)
    held = [sum(weight.numel for weight in part) for part in greedy_partition(weights, ranks)]
    moments = ledger(plan).at_moment("forward", "optimizer")
    everything = sum(weight.numel for weight in weights)
    assert moments == 2 * 4 * max(held)
    assert everything / ranks < max(held) < everything
    assert max(held) >= prod(weights[0].shape)  # the token embedding is never cut
