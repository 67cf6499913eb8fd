"""Plants one fault at a time in a copy of the tree and shows that the torch-free tests catch it.

    python tests/mutation.py            # all, several minutes
    python tests/mutation.py bucket     # those whose name contains the word

A fault that no test catches is a term nobody checks. Exits 1 when there is one.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from faults import FAULTS, Fault

ROOT = Path(__file__).resolve().parent.parent
# What starts processes or reads the sources says nothing about the numbers.
SKIPPED = ["trainers", "benchmarks", "test_docs.py", "test_imports.py", "test_launch.py", "test_machine.py"]
SKIPPED += [
    "test_launch_torchrun.py",
    "test_mutation.py",
    "test_run_folder.py",
    "test_run_folder_resumed.py",
    "test_supervise.py",
    "test_launch_failures.py",
]
TESTS = ["memcalc", "tests", *(f"--ignore=tests/{name}" for name in SKIPPED)]
PYTEST = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *TESTS]


def failing(tree: Path, fault: Fault | None) -> str | None:
    """The first test that fails with the fault planted (None: with the tree as it is); None when all pass."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(shutil.copytree(tree, Path(folder) / "tree"))
        if fault is not None:
            fault.plant(copy)
        done = subprocess.run(PYTEST, cwd=copy, capture_output=True, text=True)
    if done.returncode == 0:
        return None
    lines = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    if not lines:
        raise SystemExit(done.stdout + done.stderr)
    return lines[0].split(" - ")[0]


def main(words: list[str]) -> int:
    """Plant the faults whose names hold all words; 1 when one is not caught."""
    chosen = [fault for fault in FAULTS if all(word in fault.name for word in words)]
    missed = 0
    with tempfile.TemporaryDirectory() as folder:
        # One copy at the start, so that who goes on working meanwhile does not change what is tested.
        tree = Path(folder) / "tree"
        shutil.copytree(ROOT, tree, ignore=shutil.ignore_patterns(".*", "runs", "_build", "__pycache__"))
        if test := failing(tree, None):
            raise SystemExit(f"without any fault: {test}")
        for fault in chosen:
            test = failing(tree, fault)
            missed += test is None
            print(f"{fault.name:<50} {test or 'NOT CAUGHT'}", flush=True)
    print(f"{len(chosen) - missed} of {len(chosen)} caught")
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
