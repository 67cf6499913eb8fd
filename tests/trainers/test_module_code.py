"""Modules of one's own: what is counted, what misbehaving code comes to, and which blocks are found."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from memcalc import data
from memcalc.errors import InputError, MemcalcError
from memcalc.models import Model
from memcalc.plan import Plan
from trainers import module
from trainers.blocks import unit_names
from trainers.factories import CodeError, build_for_real, find
from trainers.models import build, materialise, units
from trainers.module_batches import called_with, zeros

OWN = Path(__file__).parents[1] / "own_modules.py"


def described(name: str, *, sample: str = "", wrap: str = "", shape: tuple[int, ...] = (), tokens: int = 0) -> Model:
    return module.describe(
        f"{OWN}:{name}", sample=f"{OWN}:{sample}" if sample else "", wrap=wrap, shape=shape, tokens=tokens
    )


def numel(model: Model, *, trained: bool = False) -> int:
    return sum(weight.numel for weight in model.module.weights if weight.trainable or not trained)


def test_a_stack_is_counted_and_its_blocks_are_found() -> None:
    model = described("Stack", shape=(12,))
    block = 2 * 32 + 32 * 128 + 128 + 128 * 32 + 32
    assert numel(model) == 12 * 32 + 32 + 3 * block + 32 * 10 + 10
    assert list(dict.fromkeys(w.group for w in model.module.weights)) == ["root", *(f"layers.{i}" for i in range(3))]
    assert (model.layers, model.features, model.classes, model.module.loss) == (3, 12, 10, "cross-entropy")
    assert Plan.from_json((plan := Plan(model=model, micro_batch=2)).to_json()) == plan


def test_tied_shared_and_frozen_weights() -> None:
    model = described("Tied", tokens=8)
    assert numel(model) == 300 * 16 + 2 * (16 * 16 + 16)
    assert numel(model, trained=True) == 300 * 16 + 16 * 16 + 16
    assert (model.family, model.vocab, model.layers) == ("token-module", 300, 1)


def test_ties_outlive_meta_and_memory() -> None:
    plan = Plan(model=described("Tied", tokens=8), tokens=8, micro_batch=1, device="cpu", optimizer_kind="for-loop")
    made = build(plan)
    assert all(parameter.is_meta for parameter in made.parameters())
    materialise(made, plan, torch.device("cpu"), seed=3)
    assert made.head.weight is made.embedding.weight
    real = build_for_real(plan.model.module.factory, seed=3)
    assert all(torch.equal(a, b) for a, b in zip(made.parameters(), real.parameters(), strict=True))


def test_buffers_and_their_values() -> None:
    model = described("Convolutions", shape=(3, 9, 9))
    assert [(b.name, b.shape, b.dtype) for b in model.module.buffers[:3]] == [
        ("first.1.running_mean", (8,), ""), ("first.1.running_var", (8,), ""), ("first.1.num_batches_tracked", (), "int64"),
    ]  # fmt: skip
    plan = Plan(model=model, micro_batch=1, device="cpu", optimizer_kind="for-loop")
    made = build(plan)
    materialise(made, plan, torch.device("cpu"), seed=0)
    assert torch.equal(made.get_buffer("first.1.running_var"), torch.ones(8))
    assert "--wrap CLASS" in model.notes[0] and "Sequential (2)" in model.notes[0]


def test_a_layer_used_a_hundred_times_is_one_layer() -> None:
    assert numel(described("Recurrent", shape=(8,))) == 24 * 16 + 16


def test_a_module_that_cannot_be_built_on_meta_is_built_for_real() -> None:
    model = described("not_on_meta", shape=(12,))
    assert model.layers == 2
    assert build(Plan(model=model, micro_batch=1)).enter.weight.is_meta


def test_weights_of_other_dtypes_keep_them() -> None:
    weights = described("half", shape=(4,)).module.weights
    assert [(weight.dtype, weight.trainable) for weight in weights] == [("bfloat16", False)] * 2 + [("", True)] * 2


@pytest.mark.parametrize(
    ("name", "sample", "loss", "features"),
    [("Stack", "samples", "cross-entropy", 12), ("Losing", "losing_samples", "own", 48)],
)
def test_samples_are_made_by_a_callable(name: str, sample: str, loss: str, features: int) -> None:
    model = described(name, sample=sample)
    assert (model.module.loss, model.features) == (loss, features)


@pytest.mark.parametrize(("count", "message"), [("n * 3", r"gave tensors of \(6, 12\)"), ("1", r"\(1, 12\)")])
def test_a_sample_of_another_size_is_refused(count: str, message: str, tmp_path: Path) -> None:
    """A batch that takes less would make a false promise."""
    (tmp_path / "wrong.py").write_text(f"import torch\ndef batch(n): return torch.zeros({count}, 12)\n")
    with pytest.raises(InputError, match=f"wrong.py:batch was asked for 2 samples and {'.*' + message}"):
        module.describe(f"{OWN}:Stack", sample=f"{tmp_path}/wrong.py:batch", wrap="", shape=(), tokens=0)


def test_samples_are_in_the_dtype_of_the_weights() -> None:
    plan = Plan(model=described("Stack", sample="samples"), micro_batch=2, precision="bf16")
    inputs, targets = zeros(plan, 2, torch.device("cpu"))
    assert (inputs["x"].dtype, inputs["x"].shape, targets.dtype) == (torch.bfloat16, (2, 12), torch.int64)


def test_data_in_the_shape_of_a_module_and_without_classes(tmp_path: Path) -> None:
    plan = Plan(model=described("Losing", shape=(48,)), micro_batch=2)
    inputs, targets = data.load(plan, None).take(np.arange(3))
    assert (inputs.shape, targets.tolist()) == ((3, 48), [0, 0, 0])
    np.save(tmp_path / "images.npy", np.arange(4 * 81 * 3, dtype=np.uint8).reshape(4, 9, 9, 3))
    np.save(tmp_path / "labels.npy", np.array([0, 1, 2, 4]))
    pictures = Plan(model=described("Convolutions", shape=(3, 9, 9)), micro_batch=2)
    flat, labels = data.load(pictures, tmp_path).take(np.arange(4))
    made, _ = called_with(pictures, flat, labels)
    first = int(np.flatnonzero(labels == 0)[0])  # colours are last in the file and first in the module
    assert made.shape == (4, 3, 9, 9)
    assert np.allclose(made[first, :, 0, 0] * 255, [0, 1, 2])


def test_without_inputs_only_weights_are_counted() -> None:
    model = described("Stack")
    assert "activations are not counted: give --input-shape, --seq-len or --sample" in model.notes
    Plan(model=model)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("raises", "raises failed: ValueError: what the author said$"),
        ("exits", r"exits failed: it called exit\(3\)$"),
        ("nothing", "nothing returned None, not an nn.Module$"),
        ("a_dict", "a_dict returned an object of type dict, not an nn.Module$"),
        ("frozen", r"frozen has no weight that is trained \(2 are frozen\)$"),
        ("lazy", "the shape of weight is known only after a forward pass"),
        ("Stacks", "unknown name in .*own_modules.py 'Stacks'; did you mean 'Stack'"),
        ("number", "number is an object of type int, which cannot be called"),
        ("made_already", "made_already is a module already; name a function that returns one$"),
        ("Block", "Block failed: TypeError: .*missing 1 required positional argument: 'width'"),
    ],
)
def test_code_that_misbehaves_is_one_line(name: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(MemcalcError, match=message) as caught:
        described(name, shape=(12,))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "tests.own_module:Stack",
            "neither in .* nor installed: unknown module 'own_module'; did you mean 'own_modules'",
        ),
        ("test.own_modules:Stack", "module test.own_modules is neither in"),
        (f"{OWN.parent}/own_module.py:Stack", "does not exist; did you mean 'own_modules.py'"),
    ],
)
def test_names_that_lead_nowhere(name: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(OWN.parents[1])
    with pytest.raises(MemcalcError, match=message):
        find(name)


def test_a_forward_pass_that_no_sizes_can_follow_is_said() -> None:
    note = described("Picking", shape=(12,)).notes[-1]
    assert note.startswith("its forward pass cannot be followed by sizes alone (") and "\n" not in note


def test_a_forward_pass_that_fails_on_numbers_too_is_the_author_s_error() -> None:
    with pytest.raises(CodeError, match=r"forward of .*own_modules.py:Stack raised RuntimeError: mat1 and mat2"):
        described("Stack", shape=(5,))


class Split(nn.Module):
    _no_split_modules = ["Linear"]

    def __init__(self) -> None:
        super().__init__()
        self.outer = nn.ModuleList([nn.Sequential(nn.Linear(2, 2), nn.ModuleList([nn.Conv1d(2, 2, 1)]))])


def test_blocks_by_their_authors_word_by_lists_and_by_class() -> None:
    assert unit_names(Split()) == ["outer.0.0"]
    assert unit_names(nn.Sequential(Split().outer)) == ["0.0"]  # the outermost list, and nothing in it
    assert unit_names(Split(), "Conv1d, Linear") == ["outer.0.0", "outer.0.1.0"]
    assert unit_names(nn.Linear(2, 2)) == []


def test_trainers_wrap_the_units_of_the_plan() -> None:
    plan = Plan(model=described("Convolutions", shape=(3, 9, 9), wrap="Sequential"), micro_batch=1)
    assert [type(unit).__name__ for unit in units(build(plan), plan)] == ["Sequential"] * 2
    assert {weight.group for weight in plan.weights} == {"root", "self.first", "self.second"}


def test_a_module_that_has_changed_since_its_plan_is_refused() -> None:
    model = described("Stack", shape=(12,))
    other = model.module.factory.replace(":Stack", ":not_on_meta")
    changed = dataclasses.replace(model, module=dataclasses.replace(model.module, factory=other))
    with pytest.raises(
        InputError, match="is not the module of the plan any more: layers.2.norm.weight is missing, in the"
    ):
        build(Plan(model=changed, micro_batch=1))
