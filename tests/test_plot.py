"""``memcalc plot``: files are whole or not there, mistakes are one line, and text needs no matplotlib."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import Result

from tests.pictured import TINY

Run = Callable[..., Result]


def test_files_of_both_kinds_carry_their_text(run: Run, tmp_path: Path) -> None:
    for name, start in (("a.png", b"\x89PNG\r\n"), ("b.svg", b"<?xml")):
        result = run("plot", "gpt2-tiny", "--gpu", "t4", "-o", name)
        assert result.exit_code == 0, result.output
        data = (tmp_path / name).read_bytes()
        assert data.startswith(start) and len(data) < 500_000
        assert result.output.startswith(f"{name}: Memory of one training step of gpt2-tiny")
        assert b"Memory of one training step of gpt2-tiny" in data
    assert run("plot", "gpt2-tiny", "--gpu", "t4", "-o", "again.svg").exit_code == 0
    assert (tmp_path / "again.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()
    assert b'href="http' not in (tmp_path / "b.svg").read_bytes()
    words = ["plot", "gpt2-tiny", "--gpus", "2", "--gpu", "t4", "--against", "micro-batch", "--values", "1,64"]
    result = run(*words, "--strategy", "ddp", "--strategy", "zero-1", "--theme", "dark", "-o", "sweep.png")
    assert result.exit_code == 0 and "zero-1: " in result.output, result.output
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.png", "again.svg", "b.svg", "sweep.png"]


def test_a_line_that_leaves_a_sweep_s_figure_says_how_far(run: Run, tmp_path: Path) -> None:
    words = ["plot", "gpt2-tiny", "--gpu", "t4", "--against", "micro-batch", "-o", "sweep.svg", "--values"]
    for values, above in (("1,64", False), ("1,99999", True)):
        assert run(*words, values).exit_code == 0
        assert ("go on above: single " in (tmp_path / "sweep.svg").read_text(encoding="utf-8")) == above


@pytest.mark.parametrize(("words", "said"), [
    (["-o", "x.html"], "'x.html' is no figure; for a page: memcalc report with the same model and -o"),
    (["-o", "x.gif"], "'x.gif' says no format of a figure; end its name in .png or .svg"),
    (["-o", "x.png", "--format", "csv"], "--format csv is for the terminal, -o writes a picture; leave one out"),
    (["--values", "1,2"], "--values are those of --against; say against what"),
    (["--strategy", "ddp", "--strategy", "zero-1"], "several strategies are compared with --against"),
    (["--against", "width"], "unknown axis 'width'"),
    (["--against", "micro-batch", "--values", "1,x"], "--values 'x' is not a whole number"),
    (["--against", "micro-batch", "--values", ",".join(map(str, range(1, 99)))], "a figure has room for 64"),
    (["--against", "gpus", "--rehearse"], "--rehearse is for the timeline of one step"),
    (["--against", "gpus", "--values", "3", "--nodes", "2", "--gpus", "2"], "3 ranks do not divide over 2 nodes"),
    (["--width", "10"], "--width 10 must be at least 40"),
    (["-o", "no/such/place.png"], "cannot be written"),
])  # fmt: skip
def test_mistakes_are_one_line_and_write_nothing(run: Run, tmp_path: Path, words: list[str], said: str) -> None:
    result = run("plot", "gpt2-tiny", *words)
    assert result.exit_code == 2 and "Traceback" not in result.output
    assert said in result.output and list(tmp_path.iterdir()) == []


def test_what_has_no_activations_has_nothing_to_grow_with(run: Run) -> None:
    result = run("plot", "--params", "7b", "--against", "micro-batch")
    assert result.exit_code == 2 and "changes nothing: no activations" in result.output
    result = run("plot", "resnet-50", "--against", "seq-len")
    assert result.exit_code == 2 and "reads no tokens" in result.output


def test_without_matplotlib_text_works_and_a_file_is_refused_in_one_line(root: Path, tmp_path: Path) -> None:
    code = (
        "import sys; sys.modules['matplotlib'] = None; import importlib.util as u; real = u.find_spec\n"
        "u.find_spec = lambda name, *a: None if name == 'matplotlib' else real(name, *a)\n"
        "from memcalc.cli import main; main()"
    )

    def plot(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", code, "plot", "gpt2-tiny", *words]
        return subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=300)

    done = plot()
    assert done.returncode == 0 and "^ the peak" in done.stdout, done.stderr
    done = plot("-o", str(tmp_path / "x.png"))
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "needs matplotlib: pip install" in done.stderr and list(tmp_path.iterdir()) == []


def test_a_plan_says_all_but_the_strategies_of_a_sweep(run: Run, tmp_path: Path) -> None:
    replace(TINY, gpu="t4", ranks=2, strategy="ddp").save(tmp_path / "plan.json")
    assert run("plot", "plan.json").exit_code == 0
    result = run("plot", "plan.json", "--strategy", "zero-1")
    assert result.exit_code == 2 and "plan.json says the whole plan; leave out --strategy" in result.output
    result = run(
        "plot", "plan.json", "--against", "micro-batch", "--values", "1,2", "--strategy", "zero-1", "--format", "csv"
    )
    assert result.exit_code == 0 and "zero-1,micro-batch,2," in result.output, result.output
