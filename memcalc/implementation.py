"""How the model's code is written where that changes what it keeps: norms, GELU, gated products, rotary positions, heads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from memcalc.errors import PlanError
from memcalc.groups import Group, knob

if TYPE_CHECKING:
    from memcalc.plan import Plan

__all__ = ["Implementation"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Implementation(Group):
    """How the model's code is written where that changes what it keeps; ``auto`` is what trainers/models does."""

    megatron: str = knob(
        "auto", "--megatron", "Megatron's layers: auto (of before its core), core, transformer-engine.",
        choices=("auto", "core", "transformer-engine"),
    )  # fmt: skip
    """``core`` keeps the tensor that scores are made in for the whole run (parallel_state.get_global_memory_buffer);
    Transformer Engine has a cuBLAS workspace of its own. With both, the mask of each sample is part of the batch."""

    def check(self, plan: Plan) -> None:
        if self.megatron != "auto" and plan.model.family != "megatron":
            raise PlanError(f"--megatron {self.megatron}: not of the {plan.model.family} family, only of megatron")
