"""FullyShardedDataParallel with NO_SHARD: flat parameters, nothing divided."""

from __future__ import annotations

from dataclasses import replace

from memcalc.parallel.replicated import ROOT_UNIT, Replicated
from memcalc.plan import Plan
from memcalc.recorder import Storage
from memcalc.spec import Weight
from memcalc.tape import Tape

__all__ = ["FlatUnits", "flattened"]


def flattened(units: dict[str, list[Weight]]) -> list[Weight]:
    """The weights as autograd sees them: views of a flat parameter that wants a gradient want one, too.

    So a frozen weight beside a trained one costs what a trained one does, but for its optimizer state.
    """
    return [
        replace(weight, trainable=any(other.trainable for other in unit)) for unit in units.values() for weight in unit
    ]


class FlatUnits(Replicated):
    """FSDP's wrapper with NO_SHARD: one flat parameter per unit, whose gradient is put together at the unit's end.

    Source: torch/distributed/fsdp/_flat_param.py; the parameters are views, so their gradients wait until the
    last of the unit is there and are then concatenated.
    """

    def __init__(self, tape: Tape, plan: Plan, units: dict[str, list[Weight]]) -> None:
        super().__init__(tape, plan, units)
        self.waiting: dict[str, dict[str, Storage]] = {unit: {} for unit in units}
        self.stale = False
        self.views = not plan.strategy_row.gathers or plan.fsdp.original_parameters
        """zero_grad drops the gradients' views; the flat ones go when the next forward begins."""
        self.unit_of = {weight.name: unit for unit, weights in units.items() for weight in weights}

    def gradient(self, weight: Weight, grad: Storage) -> None:
        self.waiting[self.unit_of[weight.name]][weight.name] = grad

    def states(self) -> None:
        super().states()
        if self.plan.set_to_none and self.views and not self.away:
            self.keep_gradients()
            self.stale = True

    def keep_gradients(self) -> None:
        for unit, weights in self.units.items():
            if any(weight.trainable for weight in weights):
                self.grads[unit] = self._flat_gradient(unit)

    def begin_forward(self) -> None:
        if self.stale:
            self.grads.clear()
            self.stale = False

    def zero_grad(self) -> None:
        """Nothing is freed before the next forward pass, unless the optimizer knows the flat parameters themselves."""
        if self.plan.set_to_none and not self.views:
            self.grads.clear()

    def leave_backward(self, unit: str) -> None:
        if not any(weight.trainable for weight in self.units[unit]):
            return
        flat = self._flat_gradient(unit)
        self.waiting[unit].clear()
        self.grads.setdefault(unit, flat)

    def _flat_gradient(self, unit: str) -> Storage:
        return self.new_gradient(f"{unit} flat", sum(weight.numel for weight in self.units[unit]))

    def end_backward(self) -> None:
        for unit in [*self.inputs_without_gradient, ROOT_UNIT]:
            if self.units[unit]:
                self.leave_backward(unit)
        super().end_backward()
