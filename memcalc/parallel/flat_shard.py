"""FullyShardedDataParallel (FSDP 1): one flat parameter a unit, cut into one shard a rank."""

from __future__ import annotations

from memcalc.parallel.flat_units import FlatUnits
from memcalc.parallel.replicated import ROOT_UNIT
from memcalc.plan import Plan
from memcalc.precision import DTYPE_BYTES
from memcalc.recorder import Storage
from memcalc.sharding import flat_layout
from memcalc.spec import Weight
from memcalc.tape import Tape

__all__ = ["FlatShard"]


class FlatShard(FlatUnits):
    """A unit is gathered into one flat buffer, of which its weights are views; so there is no second copy.

    Source: torch/distributed/fsdp/_runtime_utils.py and _flat_param.py. The root stays gathered from forward to its
    backward. The gradient of a unit is concatenated, cast when it is reduced in another dtype, and reduce-scattered;
    its shard is cast back to the dtype of the weights. Offloaded, shards of gradients wait for the end of backward.
    """

    def __init__(self, tape: Tape, plan: Plan, units: dict[str, list[Weight]]) -> None:
        super().__init__(tape, plan, units)
        self.low, self.reduced = plan.precision_row.compute, plan.reduce_dtype
        self.knobs, self.shards = plan.fsdp, plan.shards
        aligned = 16 // DTYPE_BYTES[self.low] if self.knobs.original_parameters else 1
        layouts = {unit: flat_layout(weights, self.shards, aligned) for unit, weights in units.items() if weights}
        self.sizes = {unit: size for unit, (size, _) in layouts.items()}
        held = [
            [
                (weight, counts[rank])
                for unit, (_, slices) in layouts.items()
                for weight, counts in zip(units[unit], slices, strict=True)
                if counts[rank]
            ]
            for rank in range(self.shards)
        ]
        self.own = max(held, key=lambda parts: (sum(count for _, count in parts), len(parts)))
        self.full: dict[str, Storage] = {}
        self.unsharded: dict[str, Storage] = {}
        self.order = [unit for unit in units if unit != ROOT_UNIT]

    # -- what lives between steps ------------------------------------------------------------------

    def parameters(self) -> None:
        for unit, size in self.sizes.items():
            self.hold(f"{unit} flat shard", (size // self.shards,), "parameters")

    def updated(self) -> list[Weight]:
        if not self.knobs.original_parameters:
            return [Weight(f"{unit} flat shard", (size // self.shards,)) for unit, size in self.sizes.items()]
        return [Weight(weight.name, (count,), weight.group) for weight, count in self.own]

    def keep_gradients(self) -> None:
        for unit in self.sizes:
            self.grads[unit] = self._shard_gradient(unit, self.dtype)

    # -- gathering ---------------------------------------------------------------------------------

    def gather(self, unit: str) -> None:
        if unit in self.full or unit not in self.sizes:
            return
        size, cast = self.sizes[unit], None
        if self.shards == 1:  # only offloaded: brought to the device, not gathered
            self.full[unit] = self.flat(f"{unit} from the host", size, self.low)
            return
        if self.low != self.dtype or self.away:
            cast = self.flat(f"{unit} cast shard", size // self.shards, self.low)
        if self.low != self.dtype and self.away:
            shard = self.flat(f"{unit} shard from the host", size // self.shards, self.dtype)
            del shard
        self.full[unit] = self.flat(f"{unit} gather", size, self.low)
        self.gloo_copy(f"{unit} gather", size, self.low)
        del cast

    def flat(self, name: str, numel: int, dtype: str) -> Storage:
        return self.tape.allocate(name, (numel,), dtype, "communication", batched=False)

    def gloo_copy(self, name: str, numel: int, dtype: str) -> None:
        """gloo, the backend on CPUs, works on a copy of what it gathers and of what it reduces and scatters."""
        if self.plan.device == "cpu":
            copy = self.flat(f"{name} copy in gloo", numel, dtype)
            del copy

    def neighbour(self, unit: str, step: int) -> str | None:
        """The block before or after a unit in the order of forward; the root's come last in backward."""
        at = len(self.order) if unit == ROOT_UNIT and step < 0 else -1 if unit == ROOT_UNIT else self.order.index(unit)
        return self.order[at + step] if 0 <= at + step < len(self.order) else None

    def prefetch(self, unit: str, step: int) -> None:
        other = self.neighbour(unit, step)
        if other is not None:
            self.gather(other)

    def begin_forward(self) -> None:
        super().begin_forward()
        self.enter(ROOT_UNIT)

    def enter(self, unit: str) -> None:
        self.gather(unit)
        if self.knobs.forward_prefetch:
            self.prefetch(unit, 1)

    def leave(self, unit: str) -> None:
        if self.plan.strategy_row.reshards:
            self.full.pop(unit, None)

    def begin_backward(self) -> None:
        self.enter_backward(ROOT_UNIT)

    def enter_backward(self, unit: str) -> None:
        self.gather(unit)
        if self.knobs.backward_prefetch == "pre":
            self.prefetch(unit, -1)

    # -- gradients ---------------------------------------------------------------------------------

    def leave_backward(self, unit: str) -> None:
        if unit not in self.sizes:
            return
        size = self.sizes[unit]
        flat = self.tape.allocate(f"{unit} flat gradient", (size,), self.low, "gradients", batched=False)
        self.waiting[unit].clear()
        flat = self.unsharded.pop(unit, flat)
        if self.sync or self.plan.strategy_row.reshards:
            self.full.pop(unit, None)
        if self.knobs.backward_prefetch == "post" and unit != ROOT_UNIT:  # the root's comes last
            self.prefetch(unit, -1)
        if not self.sync:
            self.unsharded[unit] = flat
            return
        cast = self.flat(f"{unit} gradient to reduce", size, self.reduced) if self.reduced != self.low else None
        shard = self._shard_gradient(unit, self.reduced)
        self.gloo_copy(f"{unit} reduce-scatter", size, self.reduced)
        if self.reduced != self.dtype:
            shard = self._shard_gradient(unit, self.dtype)
        self.grads.setdefault(unit, shard)
        del cast, flat

    def end_backward(self) -> None:
        super().end_backward()
        if self.away and self.sync:  # copied to the host one by one, but let go together (_finalize_params)
            self.grads.clear()

    def _shard_gradient(self, unit: str, dtype: str) -> Storage:
        name, shape = f"{unit} shards gradient", (self.sizes[unit] // self.shards,)
        return self.tape.allocate(name, shape, dtype, "gradients", batched=False)
