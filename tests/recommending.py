"""What the tests of ``memcalc recommend`` share: the command on a machine that is made up, and what it says as JSON."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from memcalc.cli.app import app
from memcalc.machine import Machine

Run = Callable[..., Result]
CPUS = Machine(gpus=(), cores=4, ram_bytes=8 * 2**30)


def recommender(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """``run("gpt2", machine=CPUS)`` in an empty folder, on a machine that is made up."""
    monkeypatch.chdir(tmp_path)

    def recommend(*words: str, machine: Machine = CPUS) -> Result:
        monkeypatch.setattr("memcalc.machine.detect", lambda: machine)
        return CliRunner().invoke(app, ["recommend", *words])

    return recommend


def asked(result: Result) -> dict[str, Any]:
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    return found
