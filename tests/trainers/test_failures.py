"""When a rank fails, the whole job ends, says why in one line and leaves nothing half-written.

Ranks that are killed, and data that does not do: test_launch_real.py and test_survival.py.
"""

from __future__ import annotations

import json
import re
import resource
import shutil
import subprocess
from pathlib import Path

import pytest

from memcalc.errors import InputError
from memcalc.plan import Plan
from memcalc.training import Training
from tests.trainers.runs import SECONDS, TORCHRUN, environment, plan, rare
from trainers.loop import train
from trainers.process import Rank, join


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


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """A run of two ranks that ended well, and the checkpoint of its last step."""
    folder = tmp_path_factory.mktemp("trained")
    done = finish(plan(ranks=2, strategy="fsdp-full-shard"), folder, "--steps", "4", "--keep-checkpoints", "1")
    return folder, done


def limit_files() -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))


@pytest.mark.parametrize("strategy", ["fsdp-full-shard", *rare({"single": ""})])
def test_a_full_disk_is_one_line_and_keeps_the_checkpoint_before(
    trained: tuple[Path, subprocess.CompletedProcess[str]], tmp_path: Path, strategy: str
) -> None:
    """A limit on file sizes stands for a full disk: writing fails in the middle of a file."""
    made = plan(ranks=1 if strategy == "single" else 2, strategy=strategy)
    words, out = ("--measure-steps", "0", "--keep-checkpoints", "1"), tmp_path / "run"
    if strategy == "single":
        assert finish(made, out, *words, "--steps", "4").returncode == 0
    else:
        shutil.copytree(trained[0], out)
    shutil.rmtree(out / "weights")
    done = subprocess.run(
        command(made, out, *words, "--steps", "6", "--resume"), env=environment(), preexec_fn=limit_files,
        capture_output=True, text=True, timeout=SECONDS, check=False,
    )  # fmt: skip
    assert done.returncode != 0
    path = out / "checkpoints" / "step-6"
    lines = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert lines and all(
        line.startswith(f"error: checkpoint {path} cannot be written: a file was cut off") for line in lines
    ), done.stderr
    assert not (path / "done.json").exists() and not (out / "weights").exists()
    assert json.loads((out / "errors" / "rank-0.json").read_text())["kind"] == "error"
    again = finish(made, out, *words, "--steps", "6", "--resume")
    assert (again.returncode, "resumed at step 4" in again.stdout) == (0, True), again.stderr


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


def test_ranks_must_be_those_of_the_plan() -> None:
    said = "the plan is for 2 ranks, but 1 were started"
    with join(Rank(rank=0, local=0, world=1), "cpu", 0) as process, pytest.raises(InputError, match=f"^{said}$"):
        train(plan(ranks=2, strategy="ddp"), Training(steps=1), process)


def test_progress_goes_to_the_terminal_once(trained: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    folder, done = trained
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines.pop(0).endswith("are left out of each epoch, different ones every time")
    assert [line.split("  ")[0] for line in lines] == ["step 1/4", "step 2/4", "step 3/4", "step 4/4", "step 4/4"]
    assert "tokens/s" in lines[3] and "allocated" in lines[3] and "evaluation loss" in lines[4]
    assert (folder / "weights" / "model.safetensors").exists()
    assert {path.name for path in (folder / "measured").iterdir()} == {"rank-0.json", "rank-1.json"}


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
