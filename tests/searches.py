"""What the tests of recommending share: two jobs, and choices closed so that a search takes milliseconds."""

from __future__ import annotations

from typing import Any

from memcalc.loss import Loss
from memcalc.models import MODELS
from memcalc.plan import Plan
from memcalc.strategies import STRATEGIES

FLAT = ("tensor-parallel", "pipeline-parallel")
FEW: dict[str, Any] = {
    "tensors": [1],
    "pipelines": [1],
    "policies": [],
    "checkpoints": [0, 1],
    "kinds": ["foreach"],
    "losses": [Loss()],
}
"""Choices closed so that a search takes milliseconds."""
PARALLEL = [name for name, row in STRATEGIES.items() if row.parallel and row.plain and not row.replicates]
GPT2 = Plan(
    model=MODELS["gpt2"],
    tokens=1024,
    micro_batch=1,
    ranks=8,
    strategy="ddp",
    gpu="a100-80gb",
)
TINY = Plan(
    model=MODELS["gpt2-tiny"],
    tokens=128,
    micro_batch=1,
    ranks=2,
    strategy="ddp",
    gpu="a100-80gb",
)
