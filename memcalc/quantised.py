"""Frozen weights in fewer bits: what is stored of one, and what its matrix product unpacks for a moment.

Sources: bitsandbytes/functional.py (quantize_4bit, dequantize_4bit), bitsandbytes/nn/modules.py (Linear4bit,
Linear8bitLt); auto_gptq/nn_modules/qlinear/qlinear_tritonv2.py for GPTQ, whose buffers GPTQModel shares.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod

__all__ = ["QUANTISED", "SHARDED", "scales_unpacked", "stored"]

Parts = list[tuple[str, int]]
"""(name, bytes) of each tensor."""

_BLOCK, _NESTED_BLOCK, _CODES = 64, 256, 16
_GROUP = 128


def _nf4(shape: tuple[int, ...]) -> Parts:
    """Two numbers a byte, one float32 scale for each block of 64, and a table of the 16 values."""
    numel = prod(shape)
    return [("packed", -(-numel // 2)), ("scales", 4 * -(-numel // _BLOCK)), ("codes", 4 * _CODES)]


def _nf4_double(shape: tuple[int, ...]) -> Parts:
    """The scales less their mean in 8 bit, with one float32 scale for each 256 of them."""
    packed, (_, scales), codes = _nf4(shape)
    nested = 4 * -(-(scales // 4) // _NESTED_BLOCK)
    return [packed, ("scales", scales // 4), codes, ("scales of scales", nested), ("mean of scales", 4)]


def _int8(shape: tuple[int, ...]) -> Parts:
    """One byte a number and one float32 scale a row."""
    return [("packed", prod(shape)), ("scales", 4 * shape[0])]


def _gptq(shape: tuple[int, ...]) -> Parts:
    """Eight numbers an int32; for each 128 inputs a float16 scale and a 4-bit zero of each output; the inputs' groups."""
    out, width = shape
    groups = -(-width // _GROUP)
    packed, zeros = -(-width // 8) * out, groups * -(-out // 8)
    return [("packed", 4 * packed), ("zeros", 4 * zeros), ("scales", 2 * groups * out), ("groups", 4 * width)]


QUANTISED: Mapping[str, Callable[[tuple[int, ...]], Parts]] = {
    "nf4": _nf4,
    "nf4-double": _nf4_double,
    "int8": _int8,
    "gptq": _gptq,
}
"""Ways to store a frozen matrix: ``shape -> parts``."""


SHARDED = ("packed", "zeros")
"""Parts that are parameters, which sharding divides; scales and tables are attributes or buffers, whole on every rank
(bitsandbytes QuantState; fms-acceleration, autogptq_utils.py, PATCH_FOR_FSDP_TRITON_V2)."""


def stored(kind: str, shape: tuple[int, ...]) -> Parts:
    """(name, bytes) of the tensors that hold a matrix of this shape between steps. Raises KeyError for another kind.

    >>> [sum(size for _, size in stored(kind, (4096, 4096))) / 4096**2 for kind in ("nf4", "int8")]
    [0.5625038146972656, 1.0009765625]
    >>> round(sum(size for _, size in stored("nf4-double", (4096, 4096))) / 4096**2, 4)
    0.5159
    """
    return QUANTISED[kind](shape)


def scales_unpacked(kind: str, shape: tuple[int, ...]) -> int:
    """Bytes of the float32 scales that doubly quantised ones are unpacked to before each product; 0 for others."""
    return 4 * -(-prod(shape) // _BLOCK) if kind == "nf4-double" else 0
