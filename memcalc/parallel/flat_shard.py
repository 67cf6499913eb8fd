"""FullyShardedDataParallel (FSDP 1): one flat parameter a unit, cut into one shard a rank."""

from __future__ import annotations

from memcalc.parallel.flat_units import FlatUnits
from memcalc.parallel.replicated import ROOT_UNIT, in_order
from memcalc.plan import Plan
from memcalc.precision import DTYPE_BYTES
from memcalc.quantised import QUANTISED, SHARDED, stored
from memcalc.recorder import Storage, granularity
from memcalc.sharding import flat_layout
from memcalc.spec import Weight
from memcalc.tape import Tape

__all__ = ["FlatShard"]


def flat_part(weight: Weight, dtype: str) -> Weight:
    """What of a weight lies in a flat parameter of ``dtype``: of a quantised one only its packed parameters, viewed."""
    if weight.dtype not in QUANTISED:
        return weight
    size = sum(size for part, size in stored(weight.dtype, weight.shape) if part in SHARDED)
    return Weight(weight.name, (-(-size // DTYPE_BYTES[dtype]),), weight.group, trainable=False)


def stored_whole(weight: Weight) -> list[tuple[str, int]]:
    """What of a quantised weight is no parameter, so that every rank has all of it."""
    parts = stored(weight.dtype, weight.shape) if weight.dtype in QUANTISED else []
    return [(part, size) for part, size in parts if part not in SHARDED]


class FlatShard(FlatUnits):
    """A unit is gathered into one flat buffer, of which its weights are views; so there is no second copy.

    Source: torch/distributed/fsdp/_runtime_utils.py and _flat_param.py. The root stays gathered from forward to its
    backward. The gradient of a unit is concatenated, cast when it is reduced in another dtype, and reduce-scattered;
    its shard is cast back to the dtype of the weights. Offloaded, shards of gradients wait for the end of backward.
    """

    def __init__(self, tape: Tape, plan: Plan, units: dict[str, list[Weight]]) -> None:
        super().__init__(tape, plan, units)
        self.low = plan.precision_row.compute
        self.knobs, self.shards = plan.fsdp, plan.shards
        layouts = {unit: self.layout(unit) for unit, weights in units.items() if weights}
        self.sizes = {unit: size for unit, (size, _) in layouts.items()}
        held = [
            [
                (weight, counts[rank])
                for unit, (_, slices) in layouts.items()
                for weight, counts in zip(units[unit], slices, strict=True)
                if counts[rank] and weight.trainable
            ]
            for rank in range(self.shards)
        ]
        itemsize, block = DTYPE_BYTES[self.dtype], granularity(plan.device)
        # On CUDA a rank with more, smaller tensors may hold more than one with more elements.
        self.own = max(
            held,
            key=lambda parts: (sum(-(-n * itemsize // block) for _, n in parts), sum(n for _, n in parts), len(parts)),
        )
        self.unhooked = plan.reentrant
        """Nothing is fetched ahead in backward: under the reentrant checkpoint's no_grad no output has a hook that would
        need the unit again (_register_pre_backward_hooks), and a unit that is not needed is not prefetched."""
        self.full: dict[str, Storage] = {}
        self.unsharded: dict[str, Storage] = {}
        self.order = [unit for unit in units if unit != ROOT_UNIT]

    def layout(self, unit: str) -> tuple[int, list[list[int]]]:
        """Elements of a unit's flat parameter, and of each of its weights in each rank's shard."""
        aligned = 16 // DTYPE_BYTES[self.gathered_in(unit)] if self.knobs.original_parameters else 1
        return flat_layout([flat_part(weight, self.dtype) for weight in self.units[unit]], self.shards, aligned)

    def kept_in(self, unit: str) -> str:
        """dtype of a unit's shards; all of a unit have one, and quantised weights are viewed in it."""
        return next((w.dtype for w in self.units[unit] if w.dtype and w.dtype not in QUANTISED), self.dtype)

    def gathered_in(self, unit: str) -> str:
        """dtype a unit is gathered in: only a mixed-precision policy casts, and its own stays otherwise."""
        own = self.kept_in(unit)
        return own if own != self.dtype and not self.plan.adapter.autocast else self.low

    def reduced_in(self, unit: str) -> str:
        """dtype a unit's gradients are reduced in."""
        own = self.kept_in(unit) != self.dtype
        return self.gathered_in(unit) if own else self.plan.reduce_dtype

    def trains(self, unit: str) -> bool:
        """A unit's flat parameter wants a gradient: any of its weights does."""
        return any(weight.trainable for weight in self.units[unit])

    # -- what lives between steps ------------------------------------------------------------------

    def parameters(self) -> None:
        for unit in [*self.order, ROOT_UNIT]:  # blocks are wrapped before what is around them
            if unit in self.sizes:
                self.hold(f"{unit} flat shard", (self.sizes[unit] // self.shards,), "parameters", self.kept_in(unit))
        for weight in self.weights:
            for part, size in stored_whole(weight):
                self.hold(f"{weight.name} {part}", (size,), "parameters", "uint8")

    def updated(self) -> list[Weight]:
        if not self.knobs.original_parameters:
            sizes = {unit: size for unit, size in self.sizes.items() if self.trains(unit)}
            return [Weight(f"{unit} flat shard", (size // self.shards,)) for unit, size in sizes.items()]
        return in_order(self.plan, [Weight(weight.name, (count,), weight.group) for weight, count in self.own])

    def keep_gradients(self) -> None:
        for unit in self.sizes:
            if self.trains(unit):
                self.grads[unit] = self._shard_gradient(unit, self.kept_in(unit))

    # -- gathering ---------------------------------------------------------------------------------

    def gather(self, unit: str) -> None:
        if unit in self.full or unit not in self.sizes:
            return
        size, cast = self.sizes[unit], None
        kept, low = self.kept_in(unit), self.gathered_in(unit)
        if self.shards == 1:  # only offloaded: brought to the device, not gathered
            self.full[unit] = self.flat(f"{unit} from the host", size, low)
            return
        if low != kept or self.away:
            cast = self.flat(f"{unit} cast shard", size // self.shards, low)
        if low != kept and self.away:
            shard = self.flat(f"{unit} shard from the host", size // self.shards, kept)
            del shard
        self.full[unit] = self.flat(f"{unit} gather", size, low)
        self.gloo_copy(f"{unit} gather", size, low)
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
        if self.knobs.backward_prefetch == "pre" and not self.unhooked:
            self.prefetch(unit, -1)

    # -- gradients ---------------------------------------------------------------------------------

    def leave_backward(self, unit: str) -> None:
        if unit not in self.sizes:
            return
        if not self.trains(unit):
            return self.free_frozen(unit)
        size, kept, low, reduced = self.sizes[unit], self.kept_in(unit), self.gathered_in(unit), self.reduced_in(unit)
        flat = self.tape.allocate(f"{unit} flat gradient", (size,), low, "gradients", batched=False)
        self.waiting[unit].clear()
        flat = self.unsharded.pop(unit, flat)
        if self.sync or self.plan.strategy_row.reshards:
            self.full.pop(unit, None)
        if self.knobs.backward_prefetch == "post" and unit != ROOT_UNIT and not self.unhooked:  # the root's comes last
            self.prefetch(unit, -1)
        if not self.sync:
            self.unsharded[unit] = flat
            return
        cast = self.flat(f"{unit} gradient to reduce", size, reduced) if reduced != low else None
        shard = self._shard_gradient(unit, reduced)
        self.gloo_copy(f"{unit} reduce-scatter", size, reduced)
        if reduced != kept:
            shard = self._shard_gradient(unit, kept)
        self.grads.setdefault(unit, shard)
        del cast, flat

    def free_frozen(self, unit: str) -> None:
        """What a flat parameter without a gradient does after its backward (_post_backward_reshard_only_hook)."""
        if self.sync or self.plan.strategy_row.reshards:
            self.full.pop(unit, None)
        if self.knobs.backward_prefetch == "post" and unit != ROOT_UNIT and not self.unhooked:
            self.prefetch(unit, -1)

    def end_backward(self) -> None:
        super().end_backward()
        if self.sync:  # what was gathered ahead for a unit whose backward was over
            self.full = {unit: full for unit, full in self.full.items() if unit == ROOT_UNIT}
        if self.away and self.sync:  # copied to the host one by one, but let go together (_finalize_params)
            self.grads.clear()

    def _shard_gradient(self, unit: str, dtype: str) -> Storage:
        name, shape = f"{unit} shards gradient", (self.sizes[unit] // self.shards,)
        return self.tape.allocate(name, shape, dtype, "gradients", batched=False)
