"""DeepSpeed's ZeRO stages 1 and 2: one flat buffer of all weights, cut into one partition a rank."""

from __future__ import annotations

from itertools import groupby

from memcalc.parallel.replicated import Replicated
from memcalc.plan import Plan
from memcalc.recorder import Storage
from memcalc.sharding import partition_slices, round_robin, zero_partition
from memcalc.spec import Weight
from memcalc.tape import Tape

__all__ = ["Zero"]

# Before torch 1.13 there is no all_gather_into_tensor, and gathered partitions are copied out of a flat buffer.
GATHERS_IN_PLACE_SINCE = (1, 13)


class Zero(Replicated):
    """16-bit weights in a flat buffer; float32 masters and states of one partition; gradients reduced in buckets.

    Source: deepspeed/runtime/zero/stage_1_and_2.py. A bucket lives from the first gradient of a backward to its end.
    What is reduced is copied into this rank's gradients, whole weights even where the partition cuts through them.
    In the step they are flattened and cast to float32 before they are let go.
    """

    def __init__(self, tape: Tape, plan: Plan, units: dict[str, list[Weight]]) -> None:
        super().__init__(tape, plan, units)
        self.stage, self.knobs = plan.strategy_row.zero_stage or 0, plan.deepspeed
        self.offloads = plan.offload.optimizer != "none"
        self.contiguous = self.knobs.contiguous_gradients or self.offloads
        self.overlaps = self.knobs.overlaps(self.stage)
        order = round_robin(self.trained, plan.shards) if self.knobs.round_robin_gradients else self.trained
        self.partition = zero_partition(sum(weight.numel for weight in order), plan.shards)
        self.slices = partition_slices(order, self.partition)
        touched = [0] * plan.shards
        for weight in order:
            for rank, _ in self.slices[weight.name]:
                touched[rank] += weight.numel
        self.rank = touched.index(max(touched))
        # Tensors of a model known by its size alone are not known; they are taken as small against a partition.
        self.touched = self.partition if plan.family.opaque else max(touched)
        self.buckets: list[Storage] = []
        self.bucket: list[Weight] = []
        self.filled = 0
        self.waiting: dict[str, Storage] = {}
        self.new: Storage | None = None
        self.summed: Storage | None = None

    def mine(self, weight: Weight) -> int:
        """Elements of a weight in this rank's partition."""
        return sum(count for rank, count in self.slices[weight.name] if rank == self.rank)

    # -- what lives between steps ------------------------------------------------------------------

    def parameters(self) -> None:
        self.tape.moment = "init"
        for weight in self.weights:
            if not weight.trainable:
                self.parameter(weight)
        originals = [self.temporary(weight.name, weight.numel, self.dtype) for weight in self.trained]
        if self.knobs.flatten == "host":
            originals.clear()
        self.hold("flat weights", (self.partition * self.plan.shards,), "parameters")
        originals.clear()

    def optimizer_states(self) -> None:
        if self.offloads:
            largest = max(weight.numel for weight in self.trained)
            if not self.plan.family.opaque:
                self.hold("gradient on its way to the host", (largest,), "communication")
        else:
            self.tape.moment = "init"
            flat = Weight("float32 partition", (self.partition,))
            self.hold(flat.name, flat.shape, "optimizer", "float32")
            # The states are made beside a float32 gradient: one of zeros at the start, or that of the first step.
            gradient = self.temporary("first float32 gradient", self.partition, "float32")
            self.hold_states(flat, "float32")
            del gradient
            self.tape.moment = "start"

    def keep_gradients(self) -> None:
        """Gradients are never kept: ``zero_grad`` of DeepSpeed's optimizers sets them to None."""

    def temporary(self, name: str, numel: int, dtype: str, category: str = "temporary") -> Storage:
        return self.tape.allocate(name, (numel,), dtype, category, batched=False)

    # -- backward ----------------------------------------------------------------------------------

    def gradient(self, weight: Weight, grad: Storage) -> None:
        if self.through_optimizer or self.stage > 1:
            self.open_buckets()
        if self.stage == 1 and not (self.overlaps and self.sync):
            self.grads.setdefault(weight.name, self.accumulated(weight, grad))
        elif self.stage == 1:
            self.reduce_later(weight, self.grads.pop(weight.name, grad))
        else:
            self.reduce_later(weight, grad)

    def accumulated(self, weight: Weight, grad: Storage) -> Storage:
        """The gradient in the dtype it is summed in: ``grad_accum``, of stage 1 only."""
        if self.knobs.grad_accum_dtype == "weights" or self.dtype == "float32" or weight.name in self.grads:
            return grad
        return self.temporary(f"{weight.name} gradient", weight.numel, "float32", "gradients")

    def open_buckets(self) -> None:
        if self.buckets or not self.contiguous:
            return
        for index in range(1 + self.overlaps):
            name = f"reduce bucket {index}"
            self.buckets.append(self.temporary(name, self.knobs.reduce_bucket_size, self.dtype, "communication"))

    def reduce_later(self, weight: Weight, grad: Storage) -> None:
        """Copy a gradient into the bucket, which is reduced first when it would not fit."""
        limit = self.knobs.reduce_bucket_size
        if self.filled + weight.numel > limit:
            self.reduce()
        if not self.contiguous or weight.numel > limit:
            self.waiting[weight.name] = grad
        self.bucket.append(weight)
        self.filled += weight.numel

    def reduce(self) -> None:
        """Reduce the bucket; what is this rank's is copied out of it."""
        for size in self.flattened():
            copy = self.temporary("flattened bucket", size, self.dtype, "communication")
            del copy
        for weight in self.bucket:
            if not self.mine(weight):
                continue
            if self.offloads:
                self.to_host(weight)
            elif not self.contiguous:
                self.grads[weight.name] = self.waiting[weight.name]
            elif self.new is None:
                self.new = self.temporary("gradients in partition", self.touched, self.dtype, "gradients")
        if self.stage == 1 and not self.contiguous:
            self.grads.update(self.waiting)
        self.waiting.clear()
        self.bucket.clear()
        self.filled = 0

    def flattened(self) -> list[int]:
        """Elements of each copy that is all-reduced in place of the bucket: none where one rank's slice is all of it."""
        limit = self.knobs.reduce_bucket_size
        if not self.contiguous:
            return [self.filled] if len(self.bucket) > 1 else []
        if not self.knobs.reduce_scatter:
            return []
        pieces = [piece for weight in self.bucket for piece in self.slices[weight.name]]
        runs = [sum(count for _, count in run) for _, run in groupby(pieces, key=lambda piece: piece[0])]
        copies, run_count, size = [], 0, 0
        for count in runs:
            run_count, size = run_count + 1, size + count
            if size > limit:
                copies.append((run_count, size))
                run_count, size = 0, 0
        return [size for count, size in [*copies, (run_count, size)] if count > 1]

    def to_host(self, weight: Weight) -> None:
        """The norm is taken in float64; then the float32 copy leaves."""
        if self.plan.family.opaque:
            return
        for name, itemsize in (("float64 gradient for its norm", 8), ("float32 gradient for the host", 4)):
            copy = self.temporary(name, itemsize * self.mine(weight), "uint8")
            del copy

    def end_backward(self) -> None:
        if self.stage == 1 and not self.sync:
            return  # gradients stay on the rank, and the bucket with them
        self.open_buckets()
        if self.stage == 1 and not self.overlaps:
            for weight in self.trained:
                if weight.name in self.grads:  # a stage may hold a weight that nothing on it uses
                    self.reduce_later(weight, self.grads.pop(weight.name))
        self.reduce()
        self.summed = self.summed or self.new
        self.new = None
        self.buckets.clear()
        super().end_backward()

    # -- step --------------------------------------------------------------------------------------

    def step(self) -> None:
        if self.offloads:  # on the host, from which the partition of weights comes back in place
            if self.plan.device == "cpu":
                self.temporaries([(self.partition,)], "float32")
            return
        largest = max(map(self.mine, self.trained))
        if not self.plan.family.opaque:
            norm = self.temporary("float64 gradient for the norm", 8 * largest, "uint8")
            del norm
        flat = self.temporary("flat gradient", self.partition, self.dtype, "gradients")
        gradient = flat
        if self.dtype != "float32":
            gradient = self.temporary("float32 gradient", self.partition, "float32", "gradients")
        del flat
        self.summed = None
        self.grads.clear()
        self.temporaries([(self.partition,)], "float32")
        del gradient
        if self.plan.torch_version < GATHERS_IN_PLACE_SINCE and self.plan.shards > 1:
            whole = self.partition * self.plan.shards
            shards = max(1, whole // self.knobs.allgather_bucket_size)
            gathered = self.temporary("gathered weights", -(-whole // shards), self.dtype, "communication")
            del gathered

    def zero_grad(self) -> None:
        self.grads.clear()
