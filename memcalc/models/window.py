"""Sliding windows: the mask that attention is given where a sequence is as long as its window, or longer."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from memcalc.graph import Tensor
from memcalc.models.family import Block
from memcalc.recorder import Storage
from memcalc.tape import Tape

if TYPE_CHECKING:
    from memcalc.plan import Plan

__all__ = ["under_mask"]


def under_mask(t: Tape, plan: Plan, blocks: list[Block]) -> list[Block]:
    """The blocks with the mask that all of them are given, where there is one (transformers/masking_utils.py: booleans for
    scaled_dot_product_attention, the same for all samples; where attention is written out numbers, of each sample)."""
    if not plan.masked:
        return blocks
    square = (plan.tokens, plan.tokens)
    parts = [t.allocate(f"mask of {what}", square, "bool", "temporary", batched=False) for what in ("causes", "window")]
    mask = t.allocate("mask", square, "bool", "inputs", batched=False)
    parts.clear()
    if plan.kernel == "eager":
        mask = t.allocate("mask", square, t.weight_dtype, "inputs")

    def masked(run: Callable[[Tensor], Tensor], held: Storage, x: Tensor) -> Tensor:
        return run(x)

    return [(name, partial(masked, run, mask)) for name, run in blocks]
