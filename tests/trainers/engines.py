"""Whether the engines that others make are here: in CI they have to be, elsewhere their tests are left out."""

from __future__ import annotations

import importlib.util
import os
import shutil

import pytest

__all__ = ["need"]


def need(*packages: str) -> None:
    """Leave a module of tests out where a package, or the compiler that DeepSpeed takes, is not there."""
    lacking = [name for name in packages if importlib.util.find_spec(name) is None]
    if "deepspeed" in packages and not lacking and shutil.which(os.environ.get("CXX", "c++")) is None:
        lacking = ["a C++ compiler"]
    if lacking and not os.environ.get("CI"):
        pytest.skip(f"{' and '.join(lacking)} not installed", allow_module_level=True)
    assert not lacking, f"{lacking} not installed: these tests may not be left out in CI"
