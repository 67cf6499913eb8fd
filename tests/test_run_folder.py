"""A run's folder: when it may be used, and what it keeps."""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from memcalc.errors import FileError, RunError
from memcalc.launch import check, launch
from memcalc.measurement import Measurement
from memcalc.plan import Plan
from memcalc.run_folder import check_folder, held, sweep
from memcalc.training import Training
from tests.launching import PLAN, checkpoint, refused, run, write

pytestmark = pytest.mark.usefixtures("machine")
ROOT = Path(__file__).resolve().parent.parent


def test_a_folder_with_another_run(tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text("{}")
    refused(PLAN, tmp_path, "is not empty; give another folder$", FileError)
    checkpoint(tmp_path, 5)
    refused(
        PLAN,
        tmp_path,
        "is not empty; give another folder, or continue the run in it with memcalc launch --resume$",
        FileError,
    )


FAILED = (
    "lock",
    "plan.json",
    "training.json",
    "next-plan.json",
    "logs/rank-0.log",
    "logs/torchrun.log",
    "errors/rank-0.json",
)


def test_the_folder_of_a_run_that_made_no_step_is_used_again(tmp_path: Path, stub: Callable[[str], None]) -> None:
    write(tmp_path, FAILED)
    stub("print('step 1')")
    lines: list[str] = []
    run(PLAN, tmp_path, lines)
    assert lines[-1] == "step 1"
    assert not any("empty" in line for line in lines)
    assert Plan.load(tmp_path / "plan.json") == PLAN
    assert (tmp_path / "logs" / "torchrun.log").read_text() == ""


@pytest.mark.parametrize(
    "name",
    ["run.json", "measured/rank-0.json", "checkpoints/step-1/x", "weights/model.safetensors", "notes.txt", "logs/mine.log",
     "errors/mine.txt", "logs.txt"],
)  # fmt: skip
def test_nothing_else_is_overwritten(tmp_path: Path, name: str) -> None:
    write(tmp_path, (*FAILED, name))
    refused(PLAN, tmp_path, "is not empty; give another folder$", FileError)


@pytest.mark.parametrize(
    ("code", "before", "after"), [(3, "running", "failed"), (3, "preempted", "preempted"), (0, "done", "done")]
)
def test_the_record_says_how_a_run_ended(
    tmp_path: Path, stub: Callable[[str], None], code: int, before: str, after: str
) -> None:
    record = Measurement(plan=PLAN, status=before, device="cpu", versions={}, losses=[1.0])
    record.save(tmp_path / "record.json")
    copied = f"shutil.copy({str(tmp_path / 'record.json')!r}, sys.argv[2] + '/run.json')"
    stub(f"import shutil, sys; {copied}; print('step 1'); sys.exit({code})")
    with contextlib.suppress(RunError):
        run(PLAN, tmp_path / "run", [])
    assert Measurement.from_json(tmp_path / "run" / "run.json").status == after


def test_a_resumed_run_with_other_steps_is_warned_of(tmp_path: Path) -> None:
    checkpoint(tmp_path, 5)
    PLAN.save(tmp_path / "plan.json")
    training = Training(resume=True)
    assert check(PLAN, out=tmp_path, training=training) == []
    other = replace(PLAN, accumulation=PLAN.accumulation * 2)
    (said,) = check(other, out=tmp_path, training=training)
    assert said.startswith(f"a step takes {other.global_batch} samples and took {PLAN.global_batch} so far")


UNFINISHED = (
    ".plan.json.d0oym7tp",
    "errors/.rank-1.json.a_b3",
    "measured/.rank-0.json.x",
    "weights/.model.safetensors.4711",
    ".run.json.1",
)


def test_what_a_killed_process_was_writing_is_removed(tmp_path: Path, stub: Callable[[str], None]) -> None:
    write(tmp_path, FAILED + UNFINISHED[:2])
    stub("import pathlib, sys; pathlib.Path(sys.argv[2], '.run.json.2').touch(); print('step 1')")
    run(PLAN, tmp_path, [])
    assert [path for path in tmp_path.rglob(".*") if path.is_file()] == []
    kept = ("notes/.run.json.3", ".gitignore", ".run.json", "weights/.model.safetensors")
    write(tmp_path, (*UNFINISHED, *kept))
    sweep(tmp_path)
    assert {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob(".*") if path.is_file()} == set(kept)


def test_two_runs_in_one_folder(tmp_path: Path, stub: Callable[[str], None]) -> None:
    """The second is refused while the first goes on, whatever the first has written so far."""
    stub("print('up')")
    messages: list[str] = []

    def meanwhile(line: str) -> None:
        if line != "up":
            return
        for resume in (False, True):
            with pytest.raises(FileError) as caught:
                run(PLAN, tmp_path, resume=resume)
            messages.append(str(caught.value))

    launch(PLAN, out=tmp_path, training=Training(), show=meanwhile)
    assert messages == [f"{tmp_path} is in use by another run; give another --out"] * 2
    lines: list[str] = []
    run(PLAN, tmp_path, lines)  # made no step, so the folder is free, and the lock with it
    assert lines[-1] == "up"


def test_the_ranks_do_not_keep_the_lock(tmp_path: Path, stub: Callable[[str], None]) -> None:
    stub("print([name for name in map(os.path.realpath, Path('/proc/self/fd').iterdir()) if name.endswith('/lock')])")
    lines: list[str] = []
    run(PLAN, tmp_path, lines)
    assert lines[-1] == "[]"


def test_a_launch_that_loses_the_race_for_the_lock(tmp_path: Path) -> None:
    with held(tmp_path / "run"), pytest.raises(FileError, match="in use by another run"), held(tmp_path / "run"):
        pass
    with held(tmp_path / "run"):
        assert [path.name for path in (tmp_path / "run").iterdir()] == ["lock"]
    check_folder(PLAN, tmp_path / "run", resume=False)  # a lock alone is nothing that could be missed


def test_a_file_in_place_of_the_folder(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("")
    refused(PLAN, tmp_path / "run", "is a file", FileError)
    refused(PLAN, tmp_path / "run" / "deeper", "run is a file", FileError)


def test_a_place_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=2**40))
    refused(PLAN, Path("/proc/memcalc-run"), "cannot be written", FileError)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_without_permission(tmp_path: Path) -> None:
    (tmp_path / "locked").mkdir(mode=0o500)
    refused(PLAN, tmp_path / "locked" / "run", "no permission", FileError)


