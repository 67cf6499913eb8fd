"""One recommendation over more than 100,000 plans, against a loop that plays each. Aim: under 3 seconds.

    python tests/benchmarks/recommend.py

The search runs in a fresh process, so nothing that was worked out before is there to be reused; what it takes from its
first import on counts. The loop plays and times SAMPLE of the same plans, drawn by a fixed seed, and is scaled to all.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from timing import interleave, options, ratio, report

ROOT = Path(__file__).resolve().parents[2]
SAMPLE = 8
SETUP = """
import random, sys, time
start = time.perf_counter()
from memcalc import MODELS, Plan, recommend
from memcalc.open_choices import gpu_counts
from memcalc.search import search
from memcalc.structures import structures
gpus, nodes = map(int, sys.argv[1:])
base = Plan(model=MODELS["gpt2"], tokens=1024, micro_batch=1, ranks=gpus, nodes=nodes, strategy="ddp", gpu="a100-80gb")
job = search(base, ranks=gpu_counts(gpus), per_node=8, precisions=["amp-bf16", "bf16"], offloads=[False])
"""
SEARCH = "found = recommend(job)\nprint(time.perf_counter() - start, found.tried)"
NAIVE = f"""
from memcalc.ledger import peaks
from memcalc.throughput import step_time
plans = [each.at(index) for each in structures(job) for index in range(len(each.micro_batches))]
drawn = random.Random(1).sample(plans, {SAMPLE})
start = time.perf_counter()
for plan in drawn:
    peaks(plan, [plan.micro_batch]), step_time(plan)
print((time.perf_counter() - start) / {SAMPLE} * len(plans), len(plans))
"""


def ask(code: str, size: tuple[str, str]) -> tuple[float, int]:
    """Seconds, and how many plans they are for."""
    words = [sys.executable, "-c", SETUP + code, *size]
    done = subprocess.run(words, cwd=ROOT, check=True, capture_output=True, text=True)
    seconds, plans = done.stdout.split()
    return float(seconds), int(plans)


if __name__ == "__main__":
    asked = options(str(__doc__), rounds=3)
    plans, size = 0, ("2", "1") if asked.small else ("24", "3")

    def search() -> float:
        global plans
        seconds, plans = ask(SEARCH, size)
        return seconds

    taken = interleave({"search": search, "loop, scaled": lambda: ask(NAIVE, size)[0]}, asked.rounds, cold=asked.small)
    times = round(ratio(taken, "loop, scaled", "search"))
    report(taken, as_json=asked.json, plans=plans, loop_over_search=times, aim_at_most_ms=3000)
