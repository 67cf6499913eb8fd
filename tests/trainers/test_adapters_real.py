"""LoRA and selective checkpoints run for real on the CPU and held against the ledger moment by moment."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from memcalc.adapters import Adapter
from memcalc.checkpointing import Checkpointing
from memcalc.validate import Result, validate
from tests.trainers.runs import some
from tests.trainers.test_knobs import ALONE, LLAMA

LORA = Adapter(kind="lora")
EVERYWHERE = Adapter(kind="lora", targets="all-linear", dtype="float32", dropout=0.1)
PRODUCTS = Checkpointing(policy="matrix-products")
CASES: dict[str, dict[str, Any]] = {
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


CASES = some(CASES)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Result]:
    plans = {name: dataclasses.replace(ALONE, **changes) for name, changes in CASES.items()}
    found = validate(plans, out=tmp_path_factory.mktemp("adapters"), show=lambda result: None)
    return {result.name: result for result in found}


@pytest.mark.parametrize("name", CASES)
def test_the_ledger_agrees_with_a_real_run(results: dict[str, Result], name: str) -> None:
    result = results[name]
    assert result.problem is None
    # Besides the peak to a percent: all but torch's scalars on the CPU, 8 bytes a multiplication by a number.
    assert result.comparison is not None
    assert abs(result.comparison.peak.error_bytes) < 1024