def test_a_disk_too_small_for_a_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
    # gpt2-tiny: 124,672 parameters of 4 bytes, twice (checkpoint and weights), and two Adam moments.
    parameters = sum(weight.numel for weight in PLAN.family.weights(PLAN.model))
    needed = f"{4 * 4 * parameters / 1e6:.3f}"
    refused(PLAN, tmp_path / "run", rf"has 1 kB left; one checkpoint and the final weights need {needed} MB", FileError)


def test_a_disk_that_fills_up_while_writing(tmp_path: Path) -> None:
    """A limit on file sizes stands for the full disk: the plan is written whole or not at all."""
    body = (
        "import resource, sys; from pathlib import Path; from memcalc.run_folder import prepare; from memcalc.plan import Plan;"
        "from memcalc.training import Training;"
        "from memcalc.errors import FileError; from memcalc.models import MODELS\n"
        "plan = Plan(model=MODELS['gpt2-tiny'], tokens=32, micro_batch=1, device='cpu')\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))\n"
        "try: prepare(plan, Training(), Path(sys.argv[1]))\n"
        "except FileError as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", body, str(tmp_path)], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout == f"{tmp_path}/plan.json cannot be written: file too large\n"
    assert [path.name for path in tmp_path.iterdir()] == ["logs"]
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] != 100
