"""CUDA's autocast on CPU tensors: the operations that it runs in float32 and the CPU's does not.

Source: aten/src/ATen/autocast_mode.h, AT_FORALL_FP32 and AT_FORALL_FP32_SET_OPT_DTYPE. Operations in lower precision are
the same products on both. Losses: CUDA leaves cross_entropy_loss alone, so that its log_softmax, which is called with a
dtype, stays in 16 bits and nll_loss gets a float32 copy of it; the CPU casts the logits before.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

__all__ = ["LISTS", "in_float32"]

_FLOAT32 = (
    "acos", "asin", "cosh", "erfinv", "exp", "expm1", "log", "log10", "log2", "log1p", "reciprocal", "rsqrt", "sinh",
    "tan", "pow.Tensor_Scalar", "pow.Tensor_Tensor", "pow.Scalar", "softplus", "layer_norm", "native_layer_norm",
    "rms_norm", "group_norm", "cosine_similarity", "poisson_nll_loss", "cosine_embedding_loss", "nll_loss",
    "nll_loss2d", "hinge_embedding_loss", "kl_div", "l1_loss", "smooth_l1_loss", "huber_loss", "mse_loss",
    "margin_ranking_loss", "multilabel_margin_loss", "soft_margin_loss", "triplet_margin_loss", "multi_margin_loss",
    "binary_cross_entropy_with_logits", "dist", "pdist", "cdist", "renorm", "logsumexp",
)  # fmt: skip
_DTYPE_IF_NONE = {
    "prod": "dtype", "prod.dim_int": "dtype", "softmax.int": "dtype", "log_softmax.int": "dtype", "cumprod": "dtype",
    "cumsum": "dtype", "linalg_vector_norm": "dtype", "linalg_matrix_norm": "dtype", "sum": "dtype",
    "sum.dim_IntList": "dtype",
}  # fmt: skip
LISTS = (*_FLOAT32, *_DTYPE_IF_NONE)
"""Operations by their name in the dispatcher."""


def in_float32(name: str) -> Callable[..., Any]:
    """What autocast runs instead of an operation: the same in float32."""
    base, _, overload = name.partition(".")
    operation = getattr(getattr(torch.ops.aten, base), overload or "default")
    optional = name in _DTYPE_IF_NONE
    place = [argument.name for argument in operation._schema.arguments].index("dtype") if optional else None

    def run(*args: Any, **kwargs: Any) -> Any:
        with torch.autocast("cpu", enabled=False):
            if place is None:
                return operation(*map(_wide, args), **{key: _wide(value) for key, value in kwargs.items()})
            given = kwargs.get("dtype", args[place] if len(args) > place else None)
            if given is None and _narrow(args[0]):
                args, kwargs = args[:place], {**kwargs, "dtype": torch.float32}
            return operation(*args, **kwargs)

    return run


def _narrow(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dtype in (torch.float16, torch.bfloat16)


def _wide(value: Any) -> Any:
    return value.float() if _narrow(value) else value
