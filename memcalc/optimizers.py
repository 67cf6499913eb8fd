"""Optimizers: the states they keep for each weight, and what one ``step()`` allocates on top.

Temporaries were read in the source files named at each row and are measured by
``tests/trainers/test_optimizers_measured.py``. Only tensors count: numbers that CPU kernels wrap into
0-dimensional tensors (12 bytes at a time) do not exist on CUDA and are left out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from memcalc.catalog import Catalog
from memcalc.precision import DTYPE_BYTES
from memcalc.spec import Weight

__all__ = ["KINDS", "OPTIMIZERS", "Optimizer"]

KINDS = ("foreach", "for-loop", "fused")

Shape = tuple[int, ...]
Held = list[tuple[str, int]]
"""Tensors alive together, as (name, bytes), in order of allocation."""
States = Callable[[Shape, int], list[int]]
Step = Callable[[Sequence[Shape], int, tuple[int, int]], Held]
"""``(shapes, itemsize, torch version) -> what is alive at the fullest point of step()``."""


def _fullest(moments: list[Held]) -> Held:
    return max(moments, key=lambda held: sum(size for _, size in held), default=[])


def _nothing(shapes: Sequence[Shape], itemsize: int, version: tuple[int, int]) -> Held:
    """One kernel updates everything in place."""
    return []


def _lists(*names: str) -> Step:
    """foreach: each name is a whole list of tensors, one the size of each weight."""
    return lambda shapes, itemsize, version: [(name, prod(s) * itemsize) for name in names for s in shapes]


def _each(*names: str, kept: int = 0) -> Step:
    """for-loop: tensors the size of the weight being updated.

    ``kept`` of them are still bound to local variables when the next weight's are made.
    """

    def step(shapes: Sequence[Shape], itemsize: int, version: tuple[int, int]) -> Held:
        sizes = [prod(s) * itemsize for s in shapes]
        return _fullest([
            [("of the weight before", old)] * kept * (i > 0) + [(name, new) for name in names]
            for i, (old, new) in enumerate(zip([0, *sizes], sizes, strict=False))
        ])  # fmt: skip

    return step


def _since(release: tuple[int, int], new: Step, old: Step) -> Step:
    """``new`` from this torch release on, ``old`` before it."""
    return lambda shapes, itemsize, version: (new if version >= release else old)(shapes, itemsize, version)


def _copies(count: int) -> States:
    """``count`` states shaped and typed like the weight (``zeros_like``)."""
    return lambda shape, itemsize: [prod(shape) * itemsize] * count


def _adafactor_states(shape: Shape, itemsize: int) -> list[int]:
    """A row and a column factor for each matrix; vectors are not factored."""
    if len(shape) < 2:
        return [prod(shape) * itemsize]
    return [prod(shape) // shape[-1] * itemsize, prod(shape) // shape[-2] * itemsize]


def _adafactor_foreach(shapes: Sequence[Shape], itemsize: int, version: tuple[int, int]) -> Held:
    """Matrices and vectors are two groups; the first one's updates stay bound while the second one's are made."""
    groups: dict[bool, list[Shape]] = {}
    for shape in shapes:
        groups.setdefault(len(shape) > 1, []).append(shape)
    before: Held = []
    moments: list[Held] = []
    for matrices, group in groups.items():
        updates = [("update", prod(s) * itemsize) for s in group]
        if matrices:
            factors = [_adafactor_states(s, itemsize) for s in group]
            moments += [before + [(f"{part} means", f[i]) for f in factors] for i, part in enumerate(("row", "column"))]
            moments.append([*before, *updates, *(("mean of the row factor", prod(s[:-2]) * itemsize) for s in group)])
        else:
            moments.append(before + updates)
        before = updates
    return _fullest(moments)


def _adafactor_loop(shapes: Sequence[Shape], itemsize: int, version: tuple[int, int]) -> Held:
    """Every local variable keeps the last weight's tensor until it is bound again."""
    bound: dict[str, int] = {}
    moments: list[Held] = []
    for shape in shapes:
        size = prod(shape) * itemsize
        if len(shape) > 1:
            bound["row means"], bound["column means"] = _adafactor_states(shape, itemsize)
            mean = [("mean of the row factor", prod(shape[:-2]) * itemsize)]
        else:
            # `grad * grad` is complete before the name lets go of the vector before.
            moments.append([*bound.items(), ("squared gradient", size)])
            bound["squared gradient"] = size
            mean = []
        moments.append([*bound.items(), ("variance estimate", size), *mean])
        bound["update"] = size
    return _fullest(moments)


