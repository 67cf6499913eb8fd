"""What the command line is to a shell and to somebody who reads its help: completion, examples, groups, progress, colours."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from memcalc.cli import progress
from memcalc.cli.app import COMMANDS, GROUPS, app
from memcalc.cli.completion import SHELLS
from memcalc.hardware import GPUS
from memcalc.models import MODELS
from memcalc.tables import coloured

CONTEXT = click.Context(app, info_name="memcalc")
THERE = app.list_commands(CONTEXT)


def help_of(*words: str) -> str:
    return CliRunner().invoke(app, [*words, "--help"]).output


def examples(name: str) -> list[str]:
    """Lines of a command's help that begin with the command."""
    command = app.get_command(CONTEXT, name)
    assert command is not None and command.epilog is not None, f"{name} has no examples"
    return re.findall(rf"^  (memcalc {name}\b.*)$", command.epilog, re.MULTILINE)


@pytest.mark.parametrize("name", THERE)
def test_every_command_has_an_example_that_parses(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run").mkdir()
    for file in ("plan.json", "run/plan.json", "run/run.json"):
        (tmp_path / file).write_text("{}")
    lines = examples(name)
    assert lines
    command = app.get_command(CONTEXT, name)
    assert command is not None
    for line in lines:
        words = shlex.split(re.split(r" >>? ", line)[0], comments=True)
        command.make_context(name, words[2:])


def test_every_command_stands_in_one_group(root: Path) -> None:
    written = {path.stem.replace("_", "-") for path in (root / "memcalc" / "cli").glob("*.py")
               if re.search(r"^@click\.command\(", path.read_text(encoding="utf-8"), re.MULTILINE)}  # fmt: skip
    assert written == set(THERE)
    assert len(set(COMMANDS)) == len(COMMANDS)
    text = help_of()
    sections = [purpose for purpose, names in GROUPS.items() if set(names) & set(THERE)]
    assert [text.index(f"\n{purpose}:\n") for purpose in sections] == sorted(text.index(f"\n{p}:\n") for p in sections)
    for name in THERE:
        assert len(re.findall(rf"^  {name}  +\S", text, re.MULTILINE)) == 1


def test_the_help_fits_eighty_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    commands = help_of().partition("\nPredict:")[2].partition("Examples:")[0]
    assert max(map(len, commands.splitlines())) <= 80


@pytest.fixture(scope="module")
def shell(root_of_all: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """An environment in which ``memcalc`` is a command."""
    folder = tmp_path_factory.mktemp("bin")
    program = folder / "memcalc"
    program.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m memcalc "$@"\n', encoding="utf-8")
    program.chmod(0o755)
    return os.environ | {"PATH": f"{folder}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": str(root_of_all)}


@pytest.fixture(scope="module")
def root_of_all() -> Path:
    return Path(__file__).resolve().parent.parent


def completed(shell: dict[str, str], *words: str) -> list[str]:
    """What bash offers for the last of these words."""
    given = " ".join(map(shlex.quote, words))
    script = (
        f"source <(memcalc completion bash); COMP_WORDS=({given}); COMP_CWORD={len(words) - 1}; "
        '_memcalc_completion memcalc; printf "%s\\n" "${COMPREPLY[@]}"'
    )
    done = subprocess.run(["bash", "-c", script], env=shell, capture_output=True, text=True, timeout=300, check=True)
    return done.stdout.split()


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash here")
@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (("memcalc", "est"), ["estimate"]),
        (("memcalc", "estimate", "gpt2-"), [name for name in MODELS if name.startswith("gpt2-")]),
        (("memcalc", "recommend", "gpt2", "--gpu", "A100"), [name for name in GPUS if name.startswith("a100")]),
        (("memcalc", "estimate", "gpt2", "--strategy", "deepspeed-"), [f"deepspeed-{stage}" for stage in range(4)]),
        (("memcalc", "estimate", "gpt2", "--offload-opt"), ["--offload-optimizer", "--offload-optimizer-buffers"]),
    ],
)  # fmt: skip
def test_bash_completes(shell: dict[str, str], words: tuple[str, ...], offered: list[str]) -> None:
    assert completed(shell, *words) == offered


@pytest.mark.parametrize("shell_name", SHELLS)
def test_each_shell_has_its_script(shell_name: str) -> None:
    done = CliRunner().invoke(app, ["completion", shell_name])
    assert done.exit_code == 0
    assert f"_MEMCALC_COMPLETE={shell_name}_complete" in done.output


def test_a_shell_without_a_script_is_one_line() -> None:
    done = CliRunner().invoke(app, ["completion", "bassh"])
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr == "memcalc: unknown shell 'bassh'; did you mean 'bash'? known: bash, fish, zsh\n"


def test_who_watches_no_terminal_gets_a_line_now_and_then(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = iter(range(0, 100, 2))
    monkeypatch.setattr(progress, "EVERY", 5.0)
    monkeypatch.setattr(progress.time, "monotonic", lambda: float(next(clock)))
    assert list(progress.counted("abcdefg", "rows")) == list("abcdefg")
    assert capsys.readouterr().err == "memcalc: 2 of 7 rows\nmemcalc: 5 of 7 rows\n"


def test_a_terminal_gets_a_counter_that_is_wiped(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress.sys.stderr, "isatty", lambda: True, raising=False)
    assert list(progress.counted("ab", "rows")) == ["a", "b"]
    assert capsys.readouterr().err == "\r0 of 2 rows\r1 of 2 rows\r" + " " * 12 + "\r"


def test_one_long_call_says_that_it_goes_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "EVERY", 0.02)
    with progress.waiting("still plays"):
        progress.time.sleep(0.2)
    lines = capsys.readouterr().err.splitlines()
    assert lines and all(re.fullmatch(r"memcalc: still plays, \d+ s", line) for line in lines)


@pytest.mark.parametrize(("gpu", "code"), [("a100-80gb", 32), ("t4", 31)])
def test_a_verdict_is_coloured_on_a_terminal_only(monkeypatch: pytest.MonkeyPatch, gpu: str, code: int) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    words = [
        "estimate",
        "--params",
        "1.5e9",
        "--adam",
        "--batch-size",
        "1",
        "--input-shape",
        "4",
        "--layers",
        "2",
        "--gpu",
        gpu,
    ]
    on, off = (CliRunner().invoke(app, words, color=color).output for color in (True, False))
    assert f"  \033[{code}mverdict: " in on
    assert "\033" not in off
    assert "\033" not in CliRunner().invoke(app, [*words, "--format", "markdown"], color=True).output
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\033" not in CliRunner().invoke(app, words, color=True).output
    assert coloured("it", "fits") == "it"
