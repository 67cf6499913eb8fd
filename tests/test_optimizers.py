"""Optimizer rows, without torch. tests/trainers/test_optimizers_measured.py holds them to the real ones."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memcalc.models import FAMILIES, MODELS
from memcalc.optimizers import KINDS, OPTIMIZERS, Optimizer
from memcalc.precision import DTYPE_BYTES
from memcalc.spec import Weight

NOW, OLD = (2, 13), (2, 0)
SHAPES = st.lists(st.lists(st.integers(1, 50), min_size=1, max_size=4).map(tuple), max_size=8)
ROWS = [(row, kind) for row in OPTIMIZERS.values() for kind in row.kinds]
GPT2 = [weight.shape for weight in FAMILIES["gpt2"].weights(MODELS["gpt2"])]
PARAMETERS = 124_439_808


def total(row: Optimizer, shapes: list[tuple[int, ...]], kind: str, version: tuple[int, int] = NOW) -> int:
    return sum(size for _, size in row.temporaries(shapes, 4, kind, version))


def states(name: str, dtype: str = "float32") -> int:
    return sum(sum(OPTIMIZERS[name].state_bytes(Weight("w", shape), dtype)) for shape in GPT2)


FLOAT32 = ("adamw-8bit", "lion-8bit", "paged-adamw", "paged-adamw-8bit", "fused-adam", "adafactor-hf")
"""Whose states have one size whatever the weights' dtype."""
PARTLY_FLOAT32 = ("muon", "rprop", "adafactor-hf", "adamw-8bit-ao", "adamw-4bit-ao", "adamw-fp8-ao")
"""Whose temporaries have, at least in part."""


def test_all_that_were_asked_for_are_there() -> None:
    assert set(OPTIMIZERS) == {
        "sgd", "sgd-momentum", "sgd-nesterov", "asgd", "adam", "adamw", "amsgrad", "nadam", "radam", "adamax", "adadelta",
        "rmsprop", "rmsprop-momentum", "rmsprop-centered", "rprop", "adagrad", "adafactor", "muon", "lbfgs",
        "fused-adam", "adafactor-hf", "lion", "lion-8bit", "adamw-8bit", "paged-adamw", "paged-adamw-8bit",
        "adamw-8bit-ao", "adamw-4bit-ao", "adamw-fp8-ao",
    }  # fmt: skip
    for row in OPTIMIZERS.values():
        assert set(row.kinds) <= set(KINDS)


@pytest.mark.parametrize(
    ("name", "multiple"), [("sgd", 0), ("sgd-momentum", 1), ("adamw", 2), ("amsgrad", 3), ("adagrad", 1), ("lion", 1)]
)
def test_states_of_gpt2_are_multiples_of_its_parameters(name: str, multiple: int) -> None:
    assert states(name) == 4 * multiple * PARAMETERS
    assert states(name, "bfloat16") == 2 * multiple * PARAMETERS


def test_adafactor_keeps_a_row_and_a_column() -> None:
    row = OPTIMIZERS["adafactor"]
    assert row.state_bytes(Weight("w", (768, 3072)), "float32") == [768 * 4, 3072 * 4]
    assert row.state_bytes(Weight("w", (8, 3, 5, 7)), "float32") == [8 * 3 * 5 * 4, 8 * 3 * 7 * 4]
    assert row.state_bytes(Weight("w", (768,)), "bfloat16") == [768 * 2]
    assert states("adafactor") < 0.01 * 4 * PARAMETERS


def test_eight_bits_cost_two_bytes_and_a_32nd_per_parameter() -> None:
    row = OPTIMIZERS["adamw-8bit"]
    assert row.state_bytes(Weight("w", (1024, 256)), "float32") == [2**18, 2**18, 2**12, 2**12]
    assert sum(row.state_bytes(Weight("w", (2**20,)), "bfloat16")) / 2**20 == 2.03125
    # Small tensors stay in float32 whatever the weights are; one block more for a rest.
    assert row.state_bytes(Weight("w", (4095,)), "bfloat16") == [16380, 16380]
    assert row.state_bytes(Weight("w", (4097,)), "float32") == [4097, 4097, 68, 68]


def test_foreach_adam_holds_one_list_and_before_2_1_two() -> None:
    # 20 and 24 bytes a parameter with weights, gradients and states; Lightning's FSDP table shows the older.
    for name in ("adam", "adamw", "amsgrad"):
        assert total(OPTIMIZERS[name], GPT2, "foreach", (2, 1)) == 4 * PARAMETERS
        assert total(OPTIMIZERS[name], GPT2, "foreach", (2, 0)) == 8 * PARAMETERS
    assert total(OPTIMIZERS["amsgrad"], GPT2, "foreach", (1, 12)) == 12 * PARAMETERS
    assert total(OPTIMIZERS["adagrad"], GPT2, "foreach", OLD) == 12 * PARAMETERS


def test_for_loop_adam_holds_three_tensors_when_equal_ones_follow() -> None:
    row = OPTIMIZERS["adamw"]
    assert row.temporaries([(10,), (10,)], 4, "for-loop", NOW) == [
        ("of the weight before", 40), ("root of the second moment", 40), ("denominator", 40),
    ]  # fmt: skip
    assert total(row, [(10,)], "for-loop") == 80
    # What the weight before left behind may matter more than being the largest.
    assert total(row, [(10,), (9,), (2,)], "for-loop") == 40 + 2 * 36


