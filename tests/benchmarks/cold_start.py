"""A cold `memcalc estimate gpt2` against importing the three packages it stands on. Aim: at most twice as long.

python tests/benchmarks/cold_start.py
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from timing import interleave, options, ratio, report

ROOT = Path(__file__).resolve().parents[2]
ESTIMATE = ["-m", "memcalc", "estimate", "gpt2", "--micro-batch", "8", "--precision", "amp-bf16", "--gpu", "a100-80gb"]
IMPORTS = ["-c", "import click, tabulate, numpy"]


def python(arguments: list[str]) -> Callable[[], object]:
    return lambda: subprocess.run([sys.executable, *arguments], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)


if __name__ == "__main__":
    asked = options(str(__doc__), rounds=15)
    taken = interleave(
        {"memcalc estimate gpt2": python(ESTIMATE), "the imports alone": python(IMPORTS)},
        asked.rounds,
        cold=asked.small,
    )
    times = round(ratio(taken, "memcalc estimate gpt2", "the imports alone"), 3)
    report(taken, as_json=asked.json, ratio=times, aim_at_most=2)
