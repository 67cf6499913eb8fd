"""``memcalc launch`` with the real trainers under the real torchrun."""

from __future__ import annotations

import os
import re
import resource
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from memcalc.measurement import Measurement
from memcalc.models import MODELS
from memcalc.plan import Plan
from memcalc.training import Training
from tests.trainers.launched import anything_left, checkpoints_whole, ended, memcalc, ranks_of
from tests.trainers.runs import SECONDS

PLAN = Plan(model=MODELS["gpt2-tiny"], tokens=64, micro_batch=2, strategy="fsdp-full-shard", ranks=2, device="cpu")

Running = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Running]:
    """Starts a run that would take minutes, and waits until it makes steps."""
    begun: list[subprocess.Popen[str]] = []

    def start(*words: object) -> subprocess.Popen[str]:
        PLAN.save(tmp_path / "plan.json")
        process = memcalc("launch", tmp_path / "plan.json", "--steps", 100_000, "--out", tmp_path / "run", *words)
        begun.append(process)
        assert process.stdout is not None
        line = process.stdout.readline()
        while line and not line.startswith("step "):
            line = process.stdout.readline()
        assert line, process.communicate()
        return process

    yield start
    for process in begun:
        process.kill()


def wait_for_checkpoint(process: subprocess.Popen[str], run: Path) -> None:
    while not any((run / "checkpoints").glob("step-*/done.json")):
        assert process.poll() is None
        time.sleep(0.1)


def test_train_compare_and_resume(tmp_path: Path) -> None:
    plan, run = tmp_path / "plan.json", tmp_path / "run"
    PLAN.save(plan)
    code, out, err = ended(memcalc("launch", plan, "--steps", 4, "--checkpoint-every", 2, "--out", run))
    assert code == 0, err
    assert "step 4/4" in out
    assert f"checkpoint: {run}/checkpoints/step-4\n" in out
    loss = re.search(r"^evaluation loss: (\d\.\d{4})$", out, re.MULTILINE)
    assert loss is not None
    assert "parameters, gradients and optimizer states equal to the byte" in out
    assert (run / "weights" / "model.safetensors").stat().st_size > 4 * 100_000
    code, table, _ = ended(memcalc("compare", run))
    assert code == 0
    assert table.strip() in out
    code, _, err = ended(memcalc("launch", plan, "--steps", 6, "--out", run))
    assert (code, err) == (
        2,
        f"memcalc: {run} is not empty; give another folder, or continue the run in it with memcalc launch --resume\n",
    )
    code, out, err = ended(memcalc("launch", plan, "--steps", 6, "--out", run, "--resume"))
    assert code == 0, err
    assert "step 5/6" in out
    assert "step 4/6" not in out
    assert f"checkpoint: {run}/checkpoints/step-6\n" in out


def test_out_of_memory_is_explained_and_the_next_plan_goes_on(tmp_path: Path) -> None:
    """A limit of the address space stands for a small card. Many thin layers keep much and compute little."""
    plan, run = tmp_path / "plan.json", tmp_path / "run"
    thin = replace(MODELS["mlp-tiny"], features=8, hidden=8, layers=200)
    Plan(model=thin, micro_batch=2**18, device="cpu", optimizer_kind="for-loop").save(plan)
    limit = 2_000 * 10**6  # a step takes 1.7 GB beside torch's own 1 GB, with smaller micro batches a half or a quarter
    code, out, err = ended(
        memcalc(
            "launch", plan, "--steps", 1, "--measure-steps", 0, "--on-oom", "next", "--out", run,
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (limit, limit)),
        )
    )  # fmt: skip
    assert code == 0, err
    said = re.search(
        rf"^rank 0 of 1 ran out of memory in (forward|loss|backward) \(estimated 1\.[0-9]+ GB there, 1\.[0-9]+ GB of it new "
        rf"activations\); what should fit: (.+) \(saved as {run}/next-plan.json\); see {run}/logs/rank-0.log; "
        r"goes on with that$",
        out, re.MULTILINE,
    )  # fmt: skip
    assert said, out
    following = Plan.load(run / "plan.json")
    assert following == Plan.load(run / "next-plan.json") != Plan.load(plan)
    assert following.global_batch == 2**18
    assert "step 1/1" in out and len(Measurement.from_json(run / "run.json").losses) == 1