def test_adafactor_keeps_the_first_groups_updates_while_it_makes_the_seconds() -> None:
    row = OPTIMIZERS["adafactor"]
    assert row.temporaries([(20, 30), (8,)], 4, "foreach", NOW) == [("update", 2400), ("update", 32)]
    assert row.temporaries([(8,), (20, 30)], 4, "foreach", NOW) == [
        ("update", 32), ("update", 2400), ("mean of the row factor", 4),
    ]  # fmt: skip


@pytest.mark.parametrize(("row", "kind"), ROWS, ids=lambda value: getattr(value, "name", value))
def test_nothing_to_update_needs_nothing(row: Optimizer, kind: str) -> None:
    assert row.temporaries([], 4, kind, NOW) == row.temporaries([], 4, kind, OLD) == []


@given(SHAPES, st.sampled_from(ROWS), st.sampled_from([NOW, OLD]))
def test_temporaries_halve_with_the_item_and_never_exceed_their_bound(
    shapes: list[tuple[int, ...]], case: tuple[Optimizer, str], version: tuple[int, int]
) -> None:
    row, kind = case
    full, half = (row.temporaries(shapes, size, kind, version) for size in (4, 2))
    if row.name not in PARTLY_FLOAT32:
        assert sum(size for _, size in full) == 2 * sum(size for _, size in half)
        assert [name for name, _ in full] == [name for name, _ in half]
    everything = 4 * sum(Weight("w", shape).numel for shape in shapes)
    largest = max((4 * Weight("w", shape).numel for shape in shapes), default=0)
    most = {"foreach": 4 * everything, "for-loop": 5 * largest, "fused": 0}[kind]
    if row.name == "lbfgs":
        most = 3 * everything
    if row.name.endswith("-ao"):
        most = 2 * largest
    assert sum(size for _, size in full) <= most


@given(SHAPES, st.sampled_from(ROWS), st.lists(st.integers(1, 50), min_size=1, max_size=3).map(tuple))
def test_one_more_weight_never_needs_less(
    shapes: list[tuple[int, ...]], case: tuple[Optimizer, str], more: tuple[int, ...]
) -> None:
    row, kind = case
    assert total(row, [*shapes, more], kind) >= total(row, shapes, kind)


@given(st.sampled_from(list(OPTIMIZERS.values())), st.lists(st.integers(1, 300), min_size=1, max_size=3).map(tuple))
def test_states_depend_on_the_dtype_alone_by_its_size(row: Optimizer, shape: tuple[int, ...]) -> None:
    full, half = (row.state_bytes(Weight("w", shape), dtype) for dtype in ("float32", "bfloat16"))
    if row.name.endswith("-ao"):
        assert sum(half) <= sum(full) <= 2 * sum(half)
    else:
        numbers = [4] * (2 * (row.name == "asgd"))
        assert full == (half if row.name in FLOAT32 else [*numbers, *(2 * size for size in half[len(numbers) :])])
    assert half == row.state_bytes(Weight("w", shape), "float16")
    assert DTYPE_BYTES["float16"] == 2


def test_torchao_keeps_codes_scales_and_a_table_for_each_moment() -> None:
    shape = Weight("w", (1024, 1024))
    assert OPTIMIZERS["adamw-8bit-ao"].state_bytes(shape, "float32") == [2**20, 2**14] * 2 + [1024] * 2
    assert OPTIMIZERS["adamw-4bit-ao"].state_bytes(shape, "float32") == [2**19, 2**15] * 2 + [64] * 2
    assert OPTIMIZERS["adamw-fp8-ao"].state_bytes(shape, "float32") == [2**20, 2**14] * 2
    # What does not divide into blocks stays as it is.
    assert OPTIMIZERS["adamw-8bit-ao"].state_bytes(Weight("w", (4097,)), "bfloat16") == [2 * 4097] * 2


def test_paged_states_are_on_the_host_but_for_small_ones() -> None:
    row = OPTIMIZERS["paged-adamw-8bit"]
    small, large = Weight("w", (99_999,)), Weight("w", (100_000,))
    assert row.state_bytes(small, "bfloat16") and not row.host_bytes(small, "bfloat16")
    assert not row.state_bytes(large, "bfloat16")
    assert row.host_bytes(large, "bfloat16") == 2 * 100_000 + 2 * 4 * 391


def test_lbfgs_keeps_a_hundred_steps() -> None:
    assert states("lbfgs") == 202 * 4 * PARAMETERS


def test_muon_has_one_moment_for_hidden_matrices_and_adamw_for_the_rest() -> None:
    rest = 50257 * 768 + 1024 * 768 + 2 * 768 + 12 * (4 * 768 + 2304 + 768 + 3072 + 768)
    weights = FAMILIES["gpt2"].weights(MODELS["gpt2"])
    kept = sum(sum(OPTIMIZERS["muon"].state_bytes(weight, "float32")) for weight in weights)
    assert kept == 4 * (PARAMETERS - rest) + 2 * 4 * rest


def test_decay_of_gradients_doubles_what_sgd_makes_and_leaves_adam_at_one_list() -> None:
    shapes = [(10, 10), (10,)]
    assert OPTIMIZERS["sgd-momentum"].temporaries(shapes, 4, "foreach", NOW) == []
    decayed = OPTIMIZERS["sgd-momentum"].temporaries(shapes, 4, "foreach", NOW, l2=True)
    assert decayed == [("decayed gradient", 400), ("decayed gradient", 40)]
    assert sum(size for _, size in OPTIMIZERS["adam"].temporaries(shapes, 4, "foreach", NOW, l2=True)) == 440
    assert sum(size for _, size in OPTIMIZERS["rmsprop"].temporaries(shapes, 4, "foreach", NOW, l2=True)) == 880
    assert OPTIMIZERS["sgd"].temporaries(shapes, 4, "fused", NOW, l2=True) == []
