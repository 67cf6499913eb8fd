"""What a strategy allocates around the model's own work: its hooks on the tape.

One class per way of working, with the same few hooks the real libraries use. ``states`` allocates what
lives between steps; the others are called by the ledger when a block is entered or left, forward and
backward, and when a weight's gradient is finished.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from memcalc.plan import Plan
from memcalc.precision import DTYPE_BYTES
from memcalc.sharding import ddp_buckets, greedy_partition, rows_per_rank
from memcalc.spec import Weight
from memcalc.tape import Storage, Tape

__all__ = ["Ddp", "FlatUnits", "FullyShard", "Replicated", "make", "shard_units"]

ROOT_UNIT = "root"


class Replicated:
    """Every rank holds everything: one rank, and the base of the others."""

    def __init__(self, tape: Tape, plan: Plan, units: dict[str, list[Weight]]) -> None:
        self.tape, self.plan, self.units = tape, plan, units
        self.dtype = plan.precision_row.weights
        """dtype of what lives between steps."""
        self.weights = [weight for unit in units.values() for weight in unit]
        self.held: list[Storage] = []
        self.grads: dict[str, Storage] = {}
        self.sync = True
        """False while gradients are only accumulated (no_sync)."""

    # -- what lives between steps ------------------------------------------------------------------

    def states(self) -> None:
        """Parameters, optimizer states and whatever else lives between steps."""
        for weight in self.weights:
            self.hold(weight.name, self.local_shape(weight), "parameters")
        self.optimizer_states()
        for name, shape, dtype in self.plan.family.buffers(self.plan):
            self.hold(name, shape, "buffers", dtype)
        for name, size in workspaces(self.plan):
            self.hold(name, (size,), "temporary", "uint8")
        if not self.plan.set_to_none:
            self.keep_gradients()

    def optimizer_states(self) -> None:
        row = self.plan.optimizer_row
        for weight in self.updated():
            local = Weight(weight.name, self.local_shape(weight), weight.group)
            for size in row.state_bytes(local, self.dtype):
                self.hold(f"{weight.name} state", (size,), "optimizer", "uint8")
            # The counter is a CPU scalar unless the step is fused (torch/optim/adam.py, _init_group).
            if row.counter and not self.plan.family.opaque and (self.plan.device == "cpu" or self.plan.optimizer_kind == "fused"):
                self.hold(f"{weight.name} step counter", (1,), "optimizer", "float32")

    def hold(self, name: str, shape: tuple[int, ...], category: str, dtype: str | None = None) -> None:
        storage = self.tape.allocate(name, shape, dtype or self.dtype, category, batched=False)
        self.held.append(storage)

    def local_shape(self, weight: Weight) -> tuple[int, ...]:
        """Shape of this rank's part of a weight."""
        return weight.shape

    def updated(self) -> list[Weight]:
        """Weights whose update this rank computes."""
        return self.weights

    def keep_gradients(self) -> None:
        """Gradients that are zeroed and not freed after a step."""
        for weight in self.weights:
            self.grads[weight.name] = self.new_gradient(weight.name, weight.numel)

    def new_gradient(self, name: str, numel: int) -> Storage:
        return self.tape.allocate(f"{name} gradient", (numel,), self.dtype, "gradients", batched=False)

    # -- hooks -------------------------------------------------------------------------------------

    def begin_forward(self) -> None:
        """Before the model's forward pass."""

    def end_forward(self) -> None:
        """After the model's forward pass."""

    def begin_backward(self) -> None:
        """When the gradient of the model's output arrives."""

    def enter(self, unit: str) -> None:
        """Before a block's forward pass."""

    def leave(self, unit: str) -> None:
        """After a block's forward pass."""

    def enter_backward(self, unit: str) -> None:
        """When the gradient of a block's output arrives."""

    def leave_backward(self, unit: str) -> None:
        """When a block's backward is done."""

    def gradient(self, weight: Weight, grad: Storage) -> None:
        """A finished gradient: kept, or added in place to the one that is there."""
        self.grads.setdefault(weight.name, grad)

    def end_backward(self) -> None:
        """When backward is done."""

    def zero_grad(self) -> None:
        """After the step."""
        if self.plan.set_to_none:
            self.grads.clear()

    def step_shapes(self) -> list[tuple[int, ...]]:
        """Shapes of the tensors the optimizer updates on this rank."""
        return [self.local_shape(weight) for weight in self.updated()]


