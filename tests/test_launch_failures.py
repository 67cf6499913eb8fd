"""What a launched run that fails says. No torch needed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest

from memcalc.errors import RunError
from memcalc.failure import failure
from memcalc.measurement import Measurement
from memcalc.plan import Plan
from tests.launching import PLAN, TWO, checkpoint, run, saves

pytestmark = pytest.mark.usefixtures("machine")


def said(rank: int, kind: str, message: str, moment: str = "backward") -> str:
    error = {"rank": rank, "moment": moment, "kind": kind, "message": message}
    return f"(out / 'errors').mkdir(exist_ok=True); (out / 'errors' / 'rank-{rank}.json').write_text({json.dumps(error)!r})\n"


def test_the_first_rank_that_failed_is_named(tmp_path: Path, stub: Callable[[str], None]) -> None:
    stub(
        said(1, "error", "bad\n  gradient")
        + "time.sleep(0.05)\n"
        + said(0, "error", "connection closed by peer")
        + "sys.exit(1)"
    )
    with pytest.raises(
        RunError, match=rf"^rank 1 of 2 failed in backward: bad gradient; see {tmp_path}/logs/rank-1.log$"
    ) as caught:
        run(TWO, tmp_path)
    assert caught.value.exit_code == 1


def test_restarts_that_are_used_up_are_named(tmp_path: Path) -> None:
    errors = tmp_path / "errors"
    errors.mkdir()
    (errors / "rank-1.json").write_text('{"rank": 1, "moment": "step", "kind": "error", "message": "bad"}')
    assert "used up" not in str(failure(TWO, tmp_path, 1))
    assert str(failure(TWO, tmp_path, 1, restarts=2)).endswith(
        "; --max-restarts 2 is used up; no checkpoint was written; --checkpoint-every N keeps some"
    )
    checkpoint(tmp_path, 5)
    assert (
        f"is used up; resume with: memcalc launch {tmp_path}/plan.json --out {tmp_path} --resume (from step 5)"
        in str(failure(TWO, tmp_path, 1, restarts=2))
    )


def test_out_of_memory_names_the_next_plan(
    tmp_path: Path, stub: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def next_plan(plan: Plan, capacity: int) -> Plan:
        asked.append(capacity)
        return replace(plan, checkpoint_every=1, micro_batch=2)

    monkeypatch.setattr(import_module("memcalc.recommend"), "next_plan", next_plan)
    stub(
        said(0, "error", "connection closed")
        + "time.sleep(0.05)\n"
        + said(1, "oom", "CUDA out of memory")
        + "sys.exit(1)"
    )
    with pytest.raises(RunError) as caught:
        run(TWO, tmp_path)
    assert str(caught.value) == (
        "rank 1 of 2 ran out of memory in backward (estimated 2.625 MB there, 629.76 kB of it new gradients); "
        "what should fit: micro batch 2, checkpoint every 1 "
        f"(saved as {tmp_path}/next-plan.json); see {tmp_path}/logs/rank-1.log"
    )
    assert asked == [4 * 2**30]  # two ranks share the RAM
    assert Plan.load(tmp_path / "next-plan.json").checkpoint_every == 1


def test_out_of_memory_and_nothing_fits(
    tmp_path: Path, stub: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(import_module("memcalc.recommend"), "next_plan", lambda plan, capacity: None)
    stub(said(0, "oom", "") + "sys.exit(1)")
    with pytest.raises(RunError, match="no plan for this model fits on this machine"):
        run(PLAN, tmp_path)


ROOT_CAUSE = """
trainers FAILED
Root Cause (first observed failure):
[0]:
  time      : 2026-01-01_00:00:00
  rank      : 1 (local_rank: 1)
  exitcode  : {code} (pid: 7)
"""


@pytest.mark.parametrize(
    ("log", "message"),
    [
        (
            ROOT_CAUSE.format(code=-9),
            r"rank 1 was killed \(signal 9\), as the kernel does when memory runs out",
        ),
        (ROOT_CAUSE.format(code=-15), "rank 1 was killed (signal 15, Terminated)"),
        (ROOT_CAUSE.format(code=3), "rank 1 ended with exit code 3 and left no message"),
        (
            "Traceback ...\nImportError: libcudart.so.12: cannot open\n\n",
            "torchrun failed: ImportError: libcudart.so.12: cannot open;",
        ),
        ("", "torchrun ended with exit code 5"),
    ],
)
def test_a_rank_that_left_no_word(tmp_path: Path, log: str, message: str) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "torchrun.log").write_text(log)
    assert str(failure(TWO, tmp_path, 5)).startswith(message.replace("\\", ""))


def survivor(out: Path, log: str, kind: str = "error") -> str:
    """What is said of a run whose rank 0 left a message, and whose torchrun wrote ``log``."""
    (out / "logs").mkdir()
    (out / "logs" / "torchrun.log").write_text(log)
    (out / "errors").mkdir()
    error = {"rank": 0, "moment": "backward", "kind": kind, "message": "Connection reset by peer"}
    (out / "errors" / "rank-0.json").write_text(json.dumps(error))
    return str(failure(TWO, out, 1))


OTHERS = """Failures:
[1]:
  time      : 2026-01-01_00:00:00
  rank      : {rank} (local_rank: {rank})
  exitcode  : {code} (pid: 6)
