"""Findings, and the least versions they are held to: what ``memcalc doctor`` says and by which measure."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, NamedTuple

__all__ = ["DRIVERS", "LEAST", "MISSING", "OK", "WARNING", "Finding", "Least", "Run", "ask_torch", "version"]

OK, WARNING, MISSING = "ok", "warning", "missing"
Run = Callable[..., "subprocess.CompletedProcess[str]"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One line of the answer."""

    what: str
    status: str
    """``ok``; ``warning``, when some runs will fail or be slow; ``missing``, when none will start."""
    found: str
    cure: str = ""
    """What to do about it; empty where nothing is to be done."""


class Least(NamedTuple):
    """Versions from which something works; the first is what distributed training takes, the second what memcalc's trainers take."""

    distributed: str
    trainers: str


LEAST = {
    # Distributed training guides ask for Python 3.6, PyTorch 1.7 and CUDA 10.1; memcalc's own are those of setup.cfg, and torch
    # 2.6 comes for CUDA 11.8 and later (pytorch.org/get-started/previous-versions).
    "Python": Least("3.6", "3.10"),
    "torch": Least("1.7", "2.6"),
    "CUDA": Least("10.1", "11.8"),
}

DRIVERS = {"13": "580", "12": "525.60.13", "11": "450.80.02", "10": "418.39"}
"""The oldest Linux driver that runs programs of a CUDA release (CUDA Toolkit release notes, table 2, "minor version
compatibility"; for 10, table 3's of 10.1)."""


def version(text: str) -> tuple[int, ...]:
    """The numbers a version starts with.

    >>> version("2.6.0+cu124") < version("2.13.1"), version("?")
    (True, ())
    """
    match = re.match(r"\d+(\.\d+)*", text)
    return tuple(map(int, match[0].split("."))) if match else ()


def ask_torch(environ: Mapping[str, str], run: Run, timeout: float, *arguments: str) -> tuple[Any, str]:
    """What trainers/doctor.py says in a process of its own, or None and why not: torch may be broken, or hang."""
    if find_spec("torch") is None:
        return None, "torch is not installed"
    command = [sys.executable, "-m", "trainers.doctor", *arguments]
    try:
        done = run(command, capture_output=True, text=True, timeout=timeout, env=dict(environ), check=False)
        if done.returncode:
            lines = done.stderr.strip().splitlines()
            return None, lines[-1] if lines else f"it ended with status {done.returncode}"
        return json.loads(done.stdout.strip().splitlines()[-1]), ""
    except subprocess.TimeoutExpired:
        return None, f"no answer in {timeout:g} seconds"
    except (OSError, ValueError, IndexError) as error:
        return None, f"it cannot be asked: {error}"
