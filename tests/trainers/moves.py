"""Runs of test_matrix.py on two ranks that go on with another number of ranks, another layout or another strategy.

The table of docs/running.md has these moves and no others.
"""

from __future__ import annotations

from memcalc.fsdp import Fsdp
from memcalc.layout import Layout
from tests.trainers.matrix import LLAMA, OLD, TIED, Fields

__all__ = ["MOVES"]

MOVES: dict[tuple[str, str], tuple[str, Fields]] = {
    ("ddp", "ddp"): ("ddp", {"strategy": "ddp"}),
    ("zero-1", "zero-1"): ("zero-1", {"strategy": "zero-1"}),
    ("fsdp-full-shard", "fsdp-full-shard"): ("fsdp-full-shard", {"strategy": "fsdp-full-shard"}),
    ("fsdp-full-shard of FSDP 1", "fsdp-full-shard of FSDP 1"): (
        "fsdp-1", {"strategy": "fsdp-full-shard", "fsdp": OLD},
    ),
    ("fsdp-shard-grad-op", "fsdp-hybrid-shard"): (
        "fsdp-shard-grad-op", {"strategy": "fsdp-hybrid-shard", "fsdp": Fsdp(replicas=2)},
    ),
    ("fsdp-no-shard", "fsdp-no-shard"): ("fsdp-no-shard", {"strategy": "fsdp-no-shard"}),
    ("fsdp-full-shard, offloaded", "zero-1"): ("fsdp-offload", {"strategy": "zero-1"}),
    ("tensor parallel", "tensor parallel in DDP"): (
        "tensor", {"model": LLAMA, "layout": Layout(tensor=2), "strategy": "ddp"},
    ),
    ("sequence parallel", "pipeline of 2 x tensor 2"): (
        "sequence", {"model": LLAMA, "layout": Layout(tensor=2, pipeline=2), "accumulation": 2},
    ),
    ("pipeline of 2", "pipeline of 4"): ("1f1b", {"accumulation": 4, "layout": Layout(pipeline=4)}),
    ("pipeline of 2, tied", "fsdp-full-shard"): ("gpipe-tied", {"model": TIED, "strategy": "fsdp-full-shard"}),
    ("interleaved pipeline", "pipeline of 2 in DDP"): (
        "interleaved", {"accumulation": 4, "layout": Layout(pipeline=2), "strategy": "ddp"},
    ),
}  # fmt: skip
"""By the words of the docs: the run on two ranks, and what goes on with its checkpoint on four."""
