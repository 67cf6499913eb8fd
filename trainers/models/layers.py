"""Pieces the transformer modules share."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from memcalc.plan import Plan

__all__ = ["attend", "cross_entropy", "gelu", "head", "rms_norm"]

_KERNELS = {"flash": SDPBackend.FLASH_ATTENTION, "efficient": SDPBackend.EFFICIENT_ATTENTION, "math": SDPBackend.MATH}


class PythonRMSNorm(nn.Module):
    """RMSNorm written out, which autograd keeps more of than of F.rms_norm's one kernel."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(width)), eps

    def forward(self, x: Tensor) -> Tensor:
        dtype = x.dtype
        x = x.float()
        mean_square = x.pow(2).mean(-1, keepdim=True)
        x = x * torch.rsqrt(mean_square + self.eps)
        return self.weight * x.to(dtype)


def rms_norm(plan: Plan, width: int, eps: float) -> nn.Module:
    """The plan's RMSNorm over the last dimension."""
    return PythonRMSNorm(width, eps) if plan.rms_norm == "python" else nn.RMSNorm(width, eps=eps)


def gelu(x: Tensor, plan: Plan) -> Tensor:
    """The tanh form of GELU as one kernel, or written out."""
    if plan.implementation.gelu != "python":
        return F.gelu(x, approximate="tanh")
    return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))


def attend(q: Tensor, k: Tensor, v: Tensor, *, plan: Plan, dropout: float, causal: bool = True) -> Tensor:
    """Attention of ``[batch, heads, tokens, head width]`` tensors by the kernel the plan names.

    Key/value heads may be fewer than query heads (grouped queries).
    """
    kind, repeat = plan.kernel, plan.implementation.grouped == "repeat"
    if kind == "eager":
        return _eager(q, k, v, dropout, causal, plan.implementation.softmax == "float32")
    groups = q.shape[1] // k.shape[1]
    if groups > 1 and (repeat or kind == "efficient"):  # the one kernel without grouped queries
        k, v, groups = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1), 1
    with sdpa_kernel(_KERNELS[kind]):
        return F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=causal, enable_gqa=groups > 1)


def _eager(q: Tensor, k: Tensor, v: Tensor, dropout: float, causal: bool, wide: bool) -> Tensor:
    """Attention that writes its scores out; softmax in the dtype of its input, or ``wide``, in float32."""
    groups = q.shape[1] // k.shape[1]
    if groups > 1:
        k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
    scores = (q * q.shape[-1] ** -0.5) @ k.transpose(-2, -1)
    if causal:
        scores = scores.masked_fill_(_future(q.shape[-2], q.device), float("-inf"))
    probabilities = scores.softmax(dim=-1, dtype=torch.float32).to(q.dtype) if wide else scores.softmax(dim=-1)
    return F.dropout(probabilities, dropout, training=dropout > 0) @ v


@lru_cache(maxsize=1)  # one mask for all layers and steps
def _future(tokens: int, device: torch.device) -> Tensor:
    """``[tokens, tokens]``, true where a query must not look."""
    return torch.ones(tokens, tokens, dtype=torch.bool, device=device).triu(1)


def head(product: Callable[[Tensor], Tensor], x: Tensor, plan: Plan) -> Tensor | list[Tensor]:
    """Logits ``[..., vocab]`` of a hidden state ``[..., hidden]``; a list of those of its rows, chunk by chunk, if so planned."""
    if not plan.loss.chunk_head:
        return product(x)
    return [product(part) for part in x.flatten(0, -2).chunk(plan.loss.chunks)]


def cross_entropy(output: Tensor | list[Tensor], targets: Tensor, *, upcast: bool = True, chunks: int = 0) -> Tensor:
    """Mean cross-entropy of ``[..., classes]`` scores, in float32 when ``upcast``, against ``[...]`` class indices.

    With ``chunks``, of that many parts of the rows one after the other; a list of scores is in parts already.
    """
    if isinstance(output, Tensor):
        scores = output.flatten(0, -2)
        if not chunks:
            return F.cross_entropy(scores.float() if upcast else scores, targets.flatten())
        output = list(scores.chunk(chunks))
        del scores
    wanted = targets.flatten().split([len(part) for part in output])
    losses = [
        F.cross_entropy(part.float() if upcast else part, to, reduction="sum")
        for part, to in zip(output, wanted, strict=True)
    ]
    return torch.stack(losses).sum() / targets.numel()
