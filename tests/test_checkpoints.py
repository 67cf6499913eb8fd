"""A checkpoint is read as it was written, or what is wrong with it is named."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memcalc.checkpoints import COMPLETE, INDEX, Marker, digest, read_marker
from memcalc.errors import FileError, PlanError
from memcalc.models import MODELS
from tests.launching import PLAN, marker

LOSSES = st.lists(st.none() | st.floats(allow_nan=False, allow_infinity=False), min_size=3, max_size=3)


def saved(folder: Path, **fields: object) -> tuple[Path, Marker]:
    """A checkpoint of three steps with two ranks' files of nine bytes."""
    path = folder / "checkpoints" / "step-3"
    path.mkdir(parents=True, exist_ok=True)
    for name in ("__0_0.distcp", "__1_0.distcp", INDEX):
        (path / name).write_bytes(b"123456789")
    files = {"__0_0.distcp": 9, "__1_0.distcp": 9}
    found = replace(marker(3), files=files, index=digest(path), **fields)  # type: ignore[arg-type]
    found.save(path)
    return path, found


@given(losses=LOSSES, scaler=st.dictionaries(st.text(max_size=5), st.floats(0, 1e30)))
def test_a_marker_is_read_back(
    tmp_path_factory: pytest.TempPathFactory, losses: list[float | None], scaler: dict[str, float]
) -> None:
    path, found = saved(tmp_path_factory.getbasetemp() / "marker", losses=losses, scaler=scaler)
    assert read_marker(path, PLAN) == found


def test_whatever_is_cut_off_is_named(tmp_path: Path) -> None:
    path, _ = saved(tmp_path)
    for file in sorted(path.iterdir()):
        whole = file.read_bytes()
        lengths = range(len(whole)) if len(whole) < 10 else range(0, len(whole) - 2, 97)  # its last byte ends a line
        for length in lengths:
            file.write_bytes(whole[:length])
            with pytest.raises(FileError, match=rf"{file.name}.*; remove {path}: the run has no other checkpoint"):
                read_marker(path, PLAN)
        file.write_bytes(whole)
    assert read_marker(path, PLAN).step == 3


def test_a_marker_names_files_of_its_own_folder_alone(tmp_path: Path) -> None:
    path, found = saved(tmp_path)
    (tmp_path / "other").write_bytes(b"123456789")
    replace(found, files={"../../other": 9}).save(path)
    with pytest.raises(FileError, match="other is missing"):
        read_marker(path, PLAN)


def test_a_checkpoint_of_another_job(tmp_path: Path) -> None:
    path, found = saved(tmp_path)
    for other in (replace(PLAN, model=MODELS["llama-tiny"]), replace(PLAN, optimizer="sgd")):
        with pytest.raises(PlanError, match="was saved by a run with another model or optimizer"):
            read_marker(path, other)
    replace(found, precision="fp32").save(path)
    with pytest.raises(PlanError, match="was saved by a run in fp32, not bf16; a resumed run keeps it"):
        read_marker(path, replace(PLAN, precision="bf16"))
    found.save(path)
    assert read_marker(path, replace(PLAN, precision="bf16")) == found  # an older one does not say
    (path / COMPLETE).write_text((path / COMPLETE).read_text().replace('"gpt2-tiny"', "5"))
    with pytest.raises(FileError, match="name is 5, which is not text; remove"):
        read_marker(path, PLAN)
    assert found.optimizer == PLAN.optimizer