class Ddp(Replicated):
    """Flat buckets beside the gradients, kept for the whole run; with ZeRO-1 also divided updates.

    Source: torch/csrc/distributed/c10d/reducer.cpp; with ``gradient_as_bucket_view`` a finished gradient is
    copied into its bucket and freed.
    """

    def states(self) -> None:
        itemsize = DTYPE_BYTES[self.dtype]
        sizes = ddp_buckets(self.weights, itemsize, self.plan.bucket_mb)
        category = "gradients" if self.plan.bucket_views else "communication"
        super().states()
        for index, size in enumerate(sizes):
            self.hold(f"DDP bucket {index}", (size,), category, "uint8")

    def updated(self) -> list[Weight]:
        if not self.plan.strategy_row.shards_optimizer:
            return self.weights
        return max(greedy_partition(self.weights, self.plan.ranks), key=lambda part: sum(w.numel for w in part))

    def keep_gradients(self) -> None:
        if not self.plan.bucket_views:
            super().keep_gradients()

    def gradient(self, weight: Weight, grad: Storage) -> None:
        if self.plan.bucket_views and self.sync:
            self.grads.pop(weight.name, None)
        else:
            super().gradient(weight, grad)


class FlatUnits(Replicated):
    """FSDP's wrapper with NO_SHARD: one flat parameter per unit, whose gradient is put together at the unit's end.

    Source: torch/distributed/fsdp/_flat_param.py; the parameters are views, so their gradients wait until the
    last of the unit is there and are then concatenated.
    """

    def __init__(self, tape: Tape, plan: Plan, units: dict[str, list[Weight]]) -> None:
        super().__init__(tape, plan, units)
        self.waiting: dict[str, dict[str, Storage]] = {unit: {} for unit in units}
        self.stale = False
        self.unit_of = {weight.name: unit for unit, weights in units.items() for weight in weights}

    def gradient(self, weight: Weight, grad: Storage) -> None:
        self.waiting[self.unit_of[weight.name]][weight.name] = grad

    def states(self) -> None:
        super().states()
        if self.plan.set_to_none:  # zero_grad drops the views; the flat gradient goes when the next forward begins
            self.keep_gradients()
            self.stale = True

    def keep_gradients(self) -> None:
        for unit in self.units:
            self.grads[unit] = self._flat_gradient(unit)

    def begin_forward(self) -> None:
        if self.stale:
            self.grads.clear()
            self.stale = False

    def zero_grad(self) -> None:
        """Nothing is freed before the next forward pass."""

    def leave_backward(self, unit: str) -> None:
        flat = self._flat_gradient(unit)
        self.waiting[unit].clear()
        self.grads.setdefault(unit, flat)

    def _flat_gradient(self, unit: str) -> Storage:
        return self.new_gradient(f"{unit} flat", sum(weight.numel for weight in self.units[unit]))

    def end_backward(self) -> None:
        if self.units.get(ROOT_UNIT):
            self.leave_backward(ROOT_UNIT)