------------------------------------------------------------"""


@pytest.mark.parametrize(
    "log",
    [
        OTHERS.format(rank=0, code=1) + ROOT_CAUSE.format(code=-9),
        # Both ended within a second, and torchrun took the wrong one for the first.
        OTHERS.format(rank=1, code=-9) + ROOT_CAUSE.format(code=1).replace("rank      : 1", "rank      : 0"),
    ],
)
def test_a_killed_rank_is_named_and_not_the_one_that_lost_it(tmp_path: Path, log: str) -> None:
    assert survivor(tmp_path, log) == (
        f"rank 1 was killed (signal 9), as the kernel does when memory runs out; see {tmp_path}/logs"
    )


@pytest.mark.parametrize("code", [-6, -15])
def test_a_rank_that_ended_because_another_failed_is_no_cause(tmp_path: Path, code: int) -> None:
    assert survivor(tmp_path, ROOT_CAUSE.format(code=code)).startswith("rank 0 of 2 failed in backward: Connection")


def test_a_rank_that_torchrun_had_to_kill_is_no_cause(tmp_path: Path) -> None:
    log = "Unable to shutdown process 7 via 15, forcefully exiting via 9\n" + ROOT_CAUSE.format(code=-9)
    assert survivor(tmp_path, log).startswith("rank 0 of 2 failed in backward: Connection")


def test_a_rank_that_said_it_is_out_of_memory_goes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(import_module("memcalc.recommend"), "next_plan", lambda plan, capacity: None)
    assert survivor(tmp_path, ROOT_CAUSE.format(code=-9), "oom").startswith("rank 0 of 2 ran out of memory")


def test_a_full_disk_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=4096))
    assert str(failure(PLAN, tmp_path, 1)) == (
        f"no space left on the disk of {tmp_path}; torchrun ended with exit code 1; see {tmp_path}/logs"
    )
    message = survivor(tmp_path, ROOT_CAUSE.format(code=1))
    assert message.startswith(f"no space left on the disk of {tmp_path}; rank 0 of 2 failed in backward: Connection")


@pytest.mark.parametrize("text", ["", "{", "[]", '{"rank": "x"}', "\x00"])
def test_a_torn_error_file_hides_nothing(tmp_path: Path, text: str) -> None:
    (tmp_path / "errors").mkdir()
    (tmp_path / "errors" / "rank-0.json").write_text(text)
    assert str(failure(PLAN, tmp_path, 5)) == f"torchrun ended with exit code 5; see {tmp_path}/logs"


def test_what_an_earlier_try_said_is_forgotten(tmp_path: Path, stub: Callable[[str], None]) -> None:
    stub(said(0, "error", "old") + saves(1) + "sys.exit(1)")
    with pytest.raises(RunError, match="old"):
        run(PLAN, tmp_path)
    stub("sys.exit(9)")
    with pytest.raises(RunError, match="exit code 9"):
        run(PLAN, tmp_path, resume=True)


@pytest.mark.parametrize(
    ("log", "code"),
    [
        ("torch.distributed.elastic.multiprocessing.api.SignalException: Process 7 got signal: 15\n", 75),
        ("torch.distributed.elastic.multiprocessing.api.SignalException: Process 7 got signal: 2\n", 1),
    ],
)
def test_torchrun_that_was_told_to_stop_after_the_ranks_had_saved(tmp_path: Path, log: str, code: int) -> None:
    checkpoint(tmp_path, 7)
    Measurement(plan=TWO, status="preempted", device="cpu", versions={}, losses=[1.0]).save(tmp_path / "run.json")
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "torchrun.log").write_text(log)
    found = failure(TWO, tmp_path, 1)
    assert found.exit_code == code
    assert ("stopped by SIGTERM and saved; resume with: " in str(found)) == (code == 75)
