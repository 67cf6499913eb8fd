"""DeepSpeed's BF16_Optimizer: ZeRO stage 1 over bfloat16 weights whose gradients are summed in float32."""

from __future__ import annotations

from memcalc.parallel.zero import Zero
from memcalc.recorder import Storage
from memcalc.spec import Weight

__all__ = ["ZeroBf16"]


class ZeroBf16(Zero):
    """A float32 gradient of every weight that lives as long as the run, beside the bfloat16 ones of the backward.

    Source: deepspeed/runtime/bf16_optimizer.py, ``_setup_for_real_optimizer`` and ``update_hp_grads``. The flat
    gradient is reduced in place in bfloat16 copies of up to one piece: it is one tensor.
    """

    def optimizer_states(self) -> None:
        flat = Weight("float32 partition", (self.partition,))
        self.hold(flat.name, flat.shape, "optimizer", "float32")
        self.hold("float32 gradients", (self.partition * self.plan.shards,), "gradients", "float32")
        self.hold_states(flat, "float32")

    def gradient(self, weight: Weight, grad: Storage) -> None:
        self.grads.setdefault(weight.name, grad)

    def end_backward(self) -> None:
        for weight in self.trained:
            cast = self.temporary(f"{weight.name} float32 gradient", weight.numel, "float32")
            del cast
        if self.sync:  # communication_data_type is the weights' own
            cast = self.temporary("gradients to reduce", self.partition * self.plan.shards, self.dtype, "communication")
            del cast

    def step(self) -> None:
        self.temporaries([(self.partition,)], "float32")
