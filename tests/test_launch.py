"""Launching: what is refused before anything starts, and what a run that fails says. No torch needed, but for the last."""

from __future__ import annotations

import importlib.util
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner, Result

from memcalc import launch as launch_module
from memcalc.cli.app import app
from memcalc.errors import FileError, InputError, MemcalcError, PlanError, RunError
from memcalc.failure import failure
from memcalc.launch import check, command, environment, launch
from memcalc.models import MODELS, Model
from memcalc.optimizers import OPTIMIZERS
from memcalc.plan import Plan
from memcalc.run_folder import COMPLETE, continued, newest_checkpoint
from memcalc.supervise import Stopped
from memcalc.training import Training

ROOT = Path(__file__).resolve().parent.parent
TORCH = importlib.util.find_spec("torch") is not None
needs_torch = pytest.mark.skipif(not TORCH, reason="torch is not installed")

PLAN = Plan(model=MODELS["gpt2-tiny"], tokens=32, micro_batch=1, device="cpu")
TWO = replace(PLAN, strategy="ddp", ranks=2)


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A machine with two cores, 8 GiB and no GPU; torch counts as installed."""
    found = SimpleNamespace(gpus=(), cores=2, ram_bytes=8 * 2**30)
    monkeypatch.setattr("memcalc.machine.detect", lambda: found)
    monkeypatch.setattr(launch_module, "require_torch", lambda: None)
    return found


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Puts a few lines of Python in torchrun's place; they see the trainers' arguments in ``sys.argv``."""

    def use(body: str) -> None:
        text = f"import json, os, sys, time, signal; from pathlib import Path; out = Path(sys.argv[2])\n{body}"
        monkeypatch.setattr(
            launch_module, "command", lambda ranks, module, *words: [sys.executable, "-c", text, *words]
        )

    return use


def run(plan: Plan, out: Path, lines: list[str] | None = None, **options: object) -> launch_module.Run:
    show = (lines if lines is not None else []).append
    return launch(plan, out=out, training=Training(**options), show=show, grace_seconds=2.0)  # type: ignore[arg-type]


# -- refused before anything is written ------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"steps": 0}, "steps 0 must be at least 1"),
        ({"eval_every": -1}, "eval every -1 must be at least 0"),
        ({"learning_rate": 0.0}, "learning rate 0.0 must be above 0"),
        ({"learning_rate": float("nan")}, "learning rate nan must be above 0"),
        ({"clip": float("inf")}, "clip inf must be at least 0"),
    ],
)
def test_options_that_make_no_sense(options: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        Training(**options)  # type: ignore[arg-type]


def test_data_that_does_not_exist(tmp_path: Path) -> None:
    with pytest.raises(FileError, match=r"data .*book\.txt does not exist"):
        Training(data=tmp_path / "book.txt")


def refused(plan: Plan, out: Path, message: str, kind: type[MemcalcError], *, resume: bool = False) -> None:
    """The launch is refused with one line, and the folder is as it was."""
    before = sorted(out.rglob("*")) if out.is_dir() else out.exists()
    with pytest.raises(kind, match=message) as caught:
        run(plan, out, resume=resume)
    assert "\n" not in str(caught.value)
    assert (sorted(out.rglob("*")) if out.is_dir() else out.exists()) == before


def test_a_folder_with_another_run(tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text("{}")
    refused(PLAN, tmp_path, "is not empty; give another folder$", FileError)
    checkpoint(tmp_path, 5)
    refused(PLAN, tmp_path, "is not empty; give another folder, or --resume to continue the run in it$", FileError)


FAILED = ("plan.json", "training.json", "next-plan.json", "logs/rank-0.log", "logs/torchrun.log", "errors/rank-0.json")


def write(out: Path, names: tuple[str, ...]) -> None:
    for name in names:
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (out / name).write_text("before")


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
    ["run.json", "measured/rank-0.json", "checkpoints/step-1/x", "weights/model.pt", "notes.txt", "logs/mine.log",
     "errors/mine.txt", "logs.txt"],
)  # fmt: skip
def test_nothing_else_is_overwritten(tmp_path: Path, name: str) -> None:
    write(tmp_path, (*FAILED, name))
    refused(PLAN, tmp_path, "is not empty; give another folder$", FileError)


def checkpoint(out: Path, step: int) -> None:
    """A complete checkpoint, as far as launch looks at it."""
    write(out, (f"checkpoints/step-{step}/{COMPLETE}",))


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


def test_more_ranks_than_gpus(tmp_path: Path, machine: SimpleNamespace) -> None:
    plan = replace(TWO, device="cuda")
    refused(plan, tmp_path, "needs 2 GPUs, this machine has no GPU", PlanError)
    machine.gpus = (SimpleNamespace(usable_bytes=2**34),)
    refused(plan, tmp_path, "needs 2 GPUs, this machine has 1 GPU", PlanError)


def test_plans_that_cannot_be_run_here(tmp_path: Path) -> None:
    refused(replace(TWO, nodes=2), tmp_path, "2 nodes; launch starts ranks on this machine only", PlanError)
    size = Model(name="1,000 parameters", family="size", parameters=1000)
    refused(Plan(model=size, device="cpu"), tmp_path, "known by its size only", PlanError)


@pytest.mark.parametrize(("optimizer", "library"), [("lion", "lion_pytorch"), ("adamw-8bit", "bitsandbytes")])
def test_an_optimizer_that_torch_has_not(tmp_path: Path, optimizer: str, library: str) -> None:
    plan = replace(PLAN, optimizer=optimizer, optimizer_kind=OPTIMIZERS[optimizer].kinds[0])
    message = rf"^{optimizer} can be estimated but not trained: {library}.* is not part of torch, take adamw$"
    refused(plan, tmp_path / "run", message, PlanError)


def test_nothing_to_resume(tmp_path: Path) -> None:
    refused(PLAN, tmp_path, "no run with a checkpoint", FileError, resume=True)
    (tmp_path / "checkpoints" / "step-7").mkdir(parents=True)  # cut off while it was written
    refused(PLAN, tmp_path, "no run with a checkpoint", FileError, resume=True)
    checkpoint(tmp_path, 5)
    assert newest_checkpoint(tmp_path) == (5, tmp_path / "checkpoints" / "step-5")
    replace(PLAN, model=MODELS["llama-tiny"]).save(tmp_path / "plan.json")
    refused(PLAN, tmp_path, "a run with another model", PlanError, resume=True)


def test_without_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    refused(PLAN, tmp_path / "run", r"torch is not installed; to train: pip install 'torch>=2\.6'$", RunError)


def test_warnings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch_module, "installed_torch", lambda: "2.6")
    assert check(replace(PLAN, strategy="ddp", ranks=4), out=tmp_path, training=Training()) == [
        "4 ranks share 2 cores and will be slow",
        f"the plan is for torch {PLAN.torch}, installed is 2.6: its estimate may differ",
    ]


