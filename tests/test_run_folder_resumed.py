"""How a run goes on in its folder: what a stopped one says, and what a resumed one is trained by."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from memcalc.cli.app import app
from memcalc.errors import FileError, PlanError
from memcalc.models import MODELS
from memcalc.run_folder import continued, newest_checkpoint
from memcalc.supervise import Stopped
from tests.launching import CHECKPOINT, PLAN, checkpoint, refused, run

pytestmark = pytest.mark.usefixtures("machine")


def test_nothing_to_resume(tmp_path: Path) -> None:
    refused(PLAN, tmp_path, "no run with a checkpoint", FileError, resume=True)
    (tmp_path / "checkpoints" / "step-7").mkdir(parents=True)  # cut off while it was written
    refused(PLAN, tmp_path, "no run with a checkpoint", FileError, resume=True)
    checkpoint(tmp_path, 5)
    assert newest_checkpoint(tmp_path) == (5, tmp_path / "checkpoints" / "step-5")
    replace(PLAN, model=MODELS["llama-tiny"]).save(tmp_path / "plan.json")
    refused(PLAN, tmp_path, "a run with another model", PlanError, resume=True)


# -- going on ----------------------------------------------------------------------------------------


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
    Path("book.txt").write_text("text" * 99)
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
        "--steps 420 --seed 7 --learning-rate 0.001 --clip 1.0 --eval-every 0 --checkpoint-every 100 --measure-steps 3 --keep-checkpoints 0 "
        f"--data {tmp_path}/there/book.txt --resume"
    )


def test_what_is_given_wins_and_is_said(interrupted: Path, stub: Callable[[str], None], tmp_path: Path) -> None:
    (tmp_path / "other.txt").write_text("text" * 99)
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
    (tmp_path / "other.txt").write_text("text" * 99)
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
            f"nothing to do and nothing changed: {interrupted} is at step 300, and --steps {steps} are steps in all; give "
            "more to go on",
        ],
    )
    assert {path: path.read_bytes() for path in interrupted.rglob("*") if path.is_file()} == before
