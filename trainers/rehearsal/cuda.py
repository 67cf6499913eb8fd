"""What CUDA does otherwise than the CPU, so that a run for GPUs can be rehearsed on fake tensors of the CPU.

Operations are replaced in torch's dispatcher, below everything a model can call; each names where torch does it so.

    dropout                 a mask of one byte (aten/src/ATen/native/Dropout.cpp, is_fused_kernel_acceptable)
    rms_norm                one kernel that keeps a float32 number a row (layer_norm.cpp, cuda/layer_norm_kernel.cu)
    layer_norm, group_norm  statistics in float32 also of 16-bit inputs (cuda/layer_norm_kernel.cu, toAccumulateType)
    attention               flash and memory-efficient kernels (transformers/attention.cpp, cuda/sdp_utils.cpp)
    autocast                CUDA's lists of operations, which are not the CPU's (aten/src/ATen/autocast_mode.h)
    LSTM                    each token's gates are kept; cuDNN alone knows how it packs them (aten/src/ATen/native/cudnn/RNN.cpp)
    torch.tensor(number)    stays on the host, as the step counters of the optimizers do (torch/optim/adam.py)
"""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.backends import mkldnn
from torch.backends.cuda import flash_sdp_enabled, mem_efficient_sdp_enabled
from torch.library import Library, fallthrough_kernel

from trainers.rehearsal.autocast import LISTS, in_float32

__all__ = ["as_cuda_makes", "cuda_kernels"]

_STATISTICS = ("aten::native_layer_norm", "aten::native_group_norm")
_FLASH_WIDTH = 256  # widest head of the flash kernel (cuda/sdp_utils.cpp, check_head_dim_size_flash)
_HALVES = (torch.float16, torch.bfloat16)


def as_cuda_makes(name: str, found: Any) -> Any:
    """An operation's outputs in the dtypes they have on CUDA."""
    if name in _STATISTICS:
        return found[0], *(part if part is None else part.float() for part in found[1:])
    return found


@contextlib.contextmanager
def cuda_kernels(*, fused_norm: bool = True) -> Iterator[None]:
    """Inside it, operations on the CPU keep and make what they do on CUDA. Holds for the whole process.

    Without ``fused_norm`` RMSNorm is the chain that it was before there was a kernel for it.
    """
    library = Library("aten", "IMPL")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of overriding what is there, which is what is wanted
            for name, replacement in _KERNELS.items():
                if name == "rms_norm" and not fused_norm:
                    continue
                library.impl(name, replacement, "AutogradCPU")
                library.impl(name, replacement, "CPU")
            for name in LISTS:
                library.impl(name, in_float32(name), "AutocastCPU")
            library.impl("cross_entropy_loss", fallthrough_kernel, "AutocastCPU")
        with mkldnn.flags(enabled=False):
            yield
    finally:
        library._destroy()


def _dropout(x: Tensor, probability: float, train: bool) -> Tensor:
    if not train or probability in (0, 1) or not x.numel():
        return x * (0.0 if train and probability == 1 else 1.0) if train and probability else x
    return torch.native_dropout(x, probability, True)[0]


class _FusedRmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: Tensor, shape: list[int], weight: Tensor | None) -> Tensor:
        rows = x.shape[: x.ndim - len(shape)]
        scale = x.new_empty((*rows, *[1] * len(shape)), dtype=torch.float32)
        context.save_for_backward(x, scale, weight)
        return torch.empty_like(x)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Any:
        x, _, weight = context.saved_tensors
        return torch.empty_like(x), None, None if weight is None else torch.empty_like(weight)


def _rms_norm(x: Tensor, shape: list[int], weight: Tensor | None = None, eps: float | None = None) -> Tensor:
    found: Tensor = _FusedRmsNorm.apply(x, shape, weight)
    return found


def _attention(
    q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0, is_causal: bool = False,
    *, scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """The first kernel in CUDA's order that is enabled and can do it: flash, memory-efficient, written out."""
    four = q.ndim == k.ndim == v.ndim == 4
    flash = four and attn_mask is None and q.dtype in _HALVES and max(q.shape[-1], v.shape[-1]) <= _FLASH_WIDTH
    if flash and flash_sdp_enabled():
        width = q.shape[-1]
        q, k, v = (_padded(part, 8) for part in (q, k, v))
        output = torch.ops.aten._scaled_dot_product_flash_attention(
            q, k, v, dropout_p, is_causal, False, scale=scale or 1 / math.sqrt(width)
        )[0]
        return output[..., :width] if output.shape[-1] != width else output
    if four and mem_efficient_sdp_enabled() and not (enable_gqa and q.shape[1] != k.shape[1]):
        bias = None if attn_mask is None else _bias(attn_mask, q, k)
        found: Tensor = torch.ops.aten._scaled_dot_product_efficient_attention(
            q, k, v, bias, torch.is_grad_enabled(), dropout_p, is_causal, scale=scale
        )[0]
        return found
    written: Tensor = torch.ops.aten._scaled_dot_product_attention_math(
        q, k, v, attn_mask, dropout_p, is_causal, None, scale=scale, enable_gqa=enable_gqa
    )[0]
    return written


def _padded(x: Tensor, multiple: int) -> Tensor:
    """Heads as wide as flash wants them (transformers/attention.cpp, pad_last_dim)."""
    missing = -x.shape[-1] % multiple
    return torch.nn.functional.pad(x, (0, missing)) if missing else x


def _bias(mask: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """A mask as numbers to add, of the queries' dtype (transformers/attention.cpp, convert_boolean_attn_mask)."""
    if mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=q.dtype).masked_fill_(mask.logical_not(), -math.inf)
    return mask.expand(q.shape[0], q.shape[1], q.shape[2], k.shape[2])


_KERNELS = {"dropout": _dropout, "rms_norm": _rms_norm, "scaled_dot_product_attention": _attention}