# -- the call --------------------------------------------------------------------------------------


def test_the_call_of_torchrun(tmp_path: Path) -> None:
    words = command(2, "trainers", "plan.json", *Training(steps=7, data=tmp_path, resume=True).arguments())
    assert words[:2] == [sys.executable, "-m"]
    assert " ".join(words[2:9]) == "torch.distributed.run --standalone --max-restarts 0 --nproc-per-node 2 -m"
    assert " ".join(words[9:]) == (
        "trainers plan.json --steps 7 --seed 0 --learning-rate 0.0003 --clip 1.0 --eval-every 0 --checkpoint-every 0 "
        f"--measure-steps 3 --data {tmp_path} --resume"
    )


def test_the_environment_of_the_ranks() -> None:
    assert environment({})["OMP_NUM_THREADS"] == "1"
    assert environment({"OMP_NUM_THREADS": "8"})["OMP_NUM_THREADS"] == "8"
    assert environment({"PYTHONPATH": "/mine"})["PYTHONPATH"] == f"/mine{os.pathsep}{ROOT}"


def test_a_run_that_goes_well(tmp_path: Path, stub: Callable[[str], None]) -> None:
    stub("print('step 1'); sys.stderr.write('noise')")
    lines: list[str] = []
    done = run(PLAN, tmp_path / "deep" / "run", lines)
    assert lines[-1] == "step 1"
    assert Plan.load(done.out / "plan.json") == PLAN
    assert (done.out / "logs" / "torchrun.log").read_text() == "noise"


# -- what a failure says ---------------------------------------------------------------------------


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
        "rank 1 of 2 ran out of memory in backward; what should fit: micro batch 2, checkpoint every 1 "
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
            r"rank 1 was killed \(signal 9\), as the kernel does when the machine has no memory left",
        ),
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


@pytest.mark.parametrize("text", ["", "{", "[]", '{"rank": "x"}', "\x00"])
def test_a_torn_error_file_hides_nothing(tmp_path: Path, text: str) -> None:
    (tmp_path / "errors").mkdir()
    (tmp_path / "errors" / "rank-0.json").write_text(text)
    assert str(failure(PLAN, tmp_path, 5)) == f"torchrun ended with exit code 5; see {tmp_path}/logs"


