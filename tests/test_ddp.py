"""What DDP holds beside its buckets, held against real runs of two and four ranks on the CPU."""

from __future__ import annotations

import dataclasses

import pytest

from memcalc.estimate import estimate
from memcalc.layout import Layout
from memcalc.ledger import ledger
from memcalc.models import MODELS, Model
from memcalc.plan import Plan

GPT2 = dataclasses.replace(MODELS["gpt2-tiny"], layers=4)
LLAMA = Model(
    name="llama-of-4", family="llama", layers=4, hidden=64, heads=4, kv_heads=2, ffn=192, vocab=256, context=128
)  # fmt: skip
DDP = Plan(model=GPT2, tokens=64, micro_batch=4, device="cpu", ranks=2, strategy="ddp")


@pytest.mark.parametrize(("device", "maps"), [("cpu", 2), ("cuda", 1)])
def test_a_static_graph_has_maps_of_used_parameters(device: str, maps: int) -> None:
    plan = dataclasses.replace(DDP, device=device)
    static = dataclasses.replace(plan, static_graph=True)
    block = 512 if device == "cuda" else 1
    each = -(-4 * len(plan.weights) // block) * block
    assert ledger(static).peak().bytes - ledger(plan).peak().bytes == maps * each


def test_a_static_graph_as_measured() -> None:
    """8,746,108 B on torch 2.13, of which 8 are of the loop."""
    assert ledger(dataclasses.replace(DDP, static_graph=True)).steady().bytes == 8_746_108 - 8


def test_ddp_keeps_its_own_rows_of_the_divided_table_as_measured() -> None:
    """4,289,468 B on four ranks, tensor parallel 2; with the gradient of the whole table it would be 32,768 B more."""
    plan = dataclasses.replace(
        DDP, model=LLAMA, ranks=4, micro_batch=2, accumulation=2, layout=Layout(tensor=2, sequence=True)
    )
    assert ledger(plan).steady().bytes == pytest.approx(4_289_468, abs=200)


def test_what_a_static_graph_copies_in_the_first_step_is_held_against_the_states() -> None:
    """gpt2 in float32: 50257 scores of 4 B for each of 1024 tokens; two moments of 124,439,808 parameters."""

    def said(micro_batch: int) -> str:
        plan = Plan(
            model=MODELS["gpt2"], strategy="ddp", ranks=2, tokens=1024, micro_batch=micro_batch, static_graph=True
        )
        return next(line for line in estimate(plan).assumptions if line.startswith("static graph"))

    small, large = f"{1024 * 50257 * 4 / 1e6:.3f} MB", f"{8 * 1024 * 50257 * 4 / 1e9:.3f} GB"
    assert f"at most {small} " in said(1) and said(1).endswith("so that no peak is higher")
    assert f"that copy, at most {large} " in said(8) and said(8).endswith("is not counted")
