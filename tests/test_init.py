"""The public face: every name is there, whatever was imported before, and importing it costs next to nothing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import memcalc

FUNCTIONS = ("estimate", "recommend", "compare")


@pytest.mark.parametrize("name", memcalc.__all__)
def test_every_public_name_is_there(name: str) -> None:
    assert getattr(memcalc, name) is not None
    assert name in dir(memcalc)


def test_the_names_are_sorted_and_another_is_an_error() -> None:
    assert sorted(memcalc.__all__, key=lambda name: (not name.isupper(), name)) == memcalc.__all__
    with pytest.raises(AttributeError, match="no attribute 'estimates'"):
        memcalc.estimates  # noqa: B018


def python(code: str, root: Path) -> str:
    return subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize(
    "before", ["", "import memcalc.{0}; ", "from memcalc.{0} import {0}; ", "import memcalc.cli.app; "]
)
def test_a_function_is_not_hidden_by_its_module(root: Path, before: str) -> None:
    """In one process that forgets all of memcalc before each."""
    code = "import sys\n"
    for name in FUNCTIONS:
        code += "for each in [each for each in sys.modules if each.split('.')[0] == 'memcalc']: del sys.modules[each]\n"
        code += f"{before.format(name)}import memcalc; print(callable(memcalc.{name}), memcalc.{name}.__module__)\n"
    assert python(code, root) == "".join(f"True memcalc.{name}\n" for name in FUNCTIONS)


def test_importing_the_package_is_light(root: Path) -> None:
    loaded = python("import memcalc, sys; print(*sys.modules)", root).split()
    assert not {"numpy", "click", "tabulate", "memcalc.plan", "memcalc.estimate"} & set(loaded)
