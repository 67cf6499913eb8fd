"""When a rank fails, the whole job ends, says why in one line and leaves no process and nothing half-written."""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from memcalc.errors import InputError
from memcalc.plan import Plan
from tests.trainers.runs import SECONDS, TORCHRUN, environment, plan
from trainers.process import Rank


def command(made: Plan, out: Path, *options: str) -> list[str]:
    out.mkdir(exist_ok=True)
    made.save(out / "plan.json")
    return [
        *TORCHRUN,
        "--nproc-per-node",
        str(made.ranks),
        "-m",
        "trainers",
        str(out / "plan.json"),
        str(out),
        *options,
    ]


def finish(made: Plan, out: Path, *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(made, out, *options), env=environment(), capture_output=True, text=True, timeout=SECONDS, check=False
    )


@contextmanager
def endless(out: Path) -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
    """A run of two ranks that has made its first steps, and the processes of its ranks."""
    words = command(
        plan(ranks=2, strategy="ddp"), out, "--steps", "1000000", "--checkpoint-every", "3", "--measure-steps", "0"
    )
    with subprocess.Popen(
        words, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as run:
        try:
            wait_for(lambda: (out / "checkpoints" / "step-6" / "done.json").exists())
            yield run, ranks_of(run.pid)
        finally:
            run.kill()


def ranks_of(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def wait_for(condition: object, seconds: float = SECONDS) -> None:
    deadline = time.monotonic() + seconds
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.1)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def assert_checkpoints_whole(out: Path) -> None:
    for marker in (out / "checkpoints").glob("step-*/done.json"):
        assert json.loads(marker.read_text())["step"] == int(marker.parent.name.removeprefix("step-"))
        assert (marker.parent / ".metadata").exists()
    assert not (out / "weights").exists()


def test_a_killed_rank_ends_the_job(tmp_path: Path) -> None:
    with endless(tmp_path) as (run, ranks):
        os.kill(ranks[1], signal.SIGKILL)
        assert run.wait(SECONDS) != 0
        wait_for(lambda: not any(map(alive, ranks)))
    assert_checkpoints_whole(tmp_path)
    assert (tmp_path / "logs" / "rank-1.log").exists()
    survivor = (tmp_path / "logs" / "rank-0.log").read_text()
    assert "stopped by SIGTERM" in survivor or "Traceback" in survivor  # told by torchrun, or by the lost connection


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stopped_job_leaves_nothing_running(tmp_path: Path, number: signal.Signals) -> None:
    with endless(tmp_path) as (run, ranks):
        run.send_signal(number)
        assert run.wait(SECONDS) != 0
        wait_for(lambda: not any(map(alive, ranks)))
    assert_checkpoints_whole(tmp_path)
    assert "stopped by SIG" in (tmp_path / "logs" / "rank-0.log").read_text()


def limit_files() -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))


@pytest.mark.parametrize("strategy", ["single", "fsdp-full-shard"])
def test_a_full_disk_is_one_line_and_keeps_the_checkpoint_before(tmp_path: Path, strategy: str) -> None:
    """A limit on file sizes stands for a full disk: writing fails in the middle of a file."""
    made = plan(ranks=1 if strategy == "single" else 2, strategy=strategy)
    words = ("--measure-steps", "0", "--keep-checkpoints", "1")
    assert finish(made, tmp_path, *words, "--steps", "2").returncode == 0
    shutil.rmtree(tmp_path / "weights")
    done = subprocess.run(
        command(made, tmp_path, *words, "--steps", "4", "--resume"), env=environment(), preexec_fn=limit_files,
        capture_output=True, text=True, timeout=SECONDS, check=False,
    )  # fmt: skip
    assert done.returncode != 0
    path = tmp_path / "checkpoints" / "step-4"
    lines = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert lines and all(
        line.startswith(f"error: checkpoint {path} cannot be written: a file was cut off") for line in lines
    ), done.stderr
    assert not (path / "done.json").exists() and not (tmp_path / "weights").exists()
    assert json.loads((tmp_path / "errors" / "rank-0.json").read_text())["kind"] == "error"
    again = finish(made, tmp_path, *words, "--steps", "4", "--resume")
    assert (again.returncode, "resumed at step 2" in again.stdout) == (0, True), again.stderr


def test_one_failing_rank_says_why(tmp_path: Path) -> None:
    (tmp_path / "measured" / "rank-1.json").mkdir(parents=True)  # where rank 1 has to put its measurement
    done = finish(plan(ranks=2, strategy="fsdp-full-shard"), tmp_path)
    assert done.returncode != 0
    said = json.loads((tmp_path / "errors" / "rank-1.json").read_text())
    assert said == {"rank": 1, "moment": "init", "kind": "error", "message": said["message"]}
    assert "measured/rank-1.json is a folder" in said["message"]
    assert f"error: {said['message']}" in done.stderr.splitlines()
    assert "Traceback" in (tmp_path / "logs" / "rank-1.log").read_text()
    assert not (tmp_path / "weights").exists()


def test_too_little_data_for_the_ranks(tmp_path: Path) -> None:
    """launch finds it before it starts any; torchrun by hand does not."""
    (tmp_path / "text.txt").write_text("a" * 200)
    done = finish(plan(ranks=2, strategy="ddp"), tmp_path, "--data", str(tmp_path / "text.txt"))
    assert done.returncode != 0
    assert (
        f"error: {tmp_path}/text.txt gives 5 samples to train on; one step needs 8 (micro batch 4 x accumulation 1 x "
        "ranks 2): more data, fewer ranks or a smaller batch would do"
    ) in done.stderr.splitlines()
    assert "Traceback" not in "".join(
        line for line in done.stderr.splitlines() if "torch" not in line and "error:" in line
    )
    assert sorted(path.name for path in (tmp_path / "errors").iterdir()) == ["rank-0.json", "rank-1.json"]


def test_ranks_must_be_those_of_the_plan(tmp_path: Path) -> None:
    words = command(plan(ranks=2, strategy="ddp"), tmp_path)
    words[words.index("--nproc-per-node") + 1] = "1"
    done = subprocess.run(words, env=environment(), capture_output=True, text=True, timeout=SECONDS, check=False)
    assert "error: the plan is for 2 ranks, but 1 were started" in done.stderr.splitlines()


def test_progress_goes_to_the_terminal_once(tmp_path: Path) -> None:
    done = finish(plan(ranks=2, strategy="ddp"), tmp_path, "--steps", "4")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines.pop(0).endswith("are left out of each epoch, different ones every time")
    assert [line.split("  ")[0] for line in lines] == ["step 1/4", "step 2/4", "step 3/4", "step 4/4", "step 4/4"]
    assert "tokens/s" in lines[3] and "allocated" in lines[3] and "evaluation loss" in lines[4]
    assert (tmp_path / "weights" / "model.safetensors").exists()
    assert {path.name for path in (tmp_path / "measured").iterdir()} == {"rank-0.json", "rank-1.json"}


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("RANK", "foo", "RANK='foo' in the environment is not a whole number, as torchrun sets it"),
        ("WORLD_SIZE", "", "WORLD_SIZE='' in the environment is not a whole number, as torchrun sets it"),
        ("RANK", "3", "RANK=3 in the environment must be below WORLD_SIZE=1"),
    ],
)
def test_an_environment_that_torchrun_did_not_set(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, said: str
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(InputError, match=f"^{re.escape(said)}$"):
        Rank.from_environment()
