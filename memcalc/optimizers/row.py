"""One optimizer: what it keeps for a weight, and what its step makes; and the few shapes such steps have."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from memcalc.precision import DTYPE_BYTES
from memcalc.spec import Weight

__all__ = [
    "KINDS", "Held", "Optimizer", "Shape", "States", "Step", "copies", "each", "float32_copies", "fullest", "lists",
    "nothing", "rebound", "since",
]  # fmt: skip

KINDS = ("foreach", "for-loop", "fused")

Shape = tuple[int, ...]
Held = list[tuple[str, int]]
"""Tensors alive together, as (name, bytes), in order of allocation."""
States = Callable[[Shape, int], list[int]]
Step = Callable[[Sequence[Shape], int, tuple[int, int]], Held]
"""``(shapes, itemsize, torch version) -> what is alive at the fullest point of step()``."""


def fullest(moments: list[Held]) -> Held:
    """The one that holds most."""
    return max(moments, key=lambda held: sum(size for _, size in held), default=[])


def nothing(shapes: Sequence[Shape], itemsize: int, version: tuple[int, int]) -> Held:
    """One kernel updates everything in place."""
    return []


def lists(*names: str) -> Step:
    """foreach: each name is a whole list of tensors, one the size of each weight."""
    return lambda shapes, itemsize, version: [(name, prod(s) * itemsize) for name in names for s in shapes]


def each(*names: str, kept: int = 0) -> Step:
    """for-loop: tensors the size of the weight being updated.

    ``kept`` of them are still bound to local variables when the next weight's are made.
    """

    def step(shapes: Sequence[Shape], itemsize: int, version: tuple[int, int]) -> Held:
        sizes = [prod(s) * itemsize for s in shapes]
        return fullest([
            [("of the weight before", old)] * kept * (i > 0) + [(name, new) for name in names]
            for i, (old, new) in enumerate(zip([0, *sizes], sizes, strict=False))
        ])  # fmt: skip

    return step


def rebound(*names: str) -> Step:
    """for-loop: each name holds the last weight's tensor until the next one's is there."""

    def step(shapes: Sequence[Shape], itemsize: int, version: tuple[int, int]) -> Held:
        bound: dict[str, int] = {}
        moments: list[Held] = []
        for shape in shapes:
            for name in names:
                size = prod(shape) * itemsize
                moments.append([*bound.items(), (f"next {name}", size)])
                bound[name] = size
        return fullest(moments)

    return step


def since(release: tuple[int, int], new: Step, old: Step) -> Step:
    """``new`` from this torch release on, ``old`` before it."""
    return lambda shapes, itemsize, version: (new if version >= release else old)(shapes, itemsize, version)


def copies(count: int) -> States:
    """``count`` states shaped and typed like the weight (``zeros_like``)."""
    return lambda shape, itemsize: [prod(shape) * itemsize] * count


def float32_copies(count: int) -> States:
    """``count`` states shaped like the weight, in float32 whatever its dtype."""
    return lambda shape, itemsize: [prod(shape) * 4] * count


@dataclass(frozen=True, kw_only=True, slots=True)
class Optimizer:
    """One row."""

    name: str
    summary: str
    library: str
    """The class that is modelled, with all its defaults."""
    states: States
    """``(shape, itemsize) -> bytes of each state tensor`` of one weight."""
    steps: Mapping[str, Step]
    """What ``step()`` allocates, for each kind the library offers; its default on CUDA comes first."""
    counters: int = 1
    """Float32 numbers per weight: CPU scalars (for-loop, foreach), a device block each when fused."""
    trained: bool = True
    """``trainers/optimizers.py`` has it, where it is torch's."""
    shardable: bool = True
    """Works on the row-wise shards of ``fully_shard`` (DTensors)."""
    paged_from: int = 0
    """Elements from which a weight's states are in unified memory, outside of torch's allocator; 0 for none."""
    decoupled: bool = True
    """Weight decay does not go into the gradient; where False, ``l2`` of a plan's update makes a copy of it."""
    frees_decayed: bool = False
    """In foreach form that copy is gone, or taken over, before the step's other temporaries are made."""
    rest: Optimizer | None = None
    """Updates all that is no matrix inside a block, where this one is for such matrices only."""

    @property
    def kinds(self) -> tuple[str, ...]:
        """The forms of ``step()`` there are, the library's default on CUDA first."""
        return tuple(self.steps)

    def usual_kind(self, device: str) -> str:
        """The library's own choice on a device; ``foreach`` is for accelerators only (torch/utils/_foreach_utils.py)."""
        return "for-loop" if device == "cpu" and "for-loop" in self.kinds else self.kinds[0]

    def state_bytes(self, weight: Weight, dtype: str) -> list[int]:
        """Bytes of each state tensor kept for one weight on the device.

        >>> from memcalc.optimizers import OPTIMIZERS
        >>> OPTIMIZERS["adamw"].state_bytes(Weight("w", (1000, 10)), "float32")
        [40000, 40000]
        >>> OPTIMIZERS["paged-adamw"].state_bytes(Weight("w", (1000, 1000)), "bfloat16")
        []
        """
        return [] if self.paged(weight) else self.part(weight).states(weight.shape, DTYPE_BYTES[dtype])

    def part(self, weight: Weight) -> Optimizer:
        """Who updates this weight: this optimizer, or the one for the rest.

        >>> from memcalc.optimizers import OPTIMIZERS
        >>> OPTIMIZERS["muon"].part(Weight("wte.weight", (50257, 768))).name
        'adamw'
        """
        hidden = len(weight.shape) == 2 and "." in weight.group
        return self if self.rest is None or hidden else self.rest

    def host_bytes(self, weight: Weight, dtype: str) -> int:
        """Bytes of states that are paged out to the host while no step is being taken.

        >>> from memcalc.optimizers import OPTIMIZERS
        >>> OPTIMIZERS["paged-adamw"].host_bytes(Weight("w", (1000, 1000)), "bfloat16")
        8000000
        """
        return sum(self.states(weight.shape, DTYPE_BYTES[dtype])) if self.paged(weight) else 0

    def paged(self, weight: Weight) -> bool:
        """The states of this weight are in unified memory."""
        return bool(self.paged_from) and weight.numel >= self.paged_from

    def temporaries(
        self,
        shapes: Sequence[tuple[int, ...]],
        itemsize: int,
        kind: str,
        torch_version: tuple[int, int],
        l2: bool = False,
    ) -> list[tuple[str, int]]:
        """(name, bytes) of what is alive together at the fullest point of ``step()``, in order of allocation.

        ``shapes`` are the tensors this rank updates, in the order the optimizer holds them. With ``l2`` decay is
        added to copies of the gradients (torch/optim/sgd.py and adam.py, weight_decay). Raises KeyError for a kind
        that is not in ``kinds``.

        >>> from memcalc.optimizers import OPTIMIZERS
        >>> OPTIMIZERS["adam"].temporaries([(10, 10), (10,)], 4, "foreach", (2, 13))
        [('root of the second moment', 400), ('root of the second moment', 40)]
        >>> sum(size for _, size in OPTIMIZERS["adam"].temporaries([(10, 10), (10,)], 4, "foreach", (2, 0)))
        880
        """
        held = [(name, size) for name, size in self.steps[kind](shapes, itemsize, torch_version) if size]
        if not l2 or kind == "fused":
            return held
        decayed = (lists if kind == "foreach" else each)("decayed gradient")(shapes, itemsize, torch_version)
        # _multi_tensor_adam and its kin let go of the gradients ("Delete the local intermediate"), not so before 2.1.
        alone = self.frees_decayed and kind == "foreach" and torch_version >= (2, 1)
        return fullest([decayed, held]) if alone else decayed + held
