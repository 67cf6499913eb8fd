"""What kernels allocate for themselves and free again, which no dispatch mode sees: the larger ones of known size.

    flash, CUDA backward       a float32 accumulator of the query gradient and one sum a row, rows rounded to 128 and heads to
                               32, and of grouped queries the gradients of keys and values for every head
                               (transformers/cuda/flash_attn/flash_api.cpp, mha_bwd: dq_accum, softmax_d, dk_expanded)
    efficient, CUDA backward   one float32 sum a row, of a product as large as the output, and accumulators in tiles
                               (transformers/cuda/attention_backward.cu, delta, workspace; memcalc/fused_attention.py)
    flash, CPU                 scores and sums of the block a thread works on (cpu/FlashAttentionKernel.cpp); ranks run one thread
    convolution, CPU           copies of what goes in and comes out in oneDNN's own layout (aten/src/ATen/native/mkldnn/Conv.cpp)
    batch norm, CPU backward   one tensor as large as the input (aten/src/ATen/native/Normalization.cpp)
    LSTM, CPU                  scratch of oneDNN's layer, forward and backward: one layer of these sizes is really run and
                               measured, because oneDNN alone says how large it is (aten/src/ATen/native/mkldnn/RNN.cpp)

Not among them, because their size hangs on the machine or on a choice made at run time: cuBLAS and cuDNN workspaces,
NCCL's buffers, and scratch inside oneDNN's products of 16-bit numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from trainers.rehearsal.private import no_modes

__all__ = ["with_reserve", "workspace"]


_ONEDNN_CHANNELS = 4


def with_reserve(name: str, args: Any, found: Any) -> Any:
    """The outputs of an operation on the CPU, with what oneDNN keeps of a training LSTM layer for its backward.

    The fake layer says that it is empty (torch/_meta_registrations.py, mkldnn_rnn_layer). How large it is oneDNN alone
    says (aten/src/ATen/native/mkldnn/RNN.cpp, workspace_desc), so that one layer of these sizes really runs.
    """
    if name != "aten::mkldnn_rnn_layer" or not args[-1]:  # not a training one
        return found
    with no_modes():
        kept = _reserve(_sizes(args))
    return *found[:3], found[3].new_empty(kept, dtype=torch.uint8)


def _sizes(args: Any) -> tuple[Any, ...]:
    return tuple(
        (tuple(part.shape), part.dtype, tuple(part.stride())) if isinstance(part, Tensor) else _plain(part)
        for part in args
    )


def _real(part: Any) -> Any:
    if not isinstance(part, tuple):
        return part
    return list(part[1:]) if part[0] == "list" else torch.empty_strided(part[0], part[2], dtype=part[1]).zero_()


def _plain(part: Any) -> Any:
    return ("list", *part) if isinstance(part, list) else part


@cache
def _reserve(sizes: tuple[Any, ...]) -> int:
    with torch.enable_grad():
        kept = torch.ops.aten.mkldnn_rnn_layer(*map(_real, sizes))[3]
    return 0 if kept is None else int(kept.nbytes)


@cache
def _scratch(name: str, sizes: tuple[Any, ...]) -> int:
    """What an operation on one thread holds at its fullest beside what it returns, by the allocator's own events."""
    given, threads = [_real(part) for part in sizes], torch.get_num_threads()
    torch.set_num_threads(1)  # as ranks run
    try:
        with torch.no_grad(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
            kept = getattr(torch.ops.aten, name)(*given)
    finally:
        torch.set_num_threads(threads)
    assert seen.profiler is not None and seen.profiler.kineto_results is not None
    events = [event for event in seen.profiler.kineto_results.events() if event.name() == "[memory]"]
    live = list(accumulate(event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())))
    del kept
    return max(live, default=0) - (live[-1] if live else 0)


def _lstm(args: Any) -> int:
    with no_modes():
        return _scratch("mkldnn_rnn_layer", _sizes(args))


def _lstm_backward(args: Any) -> int:
    with no_modes():
        return _scratch("mkldnn_rnn_layer_backward", _sizes(args))


def workspace(name: str, device: str, args: Any) -> int:
    """Bytes that a kernel holds beside its outputs at its fullest point."""
    rule = _RULES.get((name, device))
    return rule(args) if rule else 0


