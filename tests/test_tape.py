"""The miniature autograd: lifetimes, sums of gradients, shared weights, recomputation."""

from __future__ import annotations

import pytest

from memcalc import ops
from memcalc.errors import PlanError
from memcalc.graph import Tensor
from memcalc.models import Weight
from memcalc.recorder import Storage
from memcalc.tape import Tape

MATRIX = Weight("layer.weight", (4, 4))


def make_tape(*weights: Weight, weight_dtype: str = "float32", compute_dtype: str = "float32") -> Tape:
    return Tape(weights or (MATRIX,), weight_dtype=weight_dtype, compute_dtype=compute_dtype, device="cpu")


def source(t: Tape, *shape: int) -> Tensor:
    return Tensor(t.allocate("x", shape, "float32", "inputs"), shape, "float32", None)


def events(t: Tape) -> list[tuple[str, int]]:
    """Names and signs in order."""
    found = t.skeleton(1)
    return [(found.names[ident], int(sign)) for ident, sign in zip(found.ident, found.sign, strict=True)]


def alive(t: Tape) -> list[str]:
    count: dict[str, int] = {}
    for name, sign in events(t):
        count[name] = count.get(name, 0) + sign
    return sorted(name for name, number in count.items() for _ in range(number))


def test_a_storage_is_freed_with_its_last_reference() -> None:
    t = make_tape()
    x = source(t, 4)
    also = Tensor(x.storage, (2, 2), "float32", None)
    del x
    assert alive(t) == ["x"]
    del also
    assert alive(t) == []


def test_what_a_node_saved_outlives_the_variable_and_goes_in_backward() -> None:
    t = make_tape()
    y = ops.pointwise(t, ops.linear(t, source(t, 4), "layer"), "act")
    assert alive(t) == ["act output", "layer output", "x"]
    t.backward(y)
    del y
    assert alive(t) == []


def test_both_sides_of_an_addition_get_the_very_same_gradient() -> None:
    t = make_tape()
    x = ops.linear(t, source(t, 4), "layer")
    y = ops.add(t, x, x, "sum")
    del x
    t.backward(y)
    # Two gradients arrive at one place: the first is held by the second as well, so they are added anew.
    assert ("sum of gradients", 1) in events(t)


def test_a_gradient_nobody_else_holds_is_added_to_in_place() -> None:
    t = make_tape()
    x = ops.linear(t, source(t, 4), "layer")
    y = ops.add(t, ops.pointwise(t, x, "a"), ops.pointwise(t, x, "b"), "sum")
    del x
    t.backward(y)
    assert "sum of gradients" not in dict(events(t))


def test_a_shared_weight_is_handed_over_once_with_all_its_parts() -> None:
    t = make_tape(MATRIX)
    got: list[tuple[str, Storage]] = []
    t.gradient = lambda weight, grad: got.append((weight.name, grad))
    x = ops.linear(t, source(t, 4), "layer")
    y = ops.linear(t, x, "again", weight="layer.weight")
    del x
    t.backward(y)
    assert [name for name, _ in got] == ["layer.weight"]
    # Two parts and the sum of them exist at one time; the sum is what is kept.
    assert [name for name, sign in events(t) if sign > 0].count("layer.weight gradient") == 3
    assert alive(t).count("layer.weight gradient") == 1


def test_a_checkpoint_keeps_its_input_only_and_stops_recomputing_early() -> None:
    t = make_tape(MATRIX)
    x = ops.linear(t, source(t, 4), "layer")

    def body(x: Tensor) -> Tensor:
        return ops.linear(t, ops.pointwise(t, x, "act"), "inner", weight="layer.weight")

    y = t.checkpoint(body, x, reentrant=False)
    del x
    assert alive(t) == ["inner output", "layer output", "x"]
    before = len(events(t))
    t.backward(y)
    made = [name for name, sign in events(t)[before:] if sign > 0]
    # The activation function runs again; the last product saves its input and is not run.
    assert made.count("act output") == 1
    assert "inner output" not in made


def test_a_reentrant_checkpoint_runs_to_its_end_again() -> None:
    t = make_tape(MATRIX)
    x = ops.linear(t, source(t, 4), "layer")
    y = t.checkpoint(lambda x: ops.linear(t, x, "inner", weight="layer.weight"), x, reentrant=True)
    del x
    before = len(events(t))
    t.backward(y)
    assert [name for name, sign in events(t)[before:] if sign > 0].count("inner output") == 1


def test_autocast_copies_a_weight_once_and_gives_its_gradient_back_in_float32() -> None:
    t = make_tape(MATRIX, compute_dtype="bfloat16")
    got: list[Storage] = []
    t.gradient = lambda weight, grad: got.append(grad)
    with t.casts():
        x = ops.linear(t, source(t, 4), "layer")
        y = ops.linear(t, x, "again", weight="layer.weight")
        del x
    names = [name for name, sign in events(t) if sign > 0]
    assert names.count("layer.weight autocast copy") == 1
    t.backward(y)
    found = t.skeleton(1)
    assert [int(found.fixed[grad.ident]) for grad in got] == [4 * 4 * 4]


def test_sizes_are_affine_in_the_micro_batch() -> None:
    t = make_tape()
    kept = [
        t.allocate("a", (3,), "float32", "activations"),
        t.allocate("b", (5,), "float32", "parameters", batched=False),
    ]
    found = t.skeleton(512)
    assert found.sizes(1).tolist() == [512, 512]
    assert found.sizes(100).tolist() == [1536, 512]
    assert len(kept) == 2


def test_absurd_sizes_are_refused_and_do_not_wrap_around() -> None:
    t = make_tape()
    kept = t.allocate("a", (2**62, 4), "float32", "activations")
    with pytest.raises(PlanError):
        t.skeleton(512)
    assert kept.ident == 0
