"""Parts of a model that are not trained: no gradient, no optimizer states, and no activations kept for them alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from memcalc.errors import PlanError, UnknownNameError, shorten
from memcalc.groups import Group, knob
from memcalc.spec import Weight

if TYPE_CHECKING:
    from memcalc.plan import Plan

__all__ = ["Frozen"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Frozen(Group):
    """``requires_grad_(False)`` of whole parts, by the names that the ledger's weights begin with.

    >>> kept = Frozen(parts="vision").weights([Weight("vision.fc.weight", (2, 2)), Weight("head.weight", (2, 2))])
    >>> [weight.trainable for weight in kept]
    [False, True]
    """

    parts: str = knob(
        "", "--freeze", "Parts that are not trained, by the beginnings of their weights' names: vision,projector."
    )

    @property
    def names(self) -> tuple[str, ...]:
        """The parts one by one."""
        return tuple(part.strip().rstrip(".") for part in self.parts.split(",") if part.strip())

    def weights(self, weights: Sequence[Weight]) -> list[Weight]:
        """The same weights, some of them frozen."""
        begin = tuple(f"{name}." for name in self.names)
        return (
            [replace(w, trainable=False) if f"{w.name}.".startswith(begin) else w for w in weights]
            if begin
            else [*weights]
        )

    def check(self, plan: Plan) -> None:
        if not self.parts:
            return
        if not self.names:
            raise PlanError(
                f"freeze {shorten(self.parts)} names nothing; write it like vision,projector, or leave it out"
            )
        if plan.family.opaque:
            raise PlanError(f"freeze {self.parts}: the parts of {plan.model.name} are not known")
        weights = plan.family.weights(plan.model)
        for name in self.names:
            if not any(f"{weight.name}.".startswith(f"{name}.") for weight in weights):
                raise UnknownNameError("part to freeze", name, {weight.name.split(".")[0] for weight in weights})
        if not any(weight.trainable for weight in self.weights(weights)):
            raise PlanError(f"freeze {self.parts}: nothing of {plan.model.name} would be trained")
        if plan.adapter.freezes:
            raise PlanError(f"freeze {self.parts}: adapters freeze all but themselves; leave --freeze out")
        row = plan.strategy_row
        if row.gathers and plan.fsdp.version == "1":
            raise PlanError(
                f"freeze {self.parts}: FSDP 1 wants all or nothing of a unit trained; take --fsdp-version 2"
            )
        if row.main_grads or plan.layout.model_parallel > 1 or plan.offload.on:
            raise PlanError(f"freeze {self.parts}: not known with {row.name}, model parallel or offload; leave one out")

    def untrained(self, plan: Plan) -> str:
        return "with parts that are frozen" if self.parts else ""