def _adam_8bit_states(shape: Shape, itemsize: int) -> list[int]:
    """Two bytes per parameter and two float32 scales per block of 256; float32 below 4096 parameters."""
    count = prod(shape)
    if count < 4096:
        return [4 * count, 4 * count]
    return [count, count, 4 * -(-count // 256), 4 * -(-count // 256)]


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
    counter: bool = True
    """A float32 step counter per weight: one CPU scalar (for-loop, foreach), one device block when fused."""

    shardable: bool = True
    """Works on the row-wise shards of ``fully_shard`` (DTensors)."""

    @property
    def kinds(self) -> tuple[str, ...]:
        """The forms of ``step()`` there are, the library's default on CUDA first."""
        return tuple(self.steps)

    def state_bytes(self, weight: Weight, dtype: str) -> list[int]:
        """Bytes of each state tensor kept for one weight.

        >>> OPTIMIZERS["adamw"].state_bytes(Weight("w", (1000, 10)), "float32")
        [40000, 40000]
        """
        return self.states(weight.shape, DTYPE_BYTES[dtype])

    def temporaries(
        self, shapes: Sequence[tuple[int, ...]], itemsize: int, kind: str, torch_version: tuple[int, int]
    ) -> list[tuple[str, int]]:
        """(name, bytes) of what is alive together at the fullest point of ``step()``, in order of allocation.

        ``shapes`` are the tensors this rank updates, in the order the optimizer holds them. Raises KeyError
        for a kind that is not in ``kinds``.

        >>> OPTIMIZERS["adam"].temporaries([(10, 10), (10,)], 4, "foreach", (2, 13))
        [('root of the second moment', 400), ('root of the second moment', 40)]
        >>> sum(size for _, size in OPTIMIZERS["adam"].temporaries([(10, 10), (10,)], 4, "foreach", (2, 0)))
        880
        """
        return self.steps[kind](shapes, itemsize, torch_version)


# torch/optim/adam.py and adamw.py, read in the wheels of 1.12.1, 1.13.1, 2.0.1, 2.1.0, 2.6.0 and 2.13.0. Up to 2.0
# foreach added epsilon out of place, which made a second list; pytorch#104780 and #104898 brought that to one in 2.1.
_ROOT = "root of the second moment"
_ADAM: dict[str, Step] = {
    "foreach": _since((2, 1), _lists(_ROOT), _lists(_ROOT, "denominator")),
    "for-loop": _each(_ROOT, "denominator", kept=1),
    "fused": _nothing,
}
# In 1.12 alone, AMSGrad's running maximum was a new list as well.
_AMSGRAD: dict[str, Step] = _ADAM | {
    "foreach": _since((1, 13), _ADAM["foreach"], _lists("maximum", _ROOT, "denominator"))
}

OPTIMIZERS: Catalog[Optimizer] = Catalog(
    "optimizer",
    [
        Optimizer(
            name="adamw",
            summary="Adam with decoupled weight decay",
            library="torch.optim.AdamW",
            states=_copies(2),
            steps=_ADAM,
        ),
        Optimizer(
            name="adam",
            summary="first and second moment of the gradient",
            library="torch.optim.Adam",
            states=_copies(2),
            steps=_ADAM,
        ),
        Optimizer(
            name="amsgrad",
            summary="Adam that also keeps the largest second moment",
            library="torch.optim.Adam(amsgrad=True)",
            states=_copies(3),
            steps=_AMSGRAD,
        ),
        # torch/optim/sgd.py: without weight decay everything happens in place.
        Optimizer(
            name="sgd",
            summary="plain gradient descent",
            library="torch.optim.SGD",
            states=_copies(0),
            steps=dict.fromkeys(KINDS, _nothing),
            counter=False,
        ),
        Optimizer(
            name="sgd-momentum",
            summary="gradient descent with momentum",
            library="torch.optim.SGD(momentum=0.9)",
            states=_copies(1),
            steps=dict.fromkeys(KINDS, _nothing),
            counter=False,
        ),
        # torch/optim/rmsprop.py
        Optimizer(
            name="rmsprop",
            summary="gradient divided by its running root mean square",
            library="torch.optim.RMSprop",
            states=_copies(1),
            steps={"foreach": _lists("root mean square"), "for-loop": _each("root mean square", kept=1)},
        ),
        # torch/optim/adagrad.py; up to 2.0 the quotient was a list of its own (pytorch#104988).
        Optimizer(
            name="adagrad",
            summary="gradient divided by the root of all squares so far",
            library="torch.optim.Adagrad",
            states=_copies(1),
            steps={
                "foreach": _since((2, 1), _lists("root", "numerator"), _lists("root", "numerator", "quotient")),
                "for-loop": _each("root", kept=1),
                "fused": _nothing,
            },
        ),
        # torch/optim/_adafactor.py; foreach is not its default because of its memory (pytorch#132336).
        Optimizer(
            name="adafactor",
            summary="second moment factored into a row and a column, no first moment",
            library="torch.optim.Adafactor",
            states=_adafactor_states,
            # Its in-place powers of norms are refused by DTensor: "requires placement changes", torch 2.13.
            shardable=False,
            steps={"for-loop": _adafactor_loop, "foreach": _adafactor_foreach},
        ),
        # lion_pytorch/lion_pytorch.py and foreach.py of lion-pytorch 0.2.5.
        Optimizer(
            name="lion",
            summary="sign of an interpolated momentum",
            library="lion_pytorch.Lion",
            states=_copies(1),
            steps={"for-loop": _each("decayed momentum", "update"), "foreach": _lists("update")},
            counter=False,
        ),
        # bitsandbytes/optim/optimizer.py of 0.50.2, init_state of Optimizer2State: min_8bit_size and the block of 256.
        # Two lookup tables of 1 KiB, shared by all weights, are not counted.
        Optimizer(
            name="adamw-8bit",
            summary="AdamW with block-wise 8-bit moments; small tensors stay in 32 bit",
            library="bitsandbytes.optim.AdamW8bit",
            states=_adam_8bit_states,
            steps={"fused": _nothing},
            counter=False,
        ),
    ],
)