def test_what_an_earlier_try_said_is_forgotten(tmp_path: Path, stub: Callable[[str], None]) -> None:
    stub(said(0, "error", "old") + CHECKPOINT.format(step=1) + "sys.exit(1)")
    with pytest.raises(RunError, match="old"):
        run(PLAN, tmp_path)
    stub("sys.exit(9)")
    with pytest.raises(RunError, match="exit code 9"):
        run(PLAN, tmp_path, resume=True)


# -- going on ----------------------------------------------------------------------------------------

CHECKPOINT = (
    "step = out / 'checkpoints' / 'step-{step}'; step.mkdir(parents=True); (step / '" + COMPLETE + "').write_text('')\n"
)
STOP = "os.kill(os.getppid(), signal.SIGINT); time.sleep(60)"


def test_a_stopped_run_says_how_to_go_on(tmp_path: Path, stub: Callable[[str], None]) -> None:
    stub(CHECKPOINT.format(step=300) + STOP)
    out = tmp_path / "my run"
    with pytest.raises(Stopped) as caught:
        run(PLAN, out)
    assert str(caught.value) == (
        "stopped by SIGINT; no process of the run is left; "
        f"resume with: memcalc launch '{out}/plan.json' --out '{out}' --resume (from step 300)"
    )
    assert caught.value.exit_code == 130


def test_a_stopped_run_without_a_checkpoint_says_so(tmp_path: Path, stub: Callable[[str], None]) -> None:
    stub(STOP)
    with pytest.raises(Stopped, match="; no checkpoint was written; --checkpoint-every N keeps some$"):
        run(PLAN, tmp_path)


