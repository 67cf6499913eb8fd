"""Which blocks are checkpointed, and what a checkpointed block keeps of its forward pass all the same."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from memcalc.errors import PlanError
from memcalc.groups import Group, knob

if TYPE_CHECKING:
    from memcalc.plan import Plan

__all__ = ["POLICIES", "Checkpointing", "matrix_products"]

POLICIES = ("recompute-all", "matrix-products", "core-attention")


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpointing(Group):
    """Activation checkpointing beyond how many blocks one checkpoint spans.

    >>> Checkpointing(one_in=2).covers(0), Checkpointing(one_in=2).covers(1)
    (False, True)
    """

    policy: str = knob(
        "recompute-all", "--checkpoint-policy",
        "What is computed again: all; all but attention and each second matrix product; or attention alone.",
        choices=POLICIES,
    )  # fmt: skip
    """``recompute-all``; ``matrix-products``, torchtitan's selective "op", which keeps the outputs of attention and of
    the first, third, fifth... matrix product without bias of a block (torchtitan/distributed/activation_checkpoint.py,
    SelectiveAC); ``core-attention``, Megatron's selective (megatron/core/transformer/attention.py,
    _checkpointed_attention_forward), which keeps queries, keys and values and the rest of the block."""
    one_in: int = knob(
        1, "--checkpoint-one-in", "Of so many blocks only the last is checkpointed, the others keep all.", least=1
    )

    def check(self, plan: Plan) -> None:
        if self == Checkpointing():
            return
        if not plan.checkpoint_every:
            raise PlanError(
                "a checkpoint policy says how to checkpoint, but checkpointing is off; take --checkpointing full"
            )
        if plan.reentrant:
            raise PlanError("selective checkpointing needs the form that is not reentrant; leave out --reentrant")
        if plan.family.unplayed or plan.family.encodes:
            raise PlanError(
                f"selective checkpointing cannot be played for {plan.model.name}; take --checkpointing full"
            )
        if self.policy == "core-attention" and not plan.model.heads:
            raise PlanError(f"{plan.model.name} has no attention to compute again; take another --checkpoint-policy")

    def untrained(self, plan: Plan) -> str:
        return "with attention alone checkpointed" if self.policy == "core-attention" else ""

    def covers(self, index: int) -> bool:
        """The block of this index is checkpointed (torchtitan: layer counts from 1)."""
        return (index + 1) % self.one_in == 0


def matrix_products() -> Callable[[str], bool]:
    """Whether the output of the next ``mm`` or ``attention`` of a checkpoint is kept; a fresh count for each.

    >>> keeps = matrix_products()
    >>> [keeps(op) for op in ("mm", "mm", "addmm", "attention", "mm")]
    [True, False, False, True, True]
    """
    count = 0

    def keeps(op: str) -> bool:
        nonlocal count
        count += op == "mm"
        return op == "attention" or (op == "mm" and count % 2 == 1)

    return keeps
