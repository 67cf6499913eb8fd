"""Measurements survive their files, and damaged files are named in one line."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from memcalc.errors import FileError
from memcalc.measurement import Measurement, RankMeasurement
from memcalc.models import MODELS
from memcalc.plan import Plan
from memcalc.timeline import Timeline

PLAN = Plan(model=MODELS["gpt2-tiny"], tokens=8, micro_batch=1, ranks=2, strategy="ddp", device="cpu")


def timeline() -> Timeline:
    return Timeline(
        names=("w", "a"), ident=np.array([0, 1, 1]), category=np.array([0, 3, 3], np.int8),
        moment=np.array([1, 2, 4], np.int8), delta=np.array([100, 50, -50]),
    )  # fmt: skip


def rank(number: int = 0, **changes: object) -> RankMeasurement:
    values: dict[str, object] = {
        "rank": number, "instrument": "a scale", "moment": "forward", "allocated_peak": 150,
        "by_moment": {"start": 100, "forward": 150}, "parameters": 100, "gradients": 100, "optimizer": 200,
    }  # fmt: skip
    return RankMeasurement(**values | changes)  # type: ignore[arg-type]


def record(**changes: object) -> Measurement:
    values: dict[str, object] = {
        "plan": PLAN, "status": "done", "device": "cpu", "versions": {"torch": "2.13.0"}, "losses": [2.5, float("nan")],
    }  # fmt: skip
    return Measurement(**values | changes)  # type: ignore[arg-type]


def test_a_rank_survives_json() -> None:
    before = rank(timeline=timeline(), reserved_peak=512, init_peak=7)
    after = RankMeasurement.from_json(before.to_json())
    assert after.timeline is not None and before.timeline is not None
    for field in fields(Timeline):
        assert np.array_equal(getattr(after.timeline, field.name), getattr(before.timeline, field.name))
        assert getattr(after.timeline, field.name).__class__ is getattr(before.timeline, field.name).__class__
    assert after.timeline.peak() == before.timeline.peak()
    rest = [field.name for field in fields(RankMeasurement) if field.name != "timeline"]
    assert [getattr(after, name) for name in rest] == [getattr(before, name) for name in rest]


def test_a_record_survives_json_and_nan_becomes_null() -> None:
    after = Measurement.from_json(record(tokens_per_second=2.0).to_json())
    assert (after.plan, after.losses, after.tokens_per_second, after.ranks) == (PLAN, [2.5, None], 2.0, ())


def filled(folder: Path) -> Path:
    (folder / "measured").mkdir()
    record().save(folder / "run.json")
    for number in (1, 0):
        rank(number, allocated_peak=150 + number).save(folder / "measured" / f"rank-{number}.json")
    return folder


def test_load_reads_all_ranks_in_order(tmp_path: Path) -> None:
    assert [found.allocated_peak for found in Measurement.load(filled(tmp_path)).ranks] == [150, 151]


def test_load_says_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(FileError, match="holds no run"):
        Measurement.load(tmp_path)
    filled(tmp_path)
    (tmp_path / "measured" / "rank-1.json").unlink()
    with pytest.raises(FileError, match="lacks rank 1 of 2"):
        Measurement.load(tmp_path)


CHANGES: dict[str, tuple[dict[str, object], str]] = {
    "version": ({"memcalc_measurement": 2}, "is of version 2; this memcalc reads version 1"),
    "moment": ({"moment": "forwards"}, "did you mean 'forward'"),
    "by_moment": ({"by_moment": {"nap": 1}}, "unknown moment 'nap'"),
    "negative": ({"parameters": -1}, "parameters -1 is below 0"),
    "text": ({"allocated_peak": "many"}, "allocated_peak is 'many'"),
    "float": ({"allocated_peak": 1.5}, "allocated_peak is 1.5"),
    "bool": ({"rank": True}, "rank is True"),
    "unknown": ({"colour": 1}, "colour"),
    "timeline": ({"timeline": {"names": ["a"]}}, "timeline does not fit together"),
    "index": (
        {"timeline": {"names": ["a"], "ident": [1], "category": [0], "moment": [0], "delta": [1]}},
        "does not fit",
    ),
    "lengths": (
        {"timeline": {"names": ["a"], "ident": [0], "category": [0], "moment": [0], "delta": [1, 2]}},
        "does not fit",
    ),
    "huge": (
        {"timeline": {"names": ["a"], "ident": [0], "category": [0], "moment": [0], "delta": [10**30]}},
        "does not fit",
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_damaged_rank_is_named(tmp_path: Path, name: str) -> None:
    change, message = CHANGES[name]
    path = tmp_path / "rank-0.json"
    path.write_text(json.dumps(json.loads(rank().to_json()) | change))
    with pytest.raises(FileError) as caught:
        RankMeasurement.from_json(path, str(path))
    assert message in str(caught.value) and str(path) in str(caught.value) and "\n" not in str(caught.value)


def test_a_missing_field_is_named() -> None:
    data = json.loads(rank().to_json())
    del data["gradients"]
    with pytest.raises(FileError, match="gradients"):
        RankMeasurement.from_json(json.dumps(data))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["names", "ident", "delta", "x"]), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(key=st.sampled_from([field.name for field in fields(RankMeasurement)]), value=JSON)
def test_any_value_is_read_back_or_refused(key: str, value: object) -> None:
    text = json.dumps(json.loads(rank().to_json()) | {key: value})
    read = refused = None
    try:
        read = RankMeasurement.from_json(text)
    except FileError as error:
        refused = str(error)
    if read is None:
        assert refused and "\n" not in refused
    else:
        assert RankMeasurement.from_json(read.to_json()).to_json() == read.to_json()


@given(
    key=st.sampled_from(["plan", "status", "device", "versions", "losses", "evaluation_loss", "tokens_per_second"]),
    value=JSON,
)
def test_any_record_is_read_back_or_refused(key: str, value: object) -> None:
    text = json.dumps(json.loads(record().to_json()) | {key: value})
    read = refused = None
    try:
        read = Measurement.from_json(text)
    except FileError as error:
        refused = str(error)
    if read is None:
        assert refused and "\n" not in refused
    else:
        assert Measurement.from_json(read.to_json()).to_json() == read.to_json()
