"""Which kernel ``scaled_dot_product_attention`` takes, by device, card, dtype and shapes, and why it takes no other.

Sources: aten/src/ATen/native/transformers/cuda/sdp_utils.cpp (can_use_flash_attention, can_use_mem_efficient_attention and
the checks they name) and sdp_utils_cpp.cpp for the CPU, in PyTorch 2.2 and later. What neither fused kernel takes is
computed by the ``math`` one, which keeps the scores.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from memcalc.hardware import Gpu

__all__ = ["FLASH_WIDTH", "Attends", "chosen", "refusal"]

# check_head_dim_size_flash; on ROCm the least that any AOTriton takes.
FLASH_WIDTH = 256

Capability = tuple[int, int]
_AMPERE: Capability = (8, 0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Attends:
    """What is asked of attention."""

    device: str
    dtype: str
    """Of queries, keys and values: what products are computed in."""
    head: int
    """Width of one head's query and key."""
    value: int
    """Width of one head's value."""
    dropout: float = 0.0
    """Of the shares; 0 where attention has none."""
    masked: bool = False
    """It is given a mask, instead of being told that it is causal."""
    gpu: Gpu | None = None
    """The card; None where it is not known, and taken for one of compute capability 8.0 or newer."""

    @property
    def cuda(self) -> bool:
        return self.device == "cuda"

    @property
    def capability(self) -> Capability:
        """CUDA compute capability; AMD's cards, whose kernels take 16 bit alike, are taken for 8.0."""
        found = self.gpu.capability if self.gpu is not None else None
        return _AMPERE if found is None else found

    @property
    def amd(self) -> bool:
        return self.gpu is not None and self.gpu.capability is None

    @property
    def half(self) -> bool:
        return self.dtype != "float32"

    @property
    def alignment(self) -> int:
        """Elements of which a head's width must be a multiple for the efficient kernel (minimum_gemm_alignment)."""
        if self.amd:
            return 8  # check_head_dim_size_flash_nested
        if self.capability >= (7, 0) and self.half:
            return 8  # tensor cores: 128 bit
        return 4 if self.capability >= _AMPERE else 1

    @property
    def card(self) -> str:
        """The card and its compute capability, in words."""
        major, minor = self.capability
        name = self.gpu.name if self.gpu is not None else "the card"
        return f"{name} has {major}.{minor}"


_Rule = tuple[Callable[[Attends], bool], Callable[[Attends], str]]


def _no_backward(it: Attends) -> bool:
    """check_requires_grad_and_head_dim_gt192_constraints_on_sm86_89_or_120."""
    small = (8, 6) <= it.capability <= (8, 9) or (12, 0) <= it.capability <= (12, 1)
    return it.cuda and small and it.head > 192 and (it.head <= 224 or it.dropout > 0)


# By kernel: where each rule holds, it is not taken, and why. The words follow "attention KERNEL: ".
_RULES: dict[str, list[_Rule]] = {
    "flash": [
        (lambda it: it.cuda and not it.half, lambda it: "on CUDA it computes in 16 bit, not float32"),
        (lambda it: it.cuda and it.capability < _AMPERE,
         lambda it: f"it needs compute capability 8.0, {it.card}"),
        (lambda it: it.value != it.head,
         lambda it: f"keys of width {it.head} and values of {it.value}, which it takes only alike"),
        (lambda it: it.cuda and it.head > FLASH_WIDTH,
         lambda it: f"heads are {it.head} wide, it takes at most {FLASH_WIDTH}"),
        (_no_backward, lambda it: f"heads are {it.head} wide, of which it has no backward pass where {it.card}"),
        (lambda it: it.cuda and it.masked, lambda it: "it takes no mask"),
        (lambda it: not it.cuda and it.dropout > 0, lambda it: f"on the CPU it has no dropout (dropout {it.dropout:g})"),
    ],
    "efficient": [
        (lambda it: not it.cuda, lambda it: "it runs on CUDA only"),
        (lambda it: it.dtype == "bfloat16" and it.capability < _AMPERE,
         lambda it: f"it computes in bfloat16 from compute capability 8.0 on, {it.card}"),
        (lambda it: bool(it.head % it.alignment or it.value % it.alignment),
         lambda it: f"heads are {it.head} wide, it takes multiples of {it.alignment}"),
        (lambda it: it.amd and (it.head > FLASH_WIDTH or it.value != it.head),
         lambda it: f"on AMD heads are at most {FLASH_WIDTH} wide, and values as wide as keys"),
    ],
}  # fmt: skip


def refusal(kernel: str, it: Attends) -> str:
    """Why a kernel cannot be taken; blank where it can.

    >>> from memcalc.hardware import GPUS
    >>> refusal("flash", Attends(device="cuda", dtype="bfloat16", head=64, value=64, gpu=GPUS["t4"]))
    'it needs compute capability 8.0, t4 has 7.5'
    """
    return next((why(it) for holds, why in _RULES.get(kernel, []) if holds(it)), "")


def chosen(it: Attends) -> str:
    """The first kernel that can be taken, in the order of torch: flash, efficient, math.

    >>> from memcalc.hardware import GPUS
    >>> [chosen(Attends(device="cuda", dtype=dtype, head=64, value=64, gpu=GPUS["t4"])) for dtype in ("float16", "bfloat16")]
    ['efficient', 'math']
    """
    return next((kernel for kernel in _RULES if not refusal(kernel, it)), "math")
