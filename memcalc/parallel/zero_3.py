"""DeepSpeed's ZeRO stage 3: every weight divided for itself, gathered for the module that uses it."""

from __future__ import annotations

from memcalc.parallel.fetching import Fetching, Gather
from memcalc.parallel.replicated import Replicated
from memcalc.plan import Plan
from memcalc.recorder import Storage
from memcalc.sharding import sub_groups
from memcalc.spec import Weight
from memcalc.tape import Tape

__all__ = ["Zero3"]


class Zero3(Replicated):
    """Partitions of weights, masters, states and gradients; a reduce bucket that lives as long as the run.

    Source: deepspeed/runtime/zero/stage3.py, and ``Fetching`` for what is gathered. Weights up to the persistence
    threshold stay gathered from one step to the next. The step goes group by group, with a float32 gradient of each.
    """

    def __init__(self, tape: Tape, plan: Plan, units: dict[str, list[Weight]]) -> None:
        super().__init__(tape, plan, units)
        self.knobs, self.offload = plan.deepspeed, plan.offload
        self.summed = "float32" if self.knobs.grad_accum_dtype == "float32" else self.dtype
        self.groups = sub_groups(self.trained, plan.shards, self.knobs.sub_group_size)
        self.partition = sum(self.groups)
        self.parts = sum(-(-weight.numel // plan.shards) for weight in self.weights)
        self.persistent = self._persistent()
        self.modules = Fetching(self.knobs, {weight.name for weight in self.persistent}, self.temporary, self.start)
        # A model of unknown layers is one tensor, whose gathers would say nothing.
        if plan.shards > 1 and not (plan.family.opaque and not plan.model.layers):
            tape.modules = self.modules
        self.kept: list[Storage] = []
        self.bucket: list[Weight] = []
        self.filled = 0
        self.waiting: list[Storage] = []

    def part(self, weight: Weight) -> int:
        """Elements of a weight that a rank holds."""
        return -(-weight.numel // self.plan.shards)

    def _persistent(self) -> list[Weight]:
        found, total = [], 0
        for weight in self.weights:
            if weight.numel + total > self.knobs.model_persistence_threshold:
                continue
            if weight.numel <= self.knobs.persistence_threshold:
                found.append(weight)
                total += weight.numel
        return found

    # -- what lives between steps ------------------------------------------------------------------

    def parameters(self) -> None:
        self.tape.moment = "init"
        parts = []
        for weight in self.weights:  # where the model was built whole, each weight goes when it was divided
            parts.append(self.temporary(f"{weight.name} part", self.part(weight)))
            self.whole.pop(weight.name, None)
        parts.clear()
        if self.offload.parameters == "none":
            self.hold("partitions of weights", (self.parts,), "parameters")

    def optimizer_states(self) -> None:
        if self.offload.optimizer == "none":
            for index, size in enumerate(self.groups):
                flat = Weight(f"float32 group {index}", (size,))
                # A copy of float32 weights too: _create_fp32_partitions means to leave it out, but compares a torch.device
                # with a string, which are never equal; before, it always made it.
                cast = self.temporary(f"{flat.name} cast", size, "float32") if self.dtype != "float32" else None
                self.hold(flat.name, flat.shape, "optimizer", "float32")
                del cast
                self.hold_states(flat, "float32")
            self.hold("gradient partitions", (self.partition,), "gradients", self.summed)
        if self.knobs.contiguous_gradients:
            self.hold("reduce bucket", (self.knobs.reduce_bucket_size,), "communication")
        self.gather_persistent()

    def updates_on_host(self) -> int:
        return len(self.groups) if self.offload.optimizer != "none" else 0

    def keep_gradients(self) -> None:
        """Gradients are never kept but as partitions."""

    def temporary(self, name: str, numel: int, dtype: str = "", category: str = "communication") -> Storage:
        return self.tape.allocate(name, (numel,), dtype or self.dtype, category, batched=False)

    def gather_persistent(self) -> None:
        if self.plan.shards > 1:
            self.kept = [
                self.temporary(f"{weight.name} persistent", self.part(weight) * self.plan.shards)
                for weight in self.persistent
            ]

    def start(self, weights: list[Weight]) -> Gather:
        """An all-gather; offloaded partitions are first brought to the device."""
        flat = self.temporary(f"{weights[0].name} gather", sum(map(self.part, weights)) * self.plan.shards)
        if self.offload.parameters != "none":
            brought = [self.temporary(f"{weight.name} from the host", self.part(weight)) for weight in weights]
            brought.clear()
        return Gather(weights, flat)

    # -- backward ----------------------------------------------------------------------------------

    def begin_forward(self) -> None:
        self.modules.begin()

    def gradient(self, weight: Weight, grad: Storage) -> None:
        limit = self.knobs.reduce_bucket_size
        if self.filled + weight.numel > limit and self.filled:
            self.reduce()
        if not self.knobs.contiguous_gradients or self.filled + weight.numel > limit:
            self.waiting.append(grad)
        self.bucket.append(weight)
        self.filled += weight.numel

    def reduce(self) -> None:
        """Reduce-scatter a copy of the bucket, in which the ranks' parts lie together, into the gradient partitions."""
        in_place = not self.knobs.reduce_scatter and self.knobs.contiguous_gradients and not self.waiting
        alone = len(self.bucket) == 1 and self.bucket[0].numel % self.plan.shards == 0
        copy = None
        if not in_place and not alone:
            copy = self.temporary("reduce-scatter input", sum(map(self.part, self.bucket)) * self.plan.shards)
        if self.summed != self.dtype:
            parts = [self.temporary(f"{w.name} part", self.part(w), self.summed) for w in self.bucket]
            parts.clear()
        wide: list[Storage] = []
        if self.offload.optimizer != "none" and not self.plan.family.opaque:
            # _offload_grad_partition_at_boundary: one by one, and for NVMe written when the bucket is through.
            swaps = self.offload.optimizer == "nvme" and self.summed != "float32"
            for weight in self.bucket:
                norm = self.temporary("float64 gradient for its norm", 8 * self.part(weight), "uint8")
                del norm
                if swaps:
                    wide.append(self.temporary(f"{weight.name} part, float32", self.part(weight), "float32"))
        del copy
        wide.clear()
        self.waiting.clear()
        self.bucket.clear()
        self.filled = 0

    def end_backward(self) -> None:
        if self.bucket:
            self.reduce()
        super().end_backward()

    # -- step --------------------------------------------------------------------------------------

    def step(self) -> None:
        self.modules.drop()
        self.kept.clear()
        if self.offload.optimizer != "none":
            for size in self.groups if self.plan.device == "cpu" else []:
                self.temporaries([(size,)], "float32")
            return
        if not self.plan.family.opaque:
            largest = max(map(self.part, self.trained))
            norm = self.temporary("float64 gradient for the norm", 8 * largest, "uint8", "temporary")
            del norm
        for index, size in enumerate(self.groups):
            flat = self.temporary(f"flat gradient {index}", size, self.summed, "gradients")
            gradient = flat
            if self.summed != "float32":
                gradient = self.temporary(f"float32 gradient {index}", size, "float32", "gradients")
            del flat
            self.temporaries([(size,)], "float32")
            del gradient

    def zero_grad(self) -> None:
        self.gather_persistent()
