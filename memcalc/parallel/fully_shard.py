"""``fully_shard`` (FSDP 2): what gathering and reduce-scattering allocate."""

from __future__ import annotations

from math import prod

from memcalc.parallel.replicated import ROOT_UNIT, Replicated
from memcalc.plan import Plan
from memcalc.precision import DTYPE_BYTES
from memcalc.quantised import QUANTISED, SHARDED, stored
from memcalc.recorder import Storage
from memcalc.sharding import rows_per_rank
from memcalc.spec import HEAD, Weight
from memcalc.tape import Tape

__all__ = ["FullyShard"]


class FullyShard(Replicated):
    """``fully_shard``: every parameter split by rows; a unit is gathered before use.

    Source: torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py and _fsdp_collectives.py. A gather makes a
    flat buffer and copies it out into full parameters. In forward the buffer of one unit is freed when the next unit
    has been copied out of its own: wait_for_unshard drops it before, but still has it in a local variable. In
    backward it is freed at once, and the next unit is gathered ahead. After a unit's backward its gradients are copied
    into a flat input of the reduce-scatter, which is freed when the next unit comes to that point; the output of the
    reduce-scatter holds the sharded gradients. With replicas it is all-reduced in place; a copy in another dtype than
    the shards' then stays until backward is done.

    In a pipeline of torch.distributed.pipelining (stage.py, backward_maybe_with_nosync and perform_reduce_grad) what
    backward gathered stays, and all units are reduced one after the other when all micro batches are done.
    """

    def __init__(self, tape: Tape, plan: Plan, units: dict[str, list[Weight]]) -> None:
        super().__init__(tape, plan, units)
        self.low = plan.precision_row.compute
        """dtype of gathered parameters."""
        self.shards = plan.shards
        self.reduced = self.trained_dtype if plan.fsdp.reduce_dtype == "weights" else plan.reduce_dtype
        self.full: dict[str, list[Storage]] = {}
        self.gathered: dict[str, Storage] = {}
        self.last_gather: Storage | None = None
        self.unsharded: dict[str, dict[str, Storage]] = {unit: {} for unit in units}
        self.accumulated: dict[str, dict[str, Storage]] = {}
        """Gradients of micro batches before, in the dtype they are reduced in where that is not their own."""
        self.replicated: list[Storage] = []
        self.unit_of = {weight.name: unit for unit, weights in units.items() for weight in weights}
        self.reduce_input: Storage | None = None
        self.late = plan.layout.pipeline > 1
        self.order = [ROOT_UNIT, *(unit for unit in units if unit != ROOT_UNIT)]

    def local_shape(self, weight: Weight) -> tuple[int, ...]:
        return rows_per_rank(weight.shape, self.shards)

    def keep_gradients(self) -> None:
        for unit in self.units:
            if self.numel(unit):
                self.grads[unit] = self._reduced(unit, self.trained_dtype)

    def parameter(self, weight: Weight) -> None:
        """Of a quantised weight only what is a parameter is divided."""
        if weight.dtype not in QUANTISED:
            return super().parameter(weight)
        for part, size in stored(weight.dtype, weight.shape):
            here = -(-size // self.plan.shards) if part in SHARDED else size
            self.hold(f"{weight.name} {part}", (here,), "parameters", "uint8")

    def gathered_bytes(self, weight: Weight) -> int:
        """Bytes of a weight over all ranks, padding included, as it is gathered."""
        if weight.dtype in QUANTISED:
            parts = [size for part, size in stored(weight.dtype, weight.shape) if part in SHARDED]
            return sum(-(-size // self.plan.shards) * self.plan.shards for size in parts)
        return prod(self.local_shape(weight)) * self.plan.shards * DTYPE_BYTES[self.gathered_dtype(weight)]

    def gathered_dtype(self, weight: Weight) -> str:
        """Only a mixed-precision policy casts; an adapter's own dtype stays otherwise."""
        return self.low if self.plan.precision_row.autocast else weight.dtype or self.low

    def numel(self, unit: str) -> int:
        """Padded elements of a unit's trained weights over all ranks."""
        return sum(prod(self.local_shape(weight)) * self.plan.shards for weight in self.units[unit] if weight.trainable)

    def _gather(self, unit: str) -> None:
        if unit in self.full or unit in self.gathered or self.shards == 1 or not self.units[unit]:
            return
        casts: list[Storage] = []
        counts = {weight.name: prod(self.local_shape(weight)) for weight in self.units[unit]}
        if self.away:  # shards come back one by one, and are cast one by one
            for name, count in counts.items():
                shard = self._flat(f"{name} shard from the host", count, self.dtype)
                cast = self.low != self.dtype
                casts.append(self._flat(f"{name} cast shard", count, self.low) if cast else shard)
                del shard
        elif self.low != self.dtype:  # one flat copy of all (_get_param_all_gather_inputs)
            casts.append(self._flat(f"{unit} cast shard", sum(counts.values()), self.low))
        # Of one dtype, or bytes where dtypes differ (_get_all_gather_input_metadatas).
        size = sum(self.gathered_bytes(weight) for weight in self.units[unit])
        self.gathered[unit] = self._flat(f"{unit} gather", size, "uint8")
        self._gloo_copy(f"{unit} gather", size, "uint8")
        casts.clear()  # a list of foreach_all_gather holds them until it returns

    def _copy_out(self, unit: str) -> None:
        if unit in self.full:
            return
        self.full[unit] = [
            self._flat(f"{weight.name} gathered", self.gathered_bytes(weight), "uint8") for weight in self.units[unit]
        ]

    def _flat(self, name: str, numel: int, dtype: str) -> Storage:
        return self.tape.allocate(name, (numel,), dtype, "communication", batched=False)

    def begin_forward(self) -> None:
        self.enter(ROOT_UNIT)

    def end_forward(self) -> None:
        self.last_gather = None

    def enter(self, unit: str) -> None:
        self._gather(unit)
        self._copy_out(unit)
        self.last_gather = self.gathered.pop(unit, self.last_gather)

    def leave(self, unit: str) -> None:
        if self.plan.strategy_row.reshards and unit != HEAD:
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

    def finish(self) -> None:
        if not self.late:
            return
        self.late, self.sync = False, True
        for unit in self.order:
            self.leave_backward(unit)
        self.late, self.reduce_input = True, None
        self.replicated.clear()

    def leave_backward(self, unit: str) -> None:
        if not self.late:
            self.full.pop(unit, None)
        grads = self.unsharded[unit]
        if unit in self.accumulated:  # what autograd made is added to it
            grads.clear()
        if not self.sync or self.late:
            if self.reduced != self.low:
                for weight in self.units[unit]:
                    if weight.trainable:
                        self._accumulate(unit, weight)
            return
        grads.update(self.accumulated.pop(unit, {}))
        self.reduce_input = None
        trained = [weight for weight in self.units[unit] if weight.trainable]
        if not trained:
            return
        self.reduce_input = self._flat(f"{unit} reduce-scatter input", self.numel(unit), self.reduced)
        # A loop variable of foreach_reduce still holds the last gradient when the list of them is cleared.
        last = grads.get(trained[-1].name) if self.shards > 1 else None
        grads.clear()
        reduced = self._reduced(unit, self.reduced)
        self._gloo_copy(f"{unit} reduce-scatter", self.numel(unit), self.reduced)
        if self.reduced != self.trained_dtype:
            if self.plan.strategy_row.replicates:  # kept until backward is done: its all-reduce may still go on
                self.replicated.append(reduced)
            reduced = self._reduced(unit, self.trained_dtype)
        del last
        if self.away:
            return
        self.grads.setdefault(unit, reduced)
        del reduced
        self.step_in_backward(unit, [self.local_shape(weight) for weight in trained])

    def _accumulate(self, unit: str, weight: Weight) -> None:
        held = self.accumulated.setdefault(unit, {})
        if weight.name not in held:
            name = f"{weight.name} accumulated gradient"
            held[weight.name] = self.tape.allocate(name, weight.shape, self.reduced, "gradients", batched=False)
        self.unsharded[unit].pop(weight.name, None)

    def _gloo_copy(self, name: str, numel: int, dtype: str) -> None:
        """gloo, the backend on CPUs, works on a copy of what it gathers and of what it reduces and scatters."""
        if self.plan.device == "cpu" and self.shards > 1:
            copy = self._flat(f"{name} copy in gloo", numel, dtype)
            del copy

    def _reduced(self, unit: str, dtype: str) -> Storage:
        name, size = f"{unit} shards gradient", self.numel(unit) // self.shards
        return self.tape.allocate(name, (size,), dtype, "gradients", batched=False)

    def end_backward(self) -> None:
        # FSDPState._root_post_backward_final_callback: the root is the first of all states.
        for unit in [ROOT_UNIT, *self.inputs_without_gradient]:
            if self.units[unit]:
                self.leave_backward(unit)
        self.gathered.clear()  # ahead of a unit that was not needed (FSDPParamGroup.finalize_backward)
        self.reduce_input = None
        self.replicated.clear()
        super().end_backward()
