"""One recommendation over a thousand candidate plans, from a cold start. Aim: under 2 seconds.

    python tests/benchmarks/recommend.py

Each turn is a fresh process, so nothing that was worked out before is there to be reused. The other side asks for
one plan of the same search: the difference is what the candidates cost.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from timing import interleave, options, report

ROOT = Path(__file__).resolve().parents[2]
SEARCH = """
import sys
from memcalc import MODELS, PRECISIONS, Plan, recommend
base = Plan(model=MODELS["gpt2"], tokens=1024, micro_batch=1, ranks=8, strategy="ddp", gpu="a100-80gb")
found = recommend(base, **({"precisions": list(PRECISIONS)} | eval(sys.argv[1])))
print(found.tried)
"""
ONE = "dict(strategies=['ddp'], micro_batches=[8], checkpoints=[0], precisions=['fp32'])"


def ask(choices: str) -> Callable[[], int]:
    def run() -> int:
        command = [sys.executable, "-c", SEARCH, choices]
        return int(subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout)

    return run


if __name__ == "__main__":
    asked = options(str(__doc__), rounds=5)
    all_of_them = ask("{}")
    taken = interleave({"all candidates": all_of_them, "one candidate": ask(ONE)}, asked.rounds)
    report(taken, as_json=asked.json, candidates=all_of_them(), aim_at_most_ms=2000)