def test_stopped_resumed_and_stopped_again_on_the_same_data(tmp_path: Path) -> None:
    plan, run = tmp_path / "plan.json", tmp_path / "run"
    PLAN.save(plan)
    (tmp_path / "book.txt").write_text("0123456789abcdef" * 2000)
    words = ("--steps", 100_000, "--checkpoint-every", 20, "--seed", 3, "--out", run)
    process = memcalc("launch", plan, "--data", "book.txt", *words, cwd=tmp_path)
    wait_for_checkpoint(process, run)
    process.send_signal(signal.SIGINT)
    _, _, err = ended(process)
    said = re.fullmatch(
        rf"memcalc: stopped by SIGINT; no process of the run is left; "
        rf"resume with: memcalc (launch {run}/plan.json --out {run} --resume) \(from step (\d+)\)\n",
        err,
    )
    assert said, err
    assert Measurement.from_json(run / "run.json").status == "stopped"
    assert checkpoints_whole(run) > 0
    code, out, _ = ended(memcalc("compare", run))
    assert (code, out.splitlines()[-1]) == (0, "note: the run was stopped before its last step")
    step = int(said[2])
    code, out, _ = ended(memcalc(*said[1].split(), "--steps", step + 3))
    assert code == 0
    changed, resumed = out.splitlines()[:2]
    assert changed.startswith(f"changed from the run so far: steps {step + 3} (was 100000); the learning rate follows")
    assert resumed.startswith(f"resumed at step {step} from ")
    assert f"step {step + 3}/{step + 3}" in out
    assert "evaluation loss: " in out
    record = Measurement.from_json(run / "run.json")
    assert len(record.losses) == step + 3
    kept = Training.saved(run / "training.json")
    assert (kept["data"], kept["seed"]) == (tmp_path / "book.txt", 3)
    code, out, _ = ended(memcalc(*said[1].split()))
    at = f"{run} is at step {step + 3}, and --steps {step + 3} are steps in all; give more to go on"
    assert (code, out) == (0, f"nothing to do and nothing changed: {at}\n")


def test_a_rank_that_is_killed_stops_the_job(tmp_path: Path, running: Running) -> None:
    process, run = running("--checkpoint-every", 3), tmp_path / "run"
    wait_for_checkpoint(process, run)
    os.kill(ranks_of(run)[1], signal.SIGKILL)
    code, _, err = ended(process)
    assert code == 1
    assert checkpoints_whole(run) > 0
    survivor = (run / "logs" / "rank-0.log").read_text()
    assert "stopped by SIGTERM" in survivor or "Traceback" in survivor  # told by torchrun, or by the lost connection
    assert (run / "logs" / "rank-1.log").exists()
    # Either the death itself is reported, or the other rank was quicker to say that its neighbour is gone.
    assert "rank 1 was killed (signal 9)" in err
    assert anything_left(tmp_path) == []


def test_a_stopped_run_leaves_nothing(tmp_path: Path, running: Running) -> None:
    process = running()
    assert set(ranks_of(tmp_path / "run")) == {0, 1}
    process.send_signal(signal.SIGINT)
    code, _, err = ended(process)
    advice = "no checkpoint was written; --checkpoint-every N keeps some"
    assert (code, err) == (130, f"memcalc: stopped by SIGINT; no process of the run is left; {advice}\n")
    assert "stopped by SIG" in (tmp_path / "run" / "logs" / "rank-0.log").read_text()
    assert anything_left(tmp_path) == []


def test_a_launcher_that_is_killed_leaves_nothing(tmp_path: Path, running: Running) -> None:
    process = running()
    process.kill()
    process.communicate(timeout=SECONDS)
    deadline = time.monotonic() + SECONDS
    while anything_left(tmp_path) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert anything_left(tmp_path) == []
