"""What all tests share: the checkout as working directory for commands, and the trainers only where torch is."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner, Result
from hypothesis import settings

from memcalc import launch as launch_module
from memcalc.cli import progress
from memcalc.cli.app import app

# A machine busy with something else is not a failure. Where CI is set, as Hypothesis itself has it, examples are the
# same each time; runs by hand go on exploring. A plan takes some 30 ms to play, so a law costs about two seconds.
settings.register_profile("memcalc", deadline=None, max_examples=60, derandomize=bool(os.environ.get("CI")))
settings.load_profile("memcalc")

ROOT = Path(__file__).resolve().parent.parent
# What somebody measured on this machine would change times and bytes.
os.environ["MEMCALC_CALIBRATION"] = str(ROOT / "no-such-calibration.json")
# pytest-xdist says 80 to its workers; what is printed into a file has no width.
os.environ.pop("COLUMNS", None)
# A busy machine would put lines among those that a test reads.
progress.EVERY = 3600.0
TORCH = importlib.util.find_spec("torch") is not None
collect_ignore = [] if TORCH else ["trainers", "benchmarks"]

# What trains, runs the commands of the docs, or reads all published facts: begun last, it would keep one of two workers
# busy when the other is done.
LONGEST = (
    "tests/trainers/test_matrix", "tests/trainers/test_knobs", "tests/trainers/", "tests/test_docs", "tests/test_bench",
    "tests/benchmarks/",
)  # fmt: skip


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The files of longest tests first."""
    items.sort(
        key=lambda item: next((at for at, name in enumerate(LONGEST) if item.nodeid.startswith(name)), len(LONGEST))
    )


@pytest.fixture
def root() -> Path:
    """The top of the checkout."""
    return ROOT


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """``run("estimate", "gpt2")`` in an empty folder."""
    monkeypatch.chdir(tmp_path)
    return lambda *words: CliRunner().invoke(app, list(words))


@pytest.fixture
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
            launch_module, "command", lambda ranks, module, *words, **how: [sys.executable, "-c", text, *words]
        )

    return use
