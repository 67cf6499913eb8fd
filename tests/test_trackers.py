"""torch's own MemTracker and FSDPMemTracker on GPT-2 of transformers, to a hundredth of a MiB.

The figures are of torch 2.14.1 and transformers 5.24 on fake tensors: batch 8 of 1024 tokens, AdamW with foreach, no
dropout, labels the same tensor as the inputs. What they hold besides is said and added: fused attention is given a mask
of all ones, which each layer makes into numbers of its own dtype.
"""

from __future__ import annotations

import pytest

from memcalc.implementation import Implementation
from memcalc.ledger import ledger
from memcalc.plan import Plan
from tests.figures import MIB, peak, trained

TOKENS = 8 * 1024
LABELS = 8 * TOKENS
"""Bytes of the int64 labels that memcalc counts and the trackers do not."""
PAIRS = TOKENS * 1024


def tracked(**fields: object) -> Plan:
    known = {"gelu": "python"} | ({"softmax": "float32"} if fields.get("attention") == "eager" else {})
    return trained("gpt2", micro_batch=8, device="cpu", implementation=Implementation(**known), **fields)


@pytest.mark.parametrize(
    ("fields", "beside", "mib"),
    [
        ({"precision": "fp32"}, 12 * 4 * PAIRS, 14637.83),
        # Recomputation needs the mask as it came, one byte a pair, and makes it into numbers one layer at a time.
        ({"precision": "fp32", "checkpoint_every": 1}, PAIRS, 6479.83),
        ({"precision": "amp-bf16"}, 12 * 2 * PAIRS, 10925.45),
        ({"precision": "amp-bf16", "checkpoint_every": 1}, PAIRS, 6541.45),
        # Attention written out has no causal mask of booleans, 1024 x 1024, in these releases.
        ({"precision": "fp32", "attention": "eager"}, -(1024**2), 18857.33),
        ({"precision": "amp-bf16", "attention": "eager"}, -(1024**2), 17640.95),
    ],
    ids=lambda value: "-".join(map(str, value.values())) if isinstance(value, dict) else "",
)
def test_memtracker(fields: dict[str, object], beside: int, mib: float) -> None:
    assert (peak(tracked(**fields)) + beside - LABELS) / MIB == pytest.approx(mib, abs=0.01)


@pytest.mark.parametrize(
    ("strategy", "precision", "prefetched", "mib"),
    [
        ("fsdp-shard-grad-op", "fp32", 0, 13866.47),
        ("fsdp-full-shard", "fp32", 4, 13569.05),
        ("fsdp-full-shard", "amp-bf16", 2, 9231.62),
    ],
)
def test_fsdpmemtracker(strategy: str, precision: str, prefetched: int, mib: float) -> None:
    """Eight ranks, a unit for each block and one for the rest. transformers takes the loss inside the model, so that
    backward begins, and with it the gather of the last block, before the loss's own backward; memcalc's trainers take
    it outside."""
    plan = tracked(strategy=strategy, ranks=8, precision=precision)
    block = sum(weight.numel for weight in plan.family.weights(plan.model) if weight.group == "h.11")
    masks = 12 * (4 if precision == "fp32" else 2) * PAIRS
    assert (peak(plan) + masks + prefetched * block - LABELS) / MIB == pytest.approx(mib, abs=0.01)


def test_two_float32_copies_of_the_logits_are_in_each_of_them() -> None:
    found = ledger(tracked(precision="amp-bf16")).peak()
    assert found.by_category["temporary"] / MIB == pytest.approx(3141.06, abs=0.02)
