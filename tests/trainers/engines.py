"""Whether the engines that others make are here: in CI they have to be, elsewhere their tests are left out."""

from __future__ import annotations

import importlib.util
import os
import shutil

import pytest

__all__ = ["lacking", "need"]


def lacking(*packages: str) -> list[str]:
    """What is missing of packages and the compiler that DeepSpeed takes. Raises AssertionError where that is CI."""
    found = [name for name in packages if importlib.util.find_spec(name) is None]
    if "deepspeed" in packages and not found and shutil.which(os.environ.get("CXX", "c++")) is None:
        found = ["a C++ compiler"]
    assert not (found and os.environ.get("CI")), f"{found} not installed: these tests may not be left out in CI"
    return found


def need(*packages: str) -> None:
    """Leave a module of tests out where something is missing."""
    if missing := lacking(*packages):
        pytest.skip(f"{' and '.join(missing)} not installed", allow_module_level=True)