def _up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def _flash_backward(args: Any) -> int:
    (batch, heads, tokens, width), key = args[1].shape, args[2]
    rows = _up(tokens, 128)
    expanded = 2 * batch * heads * key.shape[2] * width * key.itemsize if key.shape[1] < heads else 0
    return 4 * batch * heads * rows * (1 + _up(width, 32)) + expanded


def _efficient_backward(args: Any) -> int:
    query, keys, value = args[1], args[2].shape[2], args[3]
    batch, heads, tokens, width = query.shape
    many, half = batch * heads, query.itemsize < 4
    rows = 128 if width > 64 else 64
    tiles = -(-tokens // rows) * -(-width // 64)
    held = 4 * many * tiles * (rows * 64 + 4)
    if not half or width > 64:
        splits = max(min(-(-keys // 64), 200 // many), 1)
        held += 2 * 4 * many * splits * 64 * _up(width, rows)
    product = 0 if half else 4 * many * tokens * (value.shape[3] + 1)
    return 4 * int(many * tokens) + int(max(held, product))


def _blocks(query: Tensor, key: Tensor) -> tuple[int, int]:
    tokens = query.shape[2]
    rows = 256 if tokens >= 768 else 64 if tokens >= 192 else 32
    return min(rows, tokens), min(512, key.shape[2])


def _cpu_flash(args: Any) -> int:
    (rows, keys), query = _blocks(*args[:2]), args[0]
    halves = rows * keys * query.itemsize if query.itemsize < 4 else 0
    return 4 * (rows * keys + 2 * rows + rows * query.shape[3]) + halves


def _cpu_flash_backward(args: Any) -> int:
    (rows, keys), query = _blocks(*args[1:3]), args[1]
    halves = 2 * rows * keys * query.itemsize if query.itemsize < 4 else 0
    return 4 * (2 * rows * keys + rows) + halves


def _batch_norm_backward(args: Any) -> int:
    return int(args[1].numel() * args[1].itemsize)


def _bytes(*parts: Tensor) -> int:
    return sum(part.numel() * part.itemsize for part in parts)


def _reordered(image: Tensor) -> int:
    """With very few channels oneDNN reads an image as it is."""
    return _bytes(image) if image.shape[1] >= _ONEDNN_CHANNELS else 0


def _convolution(args: Any) -> int:
    """Both inputs and the output are copied; the output's copy is still there when the output is."""
    image, weight = args[:2]
    stride, padding, dilation = args[3:6]
    sizes = [
        (size + 2 * pad - span * (kernel - 1) - 1) // step + 1
        for size, kernel, step, pad, span in zip(
            image.shape[2:], weight.shape[2:], stride, padding, dilation, strict=True
        )
    ]
    output = image.shape[0] * weight.shape[0] * math.prod(sizes) * image.itemsize
    return max(_reordered(image) + _bytes(weight) + output, 2 * output) - output


def _convolution_backward(args: Any) -> int:
    """First the input's gradient, of copies of the output's gradient and the weight; then the weight's."""
    gradient, image, weight = args[:3]
    strided, mask = max(args[4]) > 1, args[10]
    gone = _bytes(image) if mask[0] else 0
    first = max(_bytes(gradient, weight) + gone, gone * (3 if strided else 2)) if mask[0] else 0
    second = gone + _bytes(gradient) + _reordered(image) + _bytes(weight) if mask[1] else 0
    return max(first, second, gone + 2 * _bytes(weight)) - gone - _bytes(weight)


_RULES: dict[tuple[str, str], Callable[[Any], int]] = {
    ("aten::_scaled_dot_product_flash_attention_backward", "cuda"): _flash_backward,
    ("aten::_scaled_dot_product_efficient_attention_backward", "cuda"): _efficient_backward,
    ("aten::_scaled_dot_product_flash_attention_for_cpu", "cpu"): _cpu_flash,
    ("aten::_scaled_dot_product_flash_attention_for_cpu_backward", "cpu"): _cpu_flash_backward,
    ("aten::convolution", "cpu"): _convolution,
    ("aten::convolution_backward", "cpu"): _convolution_backward,
    ("aten::native_batch_norm_backward", "cpu"): _batch_norm_backward,
    ("aten::mkldnn_rnn_layer", "cpu"): _lstm,
    ("aten::mkldnn_rnn_layer_backward", "cpu"): _lstm_backward,
}
