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


def test_all_that_were_asked_for_are_there() -> None:
    assert set(OPTIMIZERS) == {
        "sgd", "sgd-momentum", "adam", "adamw", "amsgrad", "rmsprop", "adagrad", "adafactor", "lion", "adamw-8bit",
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
    assert sum(size for _, size in full) == 2 * sum(size for _, size in half)
    assert [name for name, _ in full] == [name for name, _ in half]
    everything = 4 * sum(Weight("w", shape).numel for shape in shapes)
    largest = max((4 * Weight("w", shape).numel for shape in shapes), default=0)
    assert sum(size for _, size in full) <= {"foreach": 4 * everything, "for-loop": 5 * largest, "fused": 0}[kind]


@given(SHAPES, st.sampled_from(ROWS), st.lists(st.integers(1, 50), min_size=1, max_size=3).map(tuple))
def test_one_more_weight_never_needs_less(
    shapes: list[tuple[int, ...]], case: tuple[Optimizer, str], more: tuple[int, ...]
) -> None:
    row, kind = case
    assert total(row, [*shapes, more], kind) >= total(row, shapes, kind)


@given(st.sampled_from(list(OPTIMIZERS.values())), st.lists(st.integers(1, 300), min_size=1, max_size=3).map(tuple))
def test_states_depend_on_the_dtype_alone_by_its_size(row: Optimizer, shape: tuple[int, ...]) -> None:
    full, half = (row.state_bytes(Weight("w", shape), dtype) for dtype in ("float32", "bfloat16"))
    assert full == (half if row.name == "adamw-8bit" else [2 * size for size in half])
    assert half == row.state_bytes(Weight("w", shape), "float16")
    assert DTYPE_BYTES["float16"] == 2
