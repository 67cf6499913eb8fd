"""LoRA and selective checkpoints to run for real, as changes of the plan of test_knobs.py."""

from __future__ import annotations

import dataclasses
from typing import Any

from memcalc.adapters import Adapter
from memcalc.checkpointing import Checkpointing
from memcalc.models import Model
from tests.trainers.runs import some

__all__ = ["LLAMA", "cases"]

LLAMA = Model(
    name="knobs-llama", family="llama", layers=4, hidden=128, heads=4, kv_heads=2, ffn=384, vocab=1000, context=128
)  # fmt: skip
LORA = Adapter(kind="lora")
EVERYWHERE = Adapter(kind="lora", targets="all-linear", dtype="float32", dropout=0.1)
PRODUCTS = Checkpointing(policy="matrix-products")
_CASES: dict[str, dict[str, Any]] = {
    "gpt2": {"adapter": LORA},
    "gpt2-reentrant": {"adapter": LORA, "checkpoint_every": 1, "reentrant": True},
    "llama-everywhere": {"model": LLAMA, "precision": "bf16", "adapter": EVERYWHERE},
    "llama-query-value": {"model": LLAMA, "adapter": dataclasses.replace(LORA, targets="query-value")},
    "llama-amp": {"model": LLAMA, "precision": "amp-bf16", "adapter": LORA},
    "llama-inputs": {
        "model": LLAMA, "adapter": dataclasses.replace(LORA, input_gradients=True), "checkpoint_every": 1,
    },
    "products": {"model": LLAMA, "checkpoint_every": 1, "checkpointing": PRODUCTS},
    "products-eager": {"model": LLAMA, "attention": "eager", "checkpoint_every": 1, "checkpointing": PRODUCTS},
    "products-lora": {"model": LLAMA, "adapter": LORA, "checkpoint_every": 1, "checkpointing": PRODUCTS},
    "one-in-2": {"checkpoint_every": 1, "checkpointing": Checkpointing(one_in=2)},
    "ddp": {"adapter": LORA, "strategy": "ddp", "ranks": 2},
    "zero-1": {"model": LLAMA, "adapter": LORA, "strategy": "zero-1", "ranks": 2},
    "full-shard": {"model": LLAMA, "adapter": LORA, "strategy": "fsdp-full-shard", "ranks": 2},
    "full-shard-dtypes": {"adapter": EVERYWHERE, "precision": "bf16", "strategy": "fsdp-full-shard", "ranks": 2},
    "full-shard-products": {
        "model": LLAMA, "checkpoint_every": 1, "checkpointing": PRODUCTS, "strategy": "fsdp-full-shard", "ranks": 2,
    },
}  # fmt: skip


def cases() -> dict[str, dict[str, Any]]:
    """Those that are run."""
    return {f"adapter {name}": changes for name, changes in some(_CASES).items()}
