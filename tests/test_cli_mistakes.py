"""The command line when it is misused: one line for every mistake, and an exit code."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

from memcalc.cli import app as app_module
from memcalc.cli.app import app
from memcalc.models import MODELS
from memcalc.plan import Plan

GPT2 = Plan(model=MODELS["gpt2-tiny"], tokens=128, micro_batch=1)

Run = Callable[..., Result]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """``run("estimate", "gpt2")`` in an empty folder."""
    monkeypatch.chdir(tmp_path)
    return lambda *words: CliRunner().invoke(app, list(words))


MISTAKES = [
    (["estimat"], "unknown command 'estimat'; did you mean 'estimate'?"),
    (["estimate"], "give a model, one of: gpt2, "),
    (["estimate", "gtp2"], "unknown model 'gtp2'; did you mean 'gpt2'?"),
    (["estimate", "gpt2", "--params", "7b"], "not both the model gpt2 and --params"),
    (["estimate", "--params", "-1"], "--params '-1' must be more than 0"),
    (["estimate", "--params", "nan"], "--params 'nan' cannot be read; write it like 1e9"),
    (["estimate", "--params", "1e400"], "--params '1e400' must be more than 0 and at most 1e18"),
    (["estimate", "--params", ""], "--params '' cannot be read"),
    (["estimate", "--params", "1.5"], "--params '1.5' is not a whole number"),
    (["estimate", "--params", "1e9", "--heads", "4"], "--heads does not apply"),
    (["estimate", "--params", "1e9", "--tokens", "4"], "--seq-len does not apply"),
    (["estimate", "--params", "1e9", "--activation-per-layer", "64KB"], "not how many layers"),
    (
        ["estimate", "--params", "1e9", "--input-shape", "3x"],
        "--input-shape '3x' cannot be read; write it like 224x224x3",
    ),
    (
        ["estimate", "gpt2", "--tensor-parallel", "5"],
        "1 rank does not divide by tensor 5 x context 1 x pipeline 1 = 5; 5 ranks would do, or tensor 1\n",
    ),
    (
        ["estimate", "gpt2", "--gpus", "100", "--pipeline-parallel", "100"],
        "pipeline 100 x chunks 1 = 100; at most 12 would do",
    ),
    (
        ["estimate", "gpt2", "--adapter", "lora", "--adapter-dropout", "nan"],
        "--adapter-dropout nan is not a finite number",
    ),
    (["estimate", "gpt2", "--dropout", "inf"], "--dropout inf is not a finite number"),
    (["estimate", "gpt2", "--freeze", ","], "freeze ',' names nothing; write it like vision,projector"),
    (["plot", "."], ". is a folder without the run.json of a run or the config.json of a model"),
    (["report", ".", "-o", "page.html"], ". is a folder without the run.json of a run or the config.json of a model"),
    (["estimate", "gpt2", "--gpus", "0"], "--gpus 0 must be at least 1"),
    (["estimate", "gpt2", "--gpus", "3", "--nodes", "2"], "3 ranks do not divide over 2 nodes"),
    (
        ["estimate", "gpt2", "--gpus", "2", "--bucket-mb", "999999999999"],
        "bucket mb 999999999999 must be at most 1000000",
    ),
    (
        ["estimate", "gpt2", "--adapter", "lora", "--adapter-rank", "5000"],
        "adapter rank 5000 must be at most the widest layer of gpt2, 3072",
    ),
    (
        ["estimate", "gpt2", "--vocab-multiple", "999999999999"],
        "vocab multiple 999999999999 must be at most 65536",
    ),
    (["estimate", "gpt2", "--heads", "5"], "5 heads do not divide hidden 768"),
    (["estimate", "gpt2", "--batch-size", "0"], "--batch-size 0 must be at least 1"),
    (["estimate", "gpt2", "--micro-batch", "1.5"], "'1.5' is not a whole number"),
    (["estimate", "gpt2", "--seq-len", "2048"], "2048 tokens are more than the 1024 positions of model 'gpt2'"),
    (["estimate", "gpt2", "--precision", "bf61"], "unknown precision 'bf61'; did you mean 'bf16'?"),
    (["estimate", "gpt2", "--gpu", "a100-80"], "did you mean 'a100-80gb'?"),
    (["estimate", "gpt2", "--checkpointing", "ful"], "did you mean 'full'?"),
    (["estimate", "gpt2", "--checkpointing", "every-0"], "write it like every-2"),
    (["estimate", "gpt2", "--dropout", "nan"], "--dropout nan is not a finite number"),
    (["estimate", "gpt2", "--adam", "--optimizer", "sgd"], "--adam and --optimizer sgd contradict each other"),
    (["estimate", "gpt2", "--batchsize", "8"], "--batch-size"),
    (["estimate", "gpt2", "--heads"], "requires an argument"),
    (["estimate", "gpt2", "more"], "unexpected extra argument"),
    (["estimate", "gpt2", "--check"], "--check needs --gpu NAME"),
    (["estimate", "gpt2", "--save-plan", "no/folder/plan.json"], "cannot be written: there is no folder no/folder"),
    (["estimate", "gpt2", "--save-plan", ""], "--save-plan '' is not a path"),
    (["estimate", "--params", "1e9", "--input-shape", "3x0"], "--input-shape 0 must be at least 1"),
    (["bench", ""], "FILE '' is not a path"),
    (["estimate", "--plan", "missing.json"], "missing.json does not exist"),
    (["estimate", "--plan", "."], "is a folder"),
    (["estimate", "--plan", "missing.json", "--adam"], "says the whole plan; leave out --adam"),
    (["estimate", "gpt2", "--layers", "1000000000000"], "layers 1000000000000 must be at most 10000"),
    (["estimate", "gpt2", "--batch-size", "1000000000000"], "more than 4 EiB"),
    (["estimate", "--params", "1e18"], "more than 4 EiB"),
    (
        ["estimate", "gpt2", "--gpus", "1000000000", "--strategy", "zero-1"],
        "--gpus 1000000000 must be at most 1,000,000",
    ),
]


@pytest.mark.parametrize(
    ("words", "message"), MISTAKES, ids=lambda value: " ".join(value) if isinstance(value, list) else ""
)
def test_a_mistake_costs_one_line(run: Run, words: list[str], message: str) -> None:
    result = run(*words)
    assert_refused(result, message)
    assert not os.listdir(), "nothing may be written"


def assert_refused(result: Result, message: str) -> None:
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert len(result.stderr.splitlines()) == 1
    assert result.stderr.startswith("memcalc: ")
    assert message in result.stderr


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b"  \n", "is empty"),
        (b"\x80\x81\x00\xff", "it is not UTF-8 text"),
        (b"{", "is not valid JSON"),
        (b"[" * 100_000, "is not valid JSON"),
        (b"{}", "is not a memcalc plan"),
        (GPT2.to_json().replace('"memcalc_plan": 1', '"memcalc_plan": 2').encode(), "update memcalc"),
        (GPT2.to_json().replace('"gpt2-tiny"', '"two\\nlines \\u001b[31m \\ud800"').replace('"heads": 4', '"heads": 5').encode(),
         "5 heads do not divide"),
    ],
)  # fmt: skip
def test_a_plan_file_that_is_none_costs_one_line(run: Run, content: bytes, message: str) -> None:
    Path("plan.json").write_bytes(content)
    assert_refused(run("estimate", "--plan", "plan.json"), message)
    assert os.listdir() == ["plan.json"]


def test_a_plan_that_may_not_be_read_costs_one_line(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    GPT2.save(Path("plan.json"))
    if os.geteuid():
        Path("plan.json").chmod(0)
    else:  # root may read everything
        monkeypatch.setattr(Path, "read_bytes", _denied)
    assert_refused(run("estimate", "--plan", "plan.json"), "permission denied")


def _denied(*_: object, **__: object) -> bytes:
    raise PermissionError(13, "Permission denied")


def test_a_name_from_a_file_cannot_write_to_the_terminal(run: Run) -> None:
    Path("plan.json").write_text(GPT2.to_json().replace('"gpt2-tiny"', '"two\\nlines \\u001b[31m \\ud800"'))
    text = run("estimate", "--plan", "plan.json").output
    assert "two lines ?[31m ?: " in text
    assert "\033" not in text


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (KeyboardInterrupt(), 130, "interrupted"),
        (MemoryError(), 2, "this machine has too little free memory"),
        (RecursionError("too deep"), 70, "internal error RecursionError 'too deep'; please report it"),
        (ZeroDivisionError(), 70, "internal error ZeroDivisionError; please report it"),
        (OSError(28, "No space left on device"), 2, "no space left on device"),
    ],
)
def test_a_failure_is_one_line_and_a_code(
    run: Run, monkeypatch: pytest.MonkeyPatch, error: BaseException, code: int, line: str
) -> None:
    @click.command()
    def broken() -> None:
        raise error

    monkeypatch.setattr(app_module.App, "get_command", lambda *_: broken)
    result = run("estimate")
    assert result.exit_code == code
    assert line in result.stderr
    assert len(result.stderr.split("\n")) <= 3
    assert "Traceback" not in result.stderr
    assert "Traceback" in run("--debug", "estimate").stderr


def memcalc_process(*words: str, **settings: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "memcalc", *words], text=True, **settings)  # type: ignore[call-overload,no-any-return]


def test_a_reader_that_leaves_early_is_no_error(root: Path) -> None:
    read, write = os.pipe()
    os.close(read)
    try:
        done = memcalc_process("estimate", "gpt2-tiny", cwd=root, stdout=write, stderr=subprocess.PIPE)
    finally:
        os.close(write)
    assert done.stderr == ""


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_behind_the_output_costs_one_line(root: Path) -> None:
    with open("/dev/full", "w") as full:
        done = memcalc_process("estimate", "gpt2-tiny", cwd=root, stdout=full, stderr=subprocess.PIPE)
    assert done.returncode == 2
    assert done.stderr.splitlines() == ["memcalc: no space left on device"]


def test_a_terminal_without_a_character_gets_question_marks(root: Path) -> None:
    environment = os.environ | {"PYTHONIOENCODING": "cp866"}
    done = memcalc_process("estimate", "gpt2-tiny", "--explain", cwd=root, env=environment, capture_output=True)
    assert done.returncode == 0
    assert "256 ? 64 ? 4 B" in done.stdout


@pytest.mark.parametrize("words", [["--help"], ["estimate", "gpt2"], ["estimate", "--params", "1e9", "--adam"]])
def test_torch_is_never_needed(root: Path, words: list[str]) -> None:
    code = "import sys; sys.modules['torch'] = None; from memcalc.cli import main; main()"
    done = subprocess.run([sys.executable, "-c", code, *words], cwd=root, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_cold_start_loads_only_what_an_estimate_needs(root: Path) -> None:
    code = (
        "import sys, atexit; atexit.register(lambda: print(*sorted(sys.modules), file=sys.stderr));"
        "from memcalc.cli import main; main()"
    )
    done = subprocess.run([sys.executable, "-c", code, "estimate", "gpt2"], cwd=root, capture_output=True, text=True)
    loaded = set(done.stderr.split())
    assert "memcalc.ledger" in loaded
    assert not loaded & {"torch", "trainers", "memcalc.recommend", "memcalc.launch", "memcalc.compare"}
    done = subprocess.run([sys.executable, "-c", code, "--version"], cwd=root, capture_output=True, text=True)
    assert not set(done.stderr.split()) & {"numpy", "tabulate", "memcalc.plan"}
