"""Causal attention on the tape, one function per kernel that scaled_dot_product_attention may take.

Shapes are ``[tokens, width]`` per sample; ``head`` is the width of one head. Sources:
aten/src/ATen/native/transformers (attention.cpp, cpu/FlashAttentionKernel.cpp, cuda/flash_attn/flash_api.cpp,
cuda/attention_backward.cu) and Korthikanti et al. 2022 for the written-out form.
"""

from __future__ import annotations

from memcalc.precision import DTYPE_BYTES
from memcalc.tape import Edge, Gradient, Node, Storage, Tape, Tensor

__all__ = ["attention"]


def attention(
    t: Tape, q: Tensor, k: Tensor, v: Tensor, name: str, *, kind: str, heads: int, dropout: float
) -> Tensor:
    """``softmax(q kᵀ) v`` by the kernel ``kind``; key/value heads may be fewer than ``heads``."""
    if kind in ("flash", "efficient"):
        return _fused(t, q, k, v, name, kind, heads)
    return _written_out(t, q, k, v, name, kind, heads, dropout)


def _edge(x: Tensor) -> Edge:
    return None if x.node is None else (x.node, x.slot)


def _fused(t: Tape, q: Tensor, k: Tensor, v: Tensor, name: str, kind: str, heads: int) -> Tensor:
    """Keeps q, k, v, the output and one float32 logarithm per row and head."""
    tokens, width = q.shape
    head, shapes, dtype = width // heads, [x.shape for x in (q, k, v)], q.dtype
    on_cpu = t.device == "cpu"

    def backward(node: Node, grads: list[Gradient]) -> list[Gradient]:
        results: list[Gradient] = [
            t.allocate(f"{name} {part} gradient", shape, dtype, "temporary") for part, shape in zip("qkv", shapes, strict=True)
        ]
        workspace = _cpu_backward(t, tokens, dtype) if on_cpu else _cuda_backward(t, tokens, heads, head, kind)
        del workspace
        return results

    node = t.node([_edge(q), _edge(k), _edge(v)], backward)
    t.save(node, q.storage, k.storage, v.storage)
    y = t.output(f"{name} attention", q.shape, dtype, node)
    rows = tokens if kind == "flash" else -(-tokens // 32) * 32
    logsumexp = t.allocate(f"{name} log-sum-exp", (heads, rows), "float32", "activations")
    workspace = _cpu_forward(t, tokens, head, dtype) if on_cpu else []
    del workspace
    t.save(node, y.storage, logsumexp)
    return y


def _cpu_blocks(tokens: int) -> tuple[int, int]:
    """Rows of queries and of keys one thread works on (cpu/FlashAttentionKernel.cpp)."""
    rows = 256 if tokens >= 768 else 64 if tokens >= 192 else 32
    return min(rows, tokens), min(512, tokens)


def _scratch(t: Tape, elements: int, dtype: str) -> Storage:
    return t.allocate("attention workspace", (elements,), dtype, "temporary", batched=False)


def _cpu_forward(t: Tape, tokens: int, head: int, dtype: str) -> list[Storage]:
    """Scores, maxima, sums and output of the block each thread works on; ranks run one thread."""
    rows, keys = _cpu_blocks(tokens)
    buffers = [_scratch(t, rows * keys + 2 * rows + rows * head, "float32")]
    return buffers if DTYPE_BYTES[dtype] == 4 else [*buffers, _scratch(t, rows * keys, dtype)]


def _cpu_backward(t: Tape, tokens: int, dtype: str) -> list[Storage]:
    rows, keys = _cpu_blocks(tokens)
    buffers = [_scratch(t, 2 * rows * keys, "float32"), _scratch(t, rows, "float32")]
    return buffers if DTYPE_BYTES[dtype] == 4 else [*buffers, _scratch(t, 2 * rows * keys, dtype)]


def _cuda_backward(t: Tape, tokens: int, heads: int, head: int, kind: str) -> list[Storage]:
    """Flash keeps a float32 accumulator of the query gradient, rows rounded to 128 and heads to 32."""
    rows = -(-tokens // 128) * 128
    delta = t.allocate("attention row sums", (heads, rows if kind == "flash" else tokens), "float32", "temporary")
    if kind != "flash":
        return [delta]
    width = heads * -(-head // 32) * 32
    return [delta, t.allocate("attention query accumulator", (rows, width), "float32", "temporary")]


def _written_out(
    t: Tape, q: Tensor, k: Tensor, v: Tensor, name: str, kind: str, heads: int, dropout: float
) -> Tensor:
    raise NotImplementedError
