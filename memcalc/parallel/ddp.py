"""DistributedDataParallel, and ZeRO-1 on top of it."""

from __future__ import annotations

from memcalc.parallel.replicated import Replicated
from memcalc.precision import DTYPE_BYTES
from memcalc.recorder import Storage
from memcalc.sharding import ddp_buckets, fullest, greedy_partition
from memcalc.spec import Weight

__all__ = ["Ddp"]


class Ddp(Replicated):
    """Flat buckets beside the gradients, kept for the whole run; with ZeRO-1 also divided updates.

    Source: torch/csrc/distributed/c10d/reducer.cpp; with ``gradient_as_bucket_view`` a finished gradient is
    copied into its bucket and freed.
    """

    def states(self) -> None:
        itemsize = DTYPE_BYTES[self.trained_dtype]
        sizes = ddp_buckets(self.trained, itemsize, self.plan.bucket_mb)
        category = "gradients" if self.plan.bucket_views else "communication"
        super().states()
        for index, size in enumerate(sizes):
            self.hold(f"DDP bucket {index}", (size,), category, "uint8")
        if self.plan.static_graph:  # initialize_local_used_map: 32-bit numbers on the host, and on the device
            for _ in range(2 if self.plan.device == "cpu" else 1):
                self.hold("DDP map of used parameters", (4 * len(self.trained),), "communication", "uint8")

    def updated(self) -> list[Weight]:
        if not self.plan.strategy_row.shards_optimizer:
            return self.trained
        parts = greedy_partition(self.trained, self.plan.shards)
        return parts[fullest(parts)]

    def keep_gradients(self) -> None:
        if not self.plan.bucket_views:
            super().keep_gradients()

    def gradient(self, weight: Weight, grad: Storage) -> None:
        if (
            self.plan.layout.tensor > 1
            and self.plan.family.divides == "dtensor"
            and weight.name == self.weights[0].name
        ):
            # Parameters are plain tensors: of the whole table's gradient (memcalc/vocab_parallel.py) DTensor.from_local's
            # backward hands on a copy of this rank's rows (torch/distributed/tensor/_api.py, _FromTorchTensor).
            grad = self.new_gradient(weight.name, weight.numel)
        if self.plan.bucket_views and self.sync:
            self.grads.pop(weight.name, None)
        else:
            super().gradient(weight, grad)
