"""How a run goes on in its folder: what a stopped one says, and what a resumed one is trained by."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from memcalc.checkpoints import digest, newest_checkpoint
from memcalc.cli.app import app
from memcalc.errors import FileError, PlanError
from memcalc.models import MODELS
from memcalc.run_folder import continued
from memcalc.supervise import Stopped
from tests.launching import PLAN, checkpoint, marker, refused, run, saves

pytestmark = pytest.mark.usefixtures("machine")


def test_nothing_to_resume(tmp_path: Path) -> None:
    refused(PLAN, tmp_path, "no run with a checkpoint", FileError, resume=True)
    (tmp_path / "checkpoints" / "step-7").mkdir(parents=True)  # cut off while it was written
    torn = r"no run with a checkpoint; nothing to resume: .*step-7 was cut off while it was saved$"
    refused(PLAN, tmp_path, torn, FileError, resume=True)
    checkpoint(tmp_path, 5)
    assert newest_checkpoint(tmp_path) == (5, tmp_path / "checkpoints" / "step-5")
    refused(
        PLAN,
        tmp_path,
        r"plan\.json does not exist; .* put the one there that the run was started with",
        FileError,
        resume=True,
    )
    replace(PLAN, model=MODELS["llama-tiny"]).save(tmp_path / "plan.json")
    refused(PLAN, tmp_path, "a run with another model", PlanError, resume=True)


@pytest.mark.parametrize(
    ("files", "whose", "cure"),
    [
        (["latest", "zero_to_fp32.py", "global_step3/mp_rank_00_model_states.pt"], "a checkpoint of DeepSpeed's own",
         r"python (\S+)/zero_to_fp32.py \1 WEIGHTS --safe_serialization writes weights that torch reads"),
        (["latest_universal", "zero_to_fp32.py", "global_step3_u/zero/h.0.weight/fp32.pt"],
         "a universal checkpoint of DeepSpeed's", "python .*zero_to_fp32.py .* in the folder that it was made of, writes"),
        (["checkpoint-20/trainer_state.json"], "a checkpoint of accelerate's", "accelerate merge-weights"),
    ],
)  # fmt: skip
def test_what_another_engine_saved_is_named_and_not_read(
    tmp_path: Path, files: list[str], whose: str, cure: str
) -> None:
    for name in files:
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).write_bytes(b"not a pickle")
    said = f"has {whose}, whose pickles memcalc does not read; {cure}.*; a run of its own takes another --out"
    refused(PLAN, tmp_path, said, FileError, resume=True)
    done = CliRunner().invoke(app, ["launch", "none.json", "--out", str(tmp_path), "--resume"])
    assert done.exit_code == 2


# -- going on ----------------------------------------------------------------------------------------


STOP = "os.kill(os.getppid(), signal.SIGINT); time.sleep(60)"


def test_a_stopped_run_says_how_to_go_on(tmp_path: Path, stub: Callable[[str], None]) -> None:
    stub(saves(300) + STOP)
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
    stub(saves(300) + STOP)
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


def test_a_missing_record_of_the_training_can_be_given_again(interrupted: Path, stub: Callable[[str], None]) -> None:
    (interrupted / "training.json").unlink()
    result = resume(interrupted)
    assert result.exit_code == 2
    assert "training.json, which says how the run was trained, is missing; give its options again" in result.output
    stub(SHOW)
    lines = resume(interrupted, "--steps", 500).output.splitlines()
    assert "training.json is missing: data None, steps 500, seed 0, learning rate 0.0003, and what else" in lines[0]
    assert "--steps 500 --seed 0" in lines[-2]


STEP = "checkpoints/step-300"
DAMAGED: dict[str, tuple[str, bytes | None, str]] = {
    "an empty plan": ("plan.json", b"", "plan.json is empty; expected JSON; the checkpoints beside it"),
    "a torn plan": ("plan.json", b'{"memcalc_plan": 1, "mod', "is not valid JSON"),
    "a foreign plan": ("plan.json", b"[]", "is not a memcalc plan"),
    "no plan": ("plan.json", None, "plan.json does not exist; the checkpoints beside it do not say the whole plan"),
    "an empty marker": (f"{STEP}/done.json", b"", "step-300/done.json is empty; expected JSON; remove "),
    "a torn marker": (f"{STEP}/done.json", b'{"step": 3', "step-300/done.json is not valid JSON"),
    "a marker that is a list": (f"{STEP}/done.json", b"[]", "step-300/done.json: expected an object"),
    "a marker without a step": (f"{STEP}/done.json", b"{}", "done.json: missing 5 required keyword-only arguments"),
    "a marker of another step": (
        f"{STEP}/done.json",
        b"step 7",
        "done.json is of step 7 with 7 losses, not of step-300",
    ),
    "an empty part": (f"{STEP}/__0_0.distcp", b"", "step-300/__0_0.distcp is cut off: it has 0 bytes of 9; remove "),
    "a torn part": (f"{STEP}/__0_0.distcp", b"12345678", "step-300/__0_0.distcp is cut off: it has 8 bytes of 9"),
    "no part": (f"{STEP}/__0_0.distcp", None, "step-300/__0_0.distcp is missing; remove "),
    "no list": (f"{STEP}/.metadata", None, "step-300/.metadata cannot be read: no such file or directory"),
    "a foreign list": (f"{STEP}/.metadata", b"other", "step-300/.metadata is not the one that was written"),
    "a folder in a file's place": ("weights/model.safetensors/x", b"", "is a folder where the run writes a file; move"),
    "a file in a folder's place": ("measured", b"", "measured is a file where the run has a folder; move it away"),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_what_is_damaged_is_named_with_its_cure(interrupted: Path, name: str) -> None:
    file, content, message = DAMAGED[name]
    step = interrupted / STEP
    (step / "__0_0.distcp").write_bytes(b"123456789")
    replace(marker(300), files={"__0_0.distcp": 9}, index=digest(step)).save(step)
    path = interrupted / file
    path.parent.mkdir(parents=True, exist_ok=True)
    if content == b"step 7":
        replace(marker(7)).save(step)
    elif content is None:
        path.unlink()
    else:
        path.write_bytes(content)
    before = {path: path.stat().st_mtime_ns for path in interrupted.rglob("*")}
    result = resume(interrupted)
    assert (result.exit_code, result.output.count("\n")) == (2, 1), result.output
    assert message in result.output
    assert {path: path.stat().st_mtime_ns for path in interrupted.rglob("*")} == before
    if STEP in file:
        assert f"remove {step}: the run has no other checkpoint, and must start anew" in result.output
        checkpoint(interrupted, 200)
        assert f"remove {step}: the run goes on from step 200" in resume(interrupted).output


def test_a_checkpoint_of_another_optimizer(interrupted: Path) -> None:
    replace(marker(300), optimizer="sgd").save(interrupted / STEP)
    result = resume(interrupted)
    assert result.exit_code == 2
    assert "was saved by a run with another model or optimizer; a resumed run keeps both" in result.output


def test_a_checkpoint_by_another_name_is_no_reason_to_do_nothing(interrupted: Path) -> None:
    (interrupted / STEP).rename(interrupted / "checkpoints" / "step-999999")
    result = resume(interrupted, "--steps", 400)
    assert result.exit_code == 2
    assert "done.json is of step 300 with 300 losses, not of step-999999; remove " in result.output


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
