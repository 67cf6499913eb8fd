"""Locks of builds that were killed: found, told from those that somebody holds, and named before a run would hang."""

from __future__ import annotations

import os
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from memcalc import doctor_system, extensions
from memcalc.errors import RunError
from memcalc.models import MODELS
from memcalc.plan import Plan
from memcalc.runnable import require_engine

ZERO = Plan(
    model=MODELS["gpt2-tiny"], tokens=16, micro_batch=2, strategy="deepspeed-2", ranks=2, precision="bf16-master", device="cpu"
)  # fmt: skip
HERE = f"py{sys.version_info.major}{sys.version_info.minor}_cpu"


@pytest.fixture
def lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The lock of DeepSpeed's communication for this Python, as a killed build leaves it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("TORCH_EXTENSIONS_DIR", raising=False)
    path = tmp_path / "torch_extensions" / HERE / "deepspeed_shm_comm" / "lock"
    path.parent.mkdir(parents=True)
    path.touch()
    return path


def test_a_lock_that_nobody_holds_is_left_behind(lock: Path) -> None:
    assert extensions.stale() == extensions.blocking() == [lock]
    held = os.open(lock, os.O_RDONLY)  # as torch's FileBaton does while it builds
    try:
        assert extensions.stale() == []
    finally:
        os.close(held)
    lock.unlink()
    assert extensions.stale() == []


def test_without_proc_only_an_old_lock_counts(lock: Path, tmp_path: Path) -> None:
    assert extensions.stale(root=tmp_path) == []
    assert extensions.stale(root=tmp_path, now=time.time() + 3600) == [lock]


def test_another_pythons_lock_blocks_nothing_here(lock: Path) -> None:
    other = lock.parents[2] / "py27_cpu" / "deepspeed_shm_comm" / "lock"
    mine = lock.parents[1] / "somebodys_own" / "lock"
    for path in (other, mine):
        path.parent.mkdir(parents=True)
        path.touch()
    assert set(extensions.stale()) == {lock, other, mine}
    assert extensions.blocking() == [lock]


def test_a_folder_of_ones_own(tmp_path: Path) -> None:
    path = tmp_path / "deepspeed_shm_comm" / "lock"
    path.parent.mkdir()
    path.touch()
    assert extensions.blocking({"TORCH_EXTENSIONS_DIR": str(tmp_path)}) == [path]


def test_a_launch_says_so_in_place_of_hanging(lock: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    monkeypatch.setenv("CXX", sys.executable)
    with pytest.raises(RunError, match=f"left a lock on which deepspeed-2 would wait for ever: rm {lock} "):
        require_engine(ZERO)
    for other in (replace(ZERO, strategy="ddp", precision="fp32"), replace(ZERO, device="cuda")):
        require_engine(other)  # which build nothing of the kind
    lock.unlink()
    require_engine(ZERO)


def test_doctor_reports_them_with_the_cure(lock: Path) -> None:
    (found,) = doctor_system.left_locks(os.environ, Path("/"))
    assert (found.what, found.status) == ("locks of extensions", "warning")
    assert found.found == "1 left by builds that were killed: deepspeed_shm_comm"
    assert f"rm {lock} " in found.cure
    lock.unlink()
    assert not list(doctor_system.left_locks(os.environ, Path("/")))