class FullyShard(Replicated):
    """``fully_shard``: every parameter split by rows; a unit is gathered before use.

    Source: torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py and _fsdp_collectives.py. A gather makes a
    flat buffer and copies it out into full parameters. In forward the buffer of one unit is freed when the
    next unit's has been made; in backward it is freed at once, and the next unit is gathered ahead. After a
    unit's backward its gradients are copied into a flat input of the reduce-scatter, which is freed when the
    next unit comes to that point; the output of the reduce-scatter holds the sharded gradients.
    """

    def __init__(self, tape: Tape, plan: Plan, units: dict[str, list[Weight]]) -> None:
        super().__init__(tape, plan, units)
        self.low = plan.precision_row.compute
        """dtype of gathered parameters; gradients are reduced in the dtype of the shards."""
        self.full: dict[str, list[Storage]] = {}
        self.gathered: dict[str, Storage] = {}
        self.last_gather: Storage | None = None
        self.unsharded: dict[str, dict[str, Storage]] = {unit: {} for unit in units}
        self.unit_of = {weight.name: unit for unit, weights in units.items() for weight in weights}
        self.reduce_input: Storage | None = None
        self.order = [ROOT_UNIT, *(unit for unit in units if unit != ROOT_UNIT)]

    def local_shape(self, weight: Weight) -> tuple[int, ...]:
        return rows_per_rank(weight.shape, self.plan.ranks)

    def keep_gradients(self) -> None:
        for unit in self.units:
            self.grads[unit] = self._reduced(unit)

    def padded(self, weight: Weight) -> int:
        """Padded elements of a weight over all ranks."""
        return prod(self.local_shape(weight)) * self.plan.ranks

    def numel(self, unit: str) -> int:
        """Padded elements of a unit over all ranks."""
        return sum(self.padded(weight) for weight in self.units[unit])

    def _gather(self, unit: str) -> None:
        if unit in self.full or unit in self.gathered or self.plan.ranks == 1 or not self.units[unit]:
            return
        casts: list[Storage] = []
        if self.low != self.dtype:
            casts = [
                self._flat(f"{weight.name} cast shard", prod(self.local_shape(weight)), self.low)
                for weight in self.units[unit]
            ]
        self.gathered[unit] = self._flat(f"{unit} gather", self.numel(unit), self.low)
        casts.clear()
        self._gloo_copy(f"{unit} gather", self.numel(unit), self.low)

    def _copy_out(self, unit: str) -> None:
        if unit in self.full:
            return
        self.full[unit] = [
            self._flat(f"{weight.name} gathered", self.padded(weight), self.low) for weight in self.units[unit]
        ]

    def _flat(self, name: str, numel: int, dtype: str) -> Storage:
        return self.tape.allocate(name, (numel,), dtype, "communication", batched=False)

    def begin_forward(self) -> None:
        self.enter(ROOT_UNIT)

    def end_forward(self) -> None:
        self.last_gather = None

    def enter(self, unit: str) -> None:
        self._gather(unit)
        if unit in self.gathered:
            self.last_gather = None
        self._copy_out(unit)
        self.last_gather = self.gathered.pop(unit, self.last_gather)

    def leave(self, unit: str) -> None:
        if self.plan.strategy_row.reshards:
            self.full.pop(unit, None)

    def begin_backward(self) -> None:
        self.enter_backward(ROOT_UNIT)

    def enter_backward(self, unit: str) -> None:
        self._gather(unit)
        self._copy_out(unit)
        self.gathered.pop(unit, None)
        blocks = self.order[1:]
        ahead = len(blocks) if unit == ROOT_UNIT else blocks.index(unit)
        if ahead:
            self._gather(blocks[ahead - 1])

    def gradient(self, weight: Weight, grad: Storage) -> None:
        self.unsharded[self.unit_of[weight.name]].setdefault(weight.name, grad)

    def leave_backward(self, unit: str) -> None:
        self.full.pop(unit, None)
        if not self.sync:
            return
        self.reduce_input = None
        self.reduce_input = self._flat(f"{unit} reduce-scatter input", self.numel(unit), self.dtype)
        # A loop variable of foreach_reduce still holds the last gradient when the list of them is cleared.
        last = self.unsharded[unit].get(self.units[unit][-1].name) if self.plan.ranks > 1 else None
        self.unsharded[unit].clear()
        reduced = self._reduced(unit)
        self._gloo_copy(f"{unit} reduce-scatter", self.numel(unit), self.dtype)
        del last
        self.grads.setdefault(unit, reduced)

    def _gloo_copy(self, name: str, numel: int, dtype: str) -> None:
        """gloo, the backend on CPUs, works on a copy of what it gathers and of what it reduces and scatters."""
        if self.plan.device == "cpu" and self.plan.ranks > 1:
            copy = self._flat(f"{name} copy in gloo", numel, dtype)
            del copy

    def _reduced(self, unit: str) -> Storage:
        return self.new_gradient(f"{unit} shards", self.numel(unit) // self.plan.ranks)

    def end_backward(self) -> None:
        if self.units.get(ROOT_UNIT):
            self.leave_backward(ROOT_UNIT)
        self.reduce_input = None


# cuBLAS workspace of one handle, taken from the caching allocator at the first matrix product and kept: 32 MiB from
# compute capability 9.0 on, 8.125 MiB before (aten/src/ATen/cuda/CublasHandlePool.cpp, _parseChosenWorkspaceSize).
# Forward and backward run on threads of their own, each with its own handle. From 2.15 on nothing is kept.
WORKSPACE_BEFORE_HOPPER, WORKSPACE_SINCE_HOPPER = 8_519_680, 33_554_432
WORKSPACE_UNTIL = (2, 15)


def workspaces(plan: Plan) -> list[tuple[str, int]]:
    """cuBLAS workspaces kept by one rank, when the card is known and the model has matrix products."""
    gpu = plan.gpu_row
    if plan.device != "cuda" or gpu is None or gpu.capability is None or plan.family.opaque:
        return []
    if plan.torch_version >= WORKSPACE_UNTIL:
        return []
    size = WORKSPACE_SINCE_HOPPER if gpu.capability >= (9, 0) else WORKSPACE_BEFORE_HOPPER
    return [(f"cuBLAS workspace, {thread} thread", size) for thread in ("forward", "backward")]


def make(tape: Tape, plan: Plan, units: dict[str, list[Weight]]) -> Replicated:
    """The hooks of the plan's strategy."""
    row = plan.strategy_row
    if row.gathers:
        return FullyShard(tape, plan, units)
    if row.buckets:
        return Ddp(tape, plan, units)
    return FlatUnits(tape, plan, units) if row.flat_units else Replicated(tape, plan, units)


def shard_units(weights: Sequence[Weight], every: int) -> dict[str, list[Weight]]:
    """Weights by the unit that owns them: consecutive blocks, ``every`` at a time, and the root for the rest.

    >>> parts = shard_units([Weight("e", (1,)), Weight("a", (1,), "h.0"), Weight("b", (1,), "h.1")], 2)
    >>> {unit: [weight.name for weight in part] for unit, part in parts.items()}
    {'root': ['e'], 'h.0': ['a', 'b']}
    """
    blocks = list(dict.fromkeys(weight.group for weight in weights if "." in weight.group))
    leader = {block: blocks[index // every * every] for index, block in enumerate(blocks)}
    units: dict[str, list[Weight]] = {ROOT_UNIT: []}
    for weight in weights:
        units.setdefault(leader.get(weight.group, ROOT_UNIT), []).append(weight)
    return units
