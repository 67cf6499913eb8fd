"""The training loop against a bare PyTorch loop with the same model, batches, clipping and optimizer.

    python tests/benchmarks/train_loop.py

Aim: at least 0.97 of the bare loop's tokens per second. On a GPU when there is one, else on one CPU core.
"""

from __future__ import annotations

import time
from dataclasses import replace

import torch
from timing import interleave, options, ratio, report

from memcalc import MODELS, Plan
from memcalc.training import Training
from trainers.backends import prepare
from trainers.batches import Batches
from trainers.loop import train
from trainers.models import build, criterion
from trainers.process import Process, Rank, join

STEPS = 8
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PLAN = Plan(
    model=MODELS["gpt2-small-text"], tokens=256, micro_batch=4, device=DEVICE,
    optimizer_kind="foreach" if DEVICE == "cuda" else "for-loop",
)  # fmt: skip
SMALL = replace(PLAN, model=MODELS["gpt2-tiny"], tokens=32)
SETTINGS = Training(steps=STEPS, measure_steps=0)


def bare(plan: Plan, process: Process) -> float:
    """What one would write by hand; seconds from the end of the first step to the end of the last."""
    batches = Batches(plan, SETTINGS, process)
    batches.seek(0)
    prepared = prepare(build(plan), plan, process.mesh, SETTINGS.seed)
    model, optimizer, loss_of = prepared.model.train(), prepared.optimizer, criterion(plan)
    for step in range(STEPS):
        inputs, targets = batches.get(step, 0)
        loss = loss_of(model(inputs), targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), SETTINGS.clip)
        optimizer.step()
        optimizer.zero_grad()
        loss.item()  # shows the loss of each step, as the trainers do, and so waits for the device
        if step == 0:
            started = time.perf_counter()
    return time.perf_counter() - started


def trainers(plan: Plan, process: Process) -> float:
    """The loop of the trainers, which says a line after each of so few steps."""
    ends: list[float] = []
    train(plan, SETTINGS, process, say=lambda line: ends.append(time.perf_counter()) if "tokens/s" in line else None)
    assert len(ends) == STEPS
    return ends[-1] - ends[0]


if __name__ == "__main__":
    asked = options(str(__doc__), rounds=7)
    torch.set_num_threads(1)
    with join(Rank.from_environment(), DEVICE, SETTINGS.seed) as process:
        plan = SMALL if asked.small else PLAN
        sides = {"the trainers' loop": lambda: trainers(plan, process), "a bare loop": lambda: bare(plan, process)}
        taken = interleave(sides, asked.rounds, cold=asked.small)
    speed = round(1 / ratio(taken, "the trainers' loop", "a bare loop"), 3)
    report(taken, as_json=asked.json, ratio_of_tokens_per_second=speed, aim_at_least=0.97)
