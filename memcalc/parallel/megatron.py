"""Megatron-LM's data parallel: gradients summed in one buffer, and updates of float32 copies, whole or divided."""

from __future__ import annotations

from math import lcm

from memcalc.parallel.replicated import Replicated
from memcalc.plan import Plan
from memcalc.recorder import Storage
from memcalc.sharding import partition_slices
from memcalc.spec import Weight
from memcalc.tape import Tape

__all__ = ["Megatron"]

# megatron/core/optimizer/distrib_optimizer.py pads the end of a bucket to a multiple of this and of the ranks.
BUCKET_ALIGNMENT = 128


class Megatron(Replicated):
    """A weight's gradient is added to its part of the buffer (``main_grad``) and dropped.

    The buffer lives for the whole run, in float32 for float32 and bfloat16 weights and in float16 for float16 ones
    (megatron/training/arguments.py, ``--accumulate-allreduce-grads-in-fp32``, which bfloat16 switches on). 16-bit weights
    have float32 copies: of every weight (optimizer.py, Float16OptimizerWithFloat16Params), or with the distributed
    optimizer of this rank's part of the buffer, when weights lie in a buffer as well (param_and_grad_buffer.py).
    Float16 gradients are copied to float32 for the step (``_copy_model_grads_to_main_grads``).
    """

    def __init__(self, tape: Tape, plan: Plan, units: dict[str, list[Weight]]) -> None:
        super().__init__(tape, plan, units)
        self.masters = plan.precision_row.master
        self.divided = plan.strategy_row.shards_optimizer
        self.gradient_dtype = "float16" if self.dtype == "float16" else "float32"
        self.numel = sum(weight.numel for weight in self.weights)
        if self.divided:
            aligned = lcm(plan.shards, BUCKET_ALIGNMENT)
            self.numel = -(-self.numel // aligned) * aligned

    def parameters(self) -> None:
        if self.divided:
            self.hold("weights in a buffer", (self.numel,), "parameters")
        else:
            super().parameters()
        self.hold("gradient buffer", (self.numel,), "gradients", self.gradient_dtype)

    def optimizer_states(self) -> None:
        for weight in self.updated():
            if self.masters:
                self.hold(f"{weight.name} float32 copy", weight.shape, "optimizer", "float32")
            self.hold_states(weight, "float32")

    def updated(self) -> list[Weight]:
        """Whole weights, or the flat slices in the first rank's part; the padding is at the end of the last one's."""
        if not self.divided:
            return self.weights
        slices = partition_slices(self.weights[::-1], self.numel // self.plan.shards)
        return [Weight(name, (count,)) for name, found in slices.items() for rank, count in found if rank == 0]

    def step_shapes(self) -> list[tuple[int, ...]]:
        return [weight.shape for weight in self.updated()]

    def keep_gradients(self) -> None:
        """The buffer is what is kept."""

    def gradient(self, weight: Weight, grad: Storage) -> None:
        """Nothing refers to it once it was added to the buffer."""

    def step(self) -> None:
        if self.gradient_dtype != "float32":
            for shape in self.step_shapes():
                copy = self.tape.allocate("float32 gradient", shape, "float32", "gradients", batched=False)
                self.grads[str(len(self.grads))] = copy
        if not (self.plan.family.opaque and self.plan.optimizer_kind == "for-loop"):
            self.temporaries(self.step_shapes(), "float32")

    def zero_grad(self) -> None:
        self.grads.clear()
