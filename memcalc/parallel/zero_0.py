"""DeepSpeed with nothing divided: its own all-reduce, and its wrappers around the optimizer of 16-bit weights."""

from __future__ import annotations

from memcalc.parallel.replicated import Replicated
from memcalc.plan import Plan
from memcalc.recorder import Storage
from memcalc.spec import Weight
from memcalc.tape import Tape

__all__ = ["Zero0"]

# MEMORY_OPT_ALLREDUCE_SIZE of deepspeed/runtime/engine.py, in elements.
REDUCED_AT_A_TIME = 500_000_000


class Zero0(Replicated):
    """Gradients are copied into a flat piece to be reduced; 16-bit weights have float32 masters.

    Source: deepspeed/runtime/engine.py (``buffered_allreduce_fallback``), runtime/fp16/fused_optimizer.py, which keeps
    weights and masters flat, and runtime/fp16/unfused_optimizer.py for optimizers that are not fused.
    """

    def __init__(self, tape: Tape, plan: Plan, units: dict[str, list[Weight]]) -> None:
        super().__init__(tape, plan, units)
        self.masters = plan.precision_row.master
        self.flat = self.masters and plan.optimizer_kind == "fused"
        self.numel = sum(weight.numel for weight in self.trained)

    def parameters(self) -> None:
        if not self.flat:
            super().parameters()
            return
        self.tape.moment = "init"
        for weight in self.weights:
            if not weight.trainable:
                self.parameter(weight)
        originals = [self.temporary(weight.name, weight.numel, self.dtype) for weight in self.trained]
        clones = [self.temporary(f"{weight.name} clone", weight.numel, self.dtype) for weight in self.trained]
        self.hold("flat weights", (self.numel,), "parameters")
        clones.clear()
        originals.clear()

    def optimizer_states(self) -> None:
        for weight in self.updated():
            if self.masters:
                self.hold(f"{weight.name} float32 master", weight.shape, "optimizer", "float32")
            self.hold_states(weight, "float32")

    def updated(self) -> list[Weight]:
        return [Weight("flat weights", (self.numel,))] if self.flat else self.trained

    def keep_gradients(self) -> None:
        if self.dtype == "float32":
            super().keep_gradients()

    def temporary(self, name: str, numel: int, dtype: str, category: str = "temporary") -> Storage:
        return self.tape.allocate(name, (numel,), dtype, category, batched=False)

    def end_backward(self) -> None:
        if not self.sync:
            return
        unknown = [min(self.numel, REDUCED_AT_A_TIME)]
        for size in unknown if self.plan.family.opaque else _pieces(self.trained):
            piece = self.temporary("gradients to reduce", size, self.dtype, "communication")
            del piece

    def step(self) -> None:
        if not self.masters:
            super().step()
            return
        gradients = [
            self.temporary(f"{weight.name} float32 gradient", weight.numel, "float32", "gradients")
            for weight in self.trained
        ]
        if self.flat:
            flat = self.temporary("flat float32 gradient", self.numel, "float32", "gradients")
            gradients.clear()
            self.grads.clear()
            self.temporaries([(self.numel,)], "float32")
            del flat
        elif not (self.plan.family.opaque and self.plan.optimizer_kind == "for-loop"):
            self.temporaries(self.step_shapes(), "float32")

    def zero_grad(self) -> None:
        if self.masters or self.plan.set_to_none:
            self.grads.clear()


def _pieces(weights: list[Weight]) -> list[int]:
    """Elements of each flat piece: weights are added until it holds more than the limit. One weight is not copied."""
    pieces, count, size = [], 0, 0
    for weight in weights:
        count, size = count + 1, size + weight.numel
        if size > REDUCED_AT_A_TIME:
            pieces.append((count, size))
            count, size = 0, 0
    return [size for count, size in [*pieces, (count, size)] if count > 1]
