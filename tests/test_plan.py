"""A Plan is sound once it exists, and survives JSON."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import plans
import pytest
from hypothesis import given
from hypothesis import strategies as st

from memcalc.errors import FileError, MemcalcError, PlanError, UnknownNameError
from memcalc.models import MODELS, Model
from memcalc.plan import PLAN_VERSION, Plan

GPT2 = Plan(model=MODELS["gpt2-tiny"], tokens=64, micro_batch=2)


@given(plans.plans())
def test_a_plan_survives_json(plan: Plan) -> None:
    assert Plan.from_json(plan.to_json()) == plan


@given(plans.plans())
def test_a_plan_is_hashable_and_equal_by_value(plan: Plan) -> None:
    again = dataclasses.replace(plan)
    assert again == plan
    assert hash(again) == hash(plan)
    assert plan.global_batch == plan.micro_batch * plan.accumulation * plan.data_parallel


def test_a_plan_survives_a_file(tmp_path: Path) -> None:
    GPT2.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == GPT2
    assert [path.name for path in tmp_path.iterdir()] == ["plan.json"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ranks": 0}, "ranks 0 must be at least 1"),
        ({"micro_batch": 0}, "micro batch 0 must be at least 1"),
        ({"micro_batch": -1}, "micro batch -1 must be at least 0"),
        ({"accumulation": 0}, "accumulation 0 must be at least 1"),
        ({"tokens": 129}, "129 tokens are more than the 128 positions of model 'gpt2-tiny'"),
        ({"tokens": 0}, "tokens 0: gpt2-tiny reads tokens"),
        ({"ranks": 2}, "strategy single runs on 1 rank, not 2"),
        ({"ranks": 3, "nodes": 2, "strategy": "ddp"}, "3 ranks do not divide over 2 nodes"),
        ({"reentrant": True}, "checkpointing is off"),
        (
            {"model": dataclasses.replace(GPT2.model, dropout=1.0)},
            "gpt2-tiny: dropout 1.0 must be at least 0 and below 1",
        ),
        ({"dropout": 1.0}, "dropout 1.0 must be at least 0 and below 1"),
        ({"dropout": float("nan")}, "dropout is nan, which is not a finite number"),
        ({"torch": "two"}, "torch version 'two' cannot be read"),
        ({"torch": "1.9"}, "older than 1.10"),
        ({"model": dataclasses.replace(GPT2.model, heads=5)}, "5 heads do not divide hidden 64"),
        ({"model": dataclasses.replace(GPT2.model, layers=0)}, "layers 0 must be at least 1"),
        ({"optimizer": "adafactor", "optimizer_kind": "fused"}, "adafactor has no fused form"),
    ],
)
def test_numbers_that_clash_are_refused_by_value(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        dataclasses.replace(GPT2, **changes)


@pytest.mark.parametrize(
    ("field", "value", "nearest"),
    [
        ("strategy", "fsdp-ful-shard", "fsdp-full-shard"),
        ("precision", "bf61", "bf16"),
        ("optimizer", "adam-w", "adamw"),
        ("optimizer_kind", "for-each", "foreach"),
        ("gpu", "a100-80", "a100-80gb"),
        ("attention", "flush", "flash"),
        ("device", "cudda", "cuda"),
    ],
)
def test_an_unknown_name_gets_the_nearest_one(field: str, value: str, nearest: str) -> None:
    with pytest.raises(UnknownNameError) as caught:
        dataclasses.replace(GPT2, **{field: value})
    assert caught.value.nearest == nearest


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty"),
        ("{", "is not valid JSON"),
        ("[]", "is not a memcalc plan"),
        ("{}", "is not a memcalc plan"),
        ('{"memcalc_plan": 1}', "model: expected an object, found None"),
        ('{"memcalc_plan": NaN}', "NaN is not a number JSON knows"),
        ('{"memcalc_plan": "1"}', "version '1'"),
        ("[" * 100_000, "is not valid JSON"),
    ],
)
def test_text_that_is_no_plan_is_refused(text: str, message: str) -> None:
    with pytest.raises(FileError, match=message):
        Plan.from_json(text)


def test_a_plan_of_a_newer_version_says_what_to_update() -> None:
    newer = json.loads(GPT2.to_json()) | {"memcalc_plan": PLAN_VERSION + 1}
    with pytest.raises(FileError, match="update memcalc"):
        Plan.from_json(json.dumps(newer))


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("ranks", "2", "ranks is '2', which is not a whole number"),
        ("ranks", 2.0, "ranks is 2.0, which is not a whole number"),
        ("ranks", True, "ranks is True, which is not a whole number"),
        ("ranks", 10**40, "which is more than 1e18"),
        ("reentrant", 1, "reentrant is 1, which is not true or false"),
        ("strategy", None, "strategy is None, which is not text"),
        ("stratgy", "ddp", "unknown key 'stratgy'; did you mean 'strategy'"),
    ],
)
def test_a_value_of_the_wrong_type_is_refused_by_name(key: str, value: object, message: str) -> None:
    with pytest.raises(FileError, match=message):
        Plan.from_json(json.dumps(json.loads(GPT2.to_json()) | {key: value}))


@given(plans.plans(), st.data())
def test_a_plan_with_one_value_changed_is_read_or_refused_in_one_line(plan: Plan, data: st.DataObject) -> None:
    fields = json.loads(plan.to_json())
    inside = fields["model"] if data.draw(st.booleans()) else fields
    key = data.draw(st.sampled_from(sorted(inside)))
    inside[key] = data.draw(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.lists(st.integers())
    )
    read = read_or_refused(json.dumps(fields))
    assert read is None or Plan.from_json(read.to_json()) == read


def read_or_refused(text: str) -> Plan | None:
    """The plan, or None where it is refused; the refusal shows on one line."""
    try:
        return Plan.from_json(text)
    except MemcalcError:
        return None


@pytest.mark.parametrize(
    ("field", "value"),
    [("micro_batch", 1.5), ("micro_batch", True), ("micro_batch", "1"), ("tokens", 10.5), ("ranks", 2.0),
     ("set_to_none", "x"), ("model", "gpt2"), ("torch", 2.13), ("checkpoint_every", 1.5), ("gpu", 3)],
)  # fmt: skip
def test_a_plan_that_exists_has_the_right_types(field: str, value: Any) -> None:
    with pytest.raises(PlanError, match=f"^{field.replace('_', ' ')} is "):
        dataclasses.replace(GPT2, **{field: value})


@pytest.mark.parametrize("field", ["layers", "features", "layer_bytes", "kv_heads", "parameters", "classes", "vocab"])
def test_no_number_of_a_model_is_negative(field: str) -> None:
    fields: dict[str, Any] = {"name": "m", "family": "size", "parameters": 10, field: -4}
    with pytest.raises(PlanError, match=f"{field} -4 must be at least 0"):
        Model(**fields)


@pytest.mark.parametrize("version", ["2.²", "٢.١", "2", "2.x", "", "2.1234"])
def test_odd_torch_versions_are_refused(version: str) -> None:
    with pytest.raises(PlanError, match="cannot be read"):
        dataclasses.replace(GPT2, torch=version)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [("gpt2-tiny", {"kv_heads": 2}, "has one for each"), ("gpt2-tiny", {"tied": False}, "token embedding itself"),
     ("moe-tiny", {"top_k": 9}, "but there are 4"), ("llama-tiny", {"hidden": 12}, "even width")],
)  # fmt: skip
def test_what_a_family_cannot_be_is_refused(name: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        Plan(model=dataclasses.replace(MODELS[name], **changes), tokens=8, micro_batch=1)


def test_paths_may_be_text(tmp_path: Path) -> None:
    path = str(tmp_path / "plan.json")
    GPT2.save(path)
    assert Plan.load(path) == GPT2
