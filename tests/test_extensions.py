"""Locks of builds that were killed: found, told from those that somebody holds, and named before a run would hang."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from memcalc import doctor_system, extensions
from memcalc.errors import FileError
from memcalc.models import MODELS
from memcalc.plan import Plan
from memcalc.runnable import require_engine, require_unlocked

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
    with pytest.raises(FileError, match=f"left a lock on which deepspeed-2 would wait for ever: rm {lock} ") as caught:
        require_unlocked(ZERO)
    assert caught.value.exit_code == 2
    require_engine(ZERO)
    for other in (replace(ZERO, strategy="ddp", precision="fp32"), replace(ZERO, device="cuda")):
        require_unlocked(other)  # which build nothing of the kind
    lock.unlink()
    require_unlocked(ZERO)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_rank_that_is_stopped_while_it_builds_leaves_no_lock(lock: Path, number: signal.Signals) -> None:
    other, mine = lock, lock.parents[1] / "async_io" / "lock"
    mine.parent.mkdir()
    lines = "import os, sys, time; from trainers.process import Signals; Signals(); os.open(sys.argv[1], os.O_CREAT | os.O_EXCL)"
    rank = subprocess.Popen(
        [sys.executable, "-c", f"{lines}; print(flush=True); time.sleep(60)", str(mine)], stdout=subprocess.PIPE
    )
    assert rank.stdout is not None
    rank.stdout.readline()  # as torch's FileBaton holds it
    assert mine.exists()
    rank.send_signal(number)
    assert rank.wait(30) == 128 + number
    rank.stdout.close()
    assert other.exists() and not mine.exists()


def test_doctor_reports_them_with_the_cure(lock: Path) -> None:
    (found,) = doctor_system.left_locks(os.environ, Path("/"))
    assert (found.what, found.status) == ("locks of extensions", "warning")
    assert found.found == "1 left by builds that were killed: deepspeed_shm_comm"
    assert f"rm {lock} " in found.cure
    lock.unlink()
    assert not list(doctor_system.left_locks(os.environ, Path("/")))