@pytest.fixture
def interrupted(tmp_path: Path, stub: Callable[[str], None], monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run on book.txt, given relative to where it was started, that stopped after its checkpoint of step 300."""
    (tmp_path / "there").mkdir()
    monkeypatch.chdir(tmp_path / "there")
    Path("book.txt").write_text("text")
    stub(CHECKPOINT.format(step=300) + STOP)
    with pytest.raises(Stopped):
        run(PLAN, tmp_path / "run", data=Path("book.txt"), steps=420, seed=7, learning_rate=1e-3, checkpoint_every=100)
    monkeypatch.chdir(tmp_path)
    return tmp_path / "run"


def resume(out: Path, *words: object) -> Result:
    return CliRunner().invoke(app, ["launch", str(out / "plan.json"), "--out", str(out), "--resume", *map(str, words)])


SHOW = "print(' '.join(sys.argv[3:])); sys.exit(1)"


def test_a_resumed_run_is_trained_as_before(interrupted: Path, stub: Callable[[str], None], tmp_path: Path) -> None:
    stub(SHOW)
    assert resume(interrupted).output.splitlines()[-2] == (
        "--steps 420 --seed 7 --learning-rate 0.001 --clip 1.0 --eval-every 0 --checkpoint-every 100 --measure-steps 3 "
        f"--data {tmp_path}/there/book.txt --resume"
    )


def test_what_is_given_wins_and_is_said(interrupted: Path, stub: Callable[[str], None], tmp_path: Path) -> None:
    (tmp_path / "other.txt").write_text("text")
    stub(SHOW)
    lines = resume(interrupted, "--steps", 500, "--seed", 7, "--data", "other.txt").output.splitlines()
    there = tmp_path / "there" / "book.txt"
    assert lines[0] == f"changed from the run so far: data {tmp_path}/other.txt (was {there}), steps 500 (was 420)"
    assert "--steps 500 --seed 7 --learning-rate 0.001" in lines[-2]
    # What was said last is how the run is trained from here on.
    assert continued(interrupted, {})[0].steps == 500


def test_data_that_is_gone(interrupted: Path, tmp_path: Path, stub: Callable[[str], None]) -> None:
    gone = tmp_path / "there" / "book.txt"
    gone.unlink()
    result = resume(interrupted)
    assert (result.exit_code, result.output) == (
        2,
        f"memcalc: {gone}, the data of the run in {interrupted}, does not exist any more; give --data PATH\n",
    )
    (tmp_path / "other.txt").write_text("text")
    stub(SHOW)
    assert f"--data {tmp_path}/other.txt --resume" in resume(interrupted, "--data", tmp_path / "other.txt").output


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"memcalc_training": 1, "steps": "x"}'])
def test_a_damaged_record_of_the_training_is_one_line(interrupted: Path, text: str) -> None:
    (interrupted / "training.json").write_text(text)
    result = resume(interrupted)
    assert result.exit_code == 2
    assert len(result.output.splitlines()) == 1
    assert "training.json" in result.output


@pytest.mark.parametrize("steps", [300, 20])
def test_nothing_left_to_do(interrupted: Path, steps: int) -> None:
    before = {path: path.read_bytes() for path in interrupted.rglob("*") if path.is_file()}
    result = resume(interrupted, "--steps", steps)
    assert (result.exit_code, result.output.splitlines()) == (
        0,
        [
            f"changed from the run so far: steps {steps} (was 420)",
            "already at step 300; give more --steps to go on",
        ],
    )
    assert {path: path.read_bytes() for path in interrupted.rglob("*") if path.is_file()} == before


# -- the real torchrun with trainers that only talk -------------------------------------------------

TALKERS = {
    "one dies": "import os, sys, time\nif os.environ['RANK'] == '1': sys.exit(3)\nprint('waiting', flush=True)\ntime.sleep(120)\n",
    "sum": (
        "import os, torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo'); x = torch.ones(1); dist.all_reduce(x)\n"
        "if dist.get_rank() == 0: print('sum', int(x), flush=True)\n"
        "dist.destroy_process_group()\n"
    ),
    # One write: unbuffered, print() makes two, and the lines of two ranks on one pipe get mixed.
    "deaf": (
        "import os, signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "os.write(1, b'waiting\\n')\ntime.sleep(120)\n"
    ),
}


@pytest.fixture
def talker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    def use(name: str) -> None:
        (tmp_path / "path" / "trainers").mkdir(parents=True)
        (tmp_path / "path" / "trainers" / "__init__.py").touch()
        (tmp_path / "path" / "trainers" / "__main__.py").write_text(TALKERS[name])
        monkeypatch.setenv("PYTHONPATH", str(tmp_path / "path"))
        monkeypatch.chdir(tmp_path)

    return use


def processes(mark: str) -> list[str]:
    """Command lines of the living processes that mention ``mark``."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if mark in line and int(entry.name) != os.getpid():
            found.append(line)
    return found


@needs_torch
def test_a_rank_that_dies_stops_the_others(tmp_path: Path, talker: Callable[[str], None]) -> None:
    talker("one dies")
    started = time.monotonic()
    with pytest.raises(RunError, match="rank 1 ended with exit code 3 and left no message"):
        run(TWO, tmp_path / "run")
    assert time.monotonic() - started < 60
    assert processes(str(tmp_path)) == []


@needs_torch
def test_two_launches_at_once(tmp_path: Path, talker: Callable[[str], None]) -> None:
    talker("sum")
    TWO.save(tmp_path / "plan.json")
    started = [
        subprocess.Popen(
            [sys.executable, "-c", COMMAND_LINE, str(tmp_path / name)],
            env=os.environ | {"PYTHONPATH": f"{tmp_path / 'path'}{os.pathsep}{ROOT}"},
            stdout=subprocess.PIPE, text=True,
        )
        for name in ("a", "b")
    ]  # fmt: skip
    outputs = [process.communicate(timeout=120)[0] for process in started]
    assert [process.returncode for process in started] == [0, 0]
    assert all("sum 2" in output.splitlines() for output in outputs)


COMMAND_LINE = """
import sys
from pathlib import Path
from memcalc.errors import MemcalcError
from memcalc.launch import launch
from memcalc.training import Training
from memcalc.plan import Plan
try:
    launch(Plan.load(Path("plan.json")), out=Path(sys.argv[1]), training=Training(), grace_seconds=1.0,
           show=lambda line: print(line, flush=True))
except MemcalcError as error:
    print(error)
    sys.exit(error.exit_code)
"""


@pytest.fixture
def started(tmp_path: Path, talker: Callable[[str], None]) -> Iterator[subprocess.Popen[str]]:
    """A launcher whose two ranks are up and do not listen to SIGTERM."""
    talker("deaf")
    TWO.save(tmp_path / "plan.json")
    with subprocess.Popen(
        [sys.executable, "-c", COMMAND_LINE, str(tmp_path / "run")],
        env=os.environ | {"PYTHONPATH": f"{tmp_path / 'path'}{os.pathsep}{ROOT}"},
        stdout=subprocess.PIPE, text=True, bufsize=1,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        waiting = 0
        while waiting < 2:
            line = process.stdout.readline()
            assert line, "the launcher ended before its ranks were up"
            waiting += line == "waiting\n"
        yield process
        process.kill()


@needs_torch
def test_ctrl_c_leaves_no_orphan(tmp_path: Path, started: subprocess.Popen[str]) -> None:
    assert len(processes(str(tmp_path))) == 4  # the launcher, torchrun and two ranks
    started.send_signal(signal.SIGINT)
    out, _ = started.communicate(timeout=60)
    assert out.splitlines()[-1] == (
        "stopped by SIGINT; no process of the run is left; no checkpoint was written; --checkpoint-every N keeps some"
    )
    assert started.returncode == 130
    assert processes(str(tmp_path)) == []
