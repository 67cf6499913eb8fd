"""Optimizers that other libraries bring."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from memcalc.optimizers.row import (
    Held,
    Optimizer,
    Shape,
    States,
    Step,
    copies,
    each,
    float32_copies,
    fullest,
    lists,
    nothing,
)

__all__ = ["OF_LIBRARIES"]

_SMALLEST = 4096
"""Weights below so many elements keep full states, in bitsandbytes (min_8bit_size) and torchao (_new_buffer)."""
_PAGED_FROM = 100_000
"""bitsandbytes/optim/optimizer.py, get_state_buffer: smaller states are not paged."""


def _bitsandbytes(moments: int) -> States:
    """A byte an element, and a float32 scale for each block of 256; float32 below 4096 elements."""

    def states(shape: Shape, itemsize: int) -> list[int]:
        count = prod(shape)
        if count < _SMALLEST:
            return [4 * count] * moments
        return [count] * moments + [4 * -(-count // 256)] * moments

    return states


def _torchao(bits: int, block: int, table: int) -> States:
    """Two moments in codes of so many bits, each with a float32 scale a block and a float32 table of its own.

    Weights that are small or do not divide into blocks keep their own dtype.
    """

    def states(shape: Shape, itemsize: int) -> list[int]:
        count = prod(shape)
        if count < _SMALLEST or count % block:
            return [count * itemsize] * 2
        return [count * bits // 8, 4 * (count // block)] * 2 + [4 * table] * 2 * bool(table)

    return states


def _in_float32(*names: str) -> Step:
    """The tensors of the largest weight that a step makes in float32, whatever the weight's dtype."""
    return lambda shapes, itemsize, version: [(name, 4 * max(map(prod, shapes), default=0)) for name in names]


def _adafactor_states(shape: Shape, itemsize: int) -> list[int]:
    """A row and a column factor for each matrix; all in float32."""
    if len(shape) < 2:
        return [4 * prod(shape)]
    return [4 * prod(shape) // shape[-1], 4 * prod(shape) // shape[-2]]


def _adafactor_loop(shapes: Sequence[Shape], itemsize: int, version: tuple[int, int]) -> Held:
    """Gradient and weight in float32 where they are not, the update before, the squared gradient and that plus epsilon."""
    moments: list[Held] = []
    before = 0
    for shape in shapes:
        size = 4 * prod(shape)
        low = [("gradient in float32", size), ("weight in float32", size)] * (itemsize == 2)
        moments.append([*low, ("update before", before), ("squared gradient", size), ("plus epsilon", size)])
        before = size
    return fullest(moments)


# torchao/optim/adam.py, single_param_adam is compiled. Absolute maxima of blocks are reductions, so that the two new
# moments are written out in float32 before they are quantised; all else is fused (torch/_inductor/scheduler.py).
_COMPILED: dict[str, Step] = {"fused": _in_float32("first moment", "second moment")}

OF_LIBRARIES = [
    # apex/optimizers/fused_adam.py: zeros_like(p).float(); csrc/multi_tensor_adam.cu updates in place.
    Optimizer(
        name="fused-adam",
        summary="Adam in one kernel, moments in float32",
        library="apex.optimizers.FusedAdam",
        states=float32_copies(2),
        steps={"fused": nothing},
        counters=0,
    ),
    # transformers/optimization.py, Adafactor as the Trainer makes it: no first moment, float32 throughout.
    Optimizer(
        name="adafactor-hf",
        summary="Adafactor with float32 states, as the Hugging Face Trainer has it",
        library="transformers.optimization.Adafactor",
        states=_adafactor_states,
        steps={"for-loop": _adafactor_loop},
        counters=0,
    ),
    # lion_pytorch/lion_pytorch.py and foreach.py of lion-pytorch 0.2.5.
    Optimizer(
        name="lion",
        summary="sign of an interpolated momentum",
        library="lion_pytorch.Lion",
        states=copies(1),
        steps={"for-loop": each("decayed momentum", "update"), "foreach": lists("update")},
        counters=0,
    ),
    # bitsandbytes/optim/optimizer.py of 0.50.2, init_state of Optimizer2State and Optimizer1State. Two lookup tables
    # of 1 KiB, shared by all weights, are not counted.
    Optimizer(
        name="adamw-8bit",
        summary="AdamW with block-wise 8-bit moments; small tensors stay in 32 bit",
        library="bitsandbytes.optim.AdamW8bit",
        states=_bitsandbytes(2),
        steps={"fused": nothing},
        counters=0,
    ),
    Optimizer(
        name="paged-adamw-8bit",
        summary="the same with large states in unified memory",
        library="bitsandbytes.optim.PagedAdamW8bit",
        states=_bitsandbytes(2),
        steps={"fused": nothing},
        counters=0,
        paged_from=_PAGED_FROM,
    ),
    Optimizer(
        name="paged-adamw",
        summary="AdamW with large float32 states in unified memory",
        library="bitsandbytes.optim.PagedAdamW",
        states=float32_copies(2),
        steps={"fused": nothing},
        counters=0,
        paged_from=_PAGED_FROM,
    ),
    Optimizer(
        name="lion-8bit",
        summary="Lion with a block-wise 8-bit momentum",
        library="bitsandbytes.optim.Lion8bit",
        states=_bitsandbytes(1),
        steps={"fused": nothing},
        counters=0,
    ),
    # torchao/optim/subclass_8bit.py, subclass_4bit.py and subclass_fp8.py.
    Optimizer(
        name="adamw-8bit-ao",
        summary="AdamW with 8-bit moments in blocks of 256 (torchao)",
        library="torchao.optim.AdamW8bit",
        states=_torchao(8, 256, 256),
        steps=_COMPILED,
    ),
    Optimizer(
        name="adamw-4bit-ao",
        summary="AdamW with 4-bit moments in blocks of 128 (torchao)",
        library="torchao.optim.AdamW4bit",
        states=_torchao(4, 128, 16),
        steps=_COMPILED,
    ),
    Optimizer(
        name="adamw-fp8-ao",
        summary="AdamW with float8 moments in blocks of 256 (torchao)",
        library="torchao.optim.AdamWFp8",
        states=_torchao(8, 256, 0),
        steps=_COMPILED,
    ),
]
