"""What all tests share: the checkout as working directory for commands, and the trainers only where torch is."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from hypothesis import settings

# A machine busy with something else is not a failure.
settings.register_profile("memcalc", deadline=None)
settings.load_profile("memcalc")

ROOT = Path(__file__).resolve().parent.parent
TORCH = importlib.util.find_spec("torch") is not None
collect_ignore = [] if TORCH else ["trainers", "benchmarks"]


@pytest.fixture
def root() -> Path:
    """The top of the checkout."""
    return ROOT
