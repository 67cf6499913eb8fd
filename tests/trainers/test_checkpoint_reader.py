"""A checkpoint's files run no code, whoever wrote them."""

from __future__ import annotations

import os
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import load, save
from torch.distributed.checkpoint.api import CheckpointException

from memcalc.checkpoints import digest
from memcalc.errors import FileError
from tests.launching import PLAN, marker
from trainers import checkpoint
from trainers.backends import Prepared
from trainers.checkpoint_reader import Planner, Reader


class Trap:
    """Makes a folder when it is unpickled."""

    def __init__(self, where: Path) -> None:
        self.where = where

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.where),)


def state(step: Any = 3) -> dict[str, Any]:
    return {"model": {"w": torch.arange(6.0).reshape(2, 3), "h": torch.ones(2, dtype=torch.bfloat16)}, "step": step}


def read(path: Path, into: dict[str, Any]) -> dict[str, Any]:
    load(into, storage_reader=Reader(path), planner=Planner(), no_dist=True)
    return into


def test_tensors_and_numbers_are_read_as_they_were_saved(tmp_path: Path) -> None:
    save(state(), checkpoint_id=tmp_path, no_dist=True)
    empty = {"model": {name: torch.zeros_like(value) for name, value in state()["model"].items()}, "step": 0}
    found = read(tmp_path, empty)
    assert found["step"] == 3
    assert all(torch.equal(found["model"][name], value) for name, value in state()["model"].items())


@pytest.mark.parametrize("damage", ["code", "torn", "empty", "no list"])
def test_a_list_that_is_none_is_refused_and_runs_nothing(tmp_path: Path, damage: str) -> None:
    save(state(), checkpoint_id=tmp_path / "saved", no_dist=True)
    index, trap = tmp_path / "saved" / ".metadata", tmp_path / "trapped"
    texts = {
        "code": pickle.dumps(Trap(trap)),
        "torn": index.read_bytes()[:-40],
        "empty": b"",
        "no list": pickle.dumps([1]),
    }
    index.write_bytes(texts[damage])
    with pytest.raises((FileError, CheckpointException), match=r"\.metadata is no list of tensors"):
        read(tmp_path / "saved", state())
    assert not trap.exists()


def test_what_is_no_tensor_runs_nothing(tmp_path: Path) -> None:
    trap = tmp_path / "trapped"
    save(state(step=Trap(trap)), checkpoint_id=tmp_path / "saved", no_dist=True)
    with pytest.raises((CheckpointException, pickle.UnpicklingError), match="mkdir|Weights only"):
        read(tmp_path / "saved", state())
    assert not trap.exists()


def test_a_damaged_part_comes_with_its_cure(tmp_path: Path) -> None:
    path = tmp_path / "checkpoints" / "step-3"
    save(state(), checkpoint_id=path, no_dist=True)
    replace(marker(3), index=digest(path)).save(path)
    (part,) = path.glob("*.distcp")
    part.write_bytes(b"\xff" * 64 + part.read_bytes()[64:])  # as long as it was
    layer = torch.nn.Linear(1, 1)
    update = torch.optim.SGD(layer.parameters())
    prepared = Prepared(model=layer, optimizer=update, states=update, state=state, wake=lambda: None)
    with pytest.raises(FileError, match=rf"{path} cannot be read: .*; remove {path}: the run has no other checkpoint"):
        checkpoint.load(path, prepared, PLAN)
