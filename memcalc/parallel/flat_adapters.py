"""FSDP 1 around frozen weights: adapters are units of their own inside the units of blocks."""

from __future__ import annotations

from memcalc.parallel.flat_shard import FlatShard
from memcalc.parallel.replicated import ROOT_UNIT
from memcalc.plan import Plan
from memcalc.recorder import Storage
from memcalc.spec import Weight
from memcalc.tape import Tape

__all__ = ["FlatAdapters", "nested"]


def nested(units: dict[str, list[Weight]]) -> dict[str, list[Weight]]:
    """Units with what is trained in each taken out into one of its own.

    >>> frozen = Weight("h.0.q.weight", (2, 2), "h.0", trainable=False)
    >>> found = nested({"h.0": [frozen, Weight("h.0.q.lora_A.weight", (1, 2), "h.0")]})
    >>> {unit: [weight.name for weight in weights] for unit, weights in found.items()}
    {'h.0': ['h.0.q.weight'], 'h.0 adapters': ['h.0.q.lora_A.weight']}
    """
    found: dict[str, list[Weight]] = {}
    for unit, weights in units.items():
        found[unit] = [weight for weight in weights if not weight.trainable]
        if trained := [weight for weight in weights if weight.trainable]:
            found[_inner(unit)] = trained
    return found


def _inner(unit: str) -> str:
    return f"{unit} adapters"


class FlatAdapters(FlatShard):
    """A frozen unit is gathered and gets no gradient; its adapters are gathered and reduced beside it.

    Source: peft/utils/other.py, fsdp_auto_wrap_policy, which the Trainer of transformers takes for LoRA: every layer
    with a trained weight and none below it is wrapped. Here those of one block are one unit, as they are all in use at
    once at the latest in the block's backward.

    After a frozen unit's backward a hook on the unit's inputs frees it (torch/distributed/fsdp/_runtime_utils.py,
    _register_post_backward_reshard_only_hook). In the reentrant form of checkpointing its input is a leaf made for the
    recomputation. The hook refers to that leaf's AccumulateGrad node (torch/autograd/graph.py, register_multi_grad_hook)
    and so to the leaf, which holds the hook: the inputs and their gradients live until all hooks are removed at the end
    of backward (_finalize_params).
    """

    def __init__(self, tape: Tape, plan: Plan, units: dict[str, list[Weight]]) -> None:
        super().__init__(tape, plan, nested(units))
        self.order = [unit for unit in self.order if unit in units]
        self.entries: list[Storage] = []
        self.tape.entries = self.entries

    def inner(self, unit: str) -> str | None:
        """The unit of a block's adapters."""
        return _inner(unit) if _inner(unit) in self.units else None

    def enter(self, unit: str) -> None:
        super().enter(unit)
        if inner := self.inner(unit):
            self.gather(inner)

    def leave(self, unit: str) -> None:
        super().leave(unit)
        if inner := self.inner(unit):
            super().leave(inner)

    def enter_backward(self, unit: str) -> None:
        super().enter_backward(unit)
        if inner := self.inner(unit):
            self.gather(inner)

    def leave_backward(self, unit: str) -> None:
        if inner := self.inner(unit):
            super().leave_backward(inner)
        super().leave_backward(unit)

    def neighbour(self, unit: str, step: int) -> str | None:
        return super().neighbour(unit, step) if unit in self.order or unit == ROOT_UNIT else None

    def end_backward(self) -> None:
        # A unit that has nothing frozen, such as the root where all but the adapted layers is trained, is not asked for.
        for unit in [*self.inputs_without_gradient, ROOT_UNIT]:
            if not self.units[unit] and (inner := self.inner(unit)):
                super().leave_backward(inner)
        super().end_backward()
        self.entries.clear()
