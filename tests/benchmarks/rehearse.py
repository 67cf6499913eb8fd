"""How long rehearsals take and how much memory: processes of their own, start of torch included.

python tests/benchmarks/rehearse.py            GPT-2 over 8 ranks
python tests/benchmarks/rehearse.py --large    Llama-3-8B over 8 ranks (budget: 15 s, 1 GB) and 70B over 64 (60 s, 2 GB)
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

from timing import interleave, options, report

from memcalc.launch import environment
from memcalc.models import MODELS
from memcalc.plan import Plan

FSDP = {"strategy": "fsdp-full-shard", "micro_batch": 1, "precision": "amp-bf16"}
SMALL = {"gpt2 8 ranks": Plan(model=MODELS["gpt2"], ranks=8, tokens=1024, **FSDP)}
LARGE = {
    "llama-3-8b 8 ranks": Plan(model=MODELS["llama-3-8b"], ranks=8, tokens=4096, **FSDP),
    "llama-3-70b 64 ranks": Plan(model=MODELS["llama-3-70b"], ranks=64, tokens=4096, **FSDP),
}

most: dict[str, int] = {}
"""Peak resident set size of each side's process, in bytes."""


def rehearse(name: str, plan: Plan, folder: Path) -> float:
    """Seconds of one rehearsal."""
    path = folder / "plan.json"
    plan.save(path)
    command = [sys.executable, "-m", "trainers.rehearsal", str(path), str(folder / "rank.json")]
    started = time.perf_counter()
    process = subprocess.Popen(command, env=environment(os.environ))
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{name} failed")
    most[name] = max(most.get(name, 0), used.ru_maxrss * 1024)
    return time.perf_counter() - started


def main() -> None:
    """Each rehearsal in turn."""
    large = "--large" in sys.argv
    sys.argv = [word for word in sys.argv if word != "--large"]
    said = options(__doc__ or "", rounds=1)
    with tempfile.TemporaryDirectory() as folder:
        sides = LARGE if large else SMALL
        taken = interleave(
            {name: partial(rehearse, name, plan, Path(folder)) for name, plan in sides.items()},
            said.rounds,
            cold=said.small,
        )
    report(taken, as_json=said.json, **{f"{name} MB": round(size / 1e6) for name, size in most.items()})


if __name__ == "__main__":
    main()
