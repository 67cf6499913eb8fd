"""Operations of Megatron's layers that torch has not: fused kernels and what they keep.

Sources: NVIDIA/Megatron-LM megatron/core/fusions (fused_bias_gelu.py, fused_bias_swiglu.py, fused_bias_dropout.py,
fused_softmax.py) and megatron/core/transformer/dot_product_attention.py; bigscience-workshop/Megatron-DeepSpeed
megatron/model/transformer.py. Shapes leave out the batch, as in ``memcalc.ops``.
"""

from __future__ import annotations

from memcalc.graph import Gradient, Node, Tensor
from memcalc.ops import dropout as drop
from memcalc.ops import edge
from memcalc.spec import Weight
from memcalc.tape import Tape

__all__ = ["bias_dropout_add", "bias_gelu", "bias_swiglu", "core_attention", "own_tokens", "reordered"]


def _bias_gradient(t: Tape, bias: Weight) -> Gradient:
    return t.allocate(f"{bias.name} gradient", bias.shape, t.weight_dtype, "gradients", batched=False)


def bias_gelu(t: Tape, x: Tensor, name: str, bias: Weight | None) -> Tensor:
    """GELU of ``x + bias`` in one kernel, which keeps its input; both gradients are one tensor, summed for the bias."""
    shape, dtype = x.shape, x.dtype

    def backward(node: Node, grads: list[Gradient]) -> list[Gradient]:
        result: Gradient = t.allocate(f"{name} input gradient", shape, dtype, "temporary")
        return [result, _bias_gradient(t, bias)] if bias else [result]

    node = t.node([edge(x), *([bias] if bias else [])], backward)
    t.save(node, x.storage)
    return t.output(f"{name} output", shape, dtype, node)


def bias_swiglu(t: Tape, x: Tensor, name: str, bias: Weight | None) -> Tensor:
    """SwiGLU of one product that holds gate and value side by side: keeps its input of both."""
    shape, dtype = x.shape, x.dtype

    def backward(node: Node, grads: list[Gradient]) -> list[Gradient]:
        result: Gradient = t.allocate(f"{name} input gradient", shape, dtype, "temporary")
        return [result, _bias_gradient(t, bias)] if bias else [result]

    node = t.node([edge(x), *([bias] if bias else [])], backward)
    t.save(node, x.storage)
    return t.output(f"{name} output", (*shape[:-1], shape[-1] // 2), dtype, node)


def bias_dropout_add(
    t: Tape, x: Tensor, residual: Tensor, name: str, bias: Weight | None, probability: float
) -> Tensor:
    """``residual + dropout(x + bias)`` in one kernel: keeps the mask, of one byte."""
    shape, dtype = residual.shape, residual.dtype

    def backward(node: Node, grads: list[Gradient]) -> list[Gradient]:
        masked = t.allocate(f"{name} gradient", shape, dtype, "temporary") if probability else grads[0]
        return [masked, grads[0], _bias_gradient(t, bias)] if bias else [masked, grads[0]]

    node = t.node([edge(x), edge(residual), *([bias] if bias else [])], backward)
    y = t.output(f"{name} output", shape, dtype, node)
    if probability:
        t.save(node, t.allocate(f"{name} mask", shape, "bool", "activations"))
    return y


def core_attention(
    t: Tape, q: Tensor, k: Tensor, v: Tensor, name: str, *, heads: int, head: int, dropout: float, anew: bool
) -> Tensor:
    """Attention as Megatron writes it out: scores beside a tensor made before, one kernel for scale, mask and softmax.

    ``anew``: that tensor is made in each call. Queries, keys and values are read where the product left them. Local
    names keep the scores until the end.
    """
    queries, keys = q.shape[0], k.shape[0]
    width = heads * head
    if k.shape[-1] != width:
        k, v = (_repeated(t, x, f"{name} repeated heads", width) for x in (k, v))
    shape, dtype = (heads, queries, keys), q.dtype
    made_before = t.allocate(f"{name} scores made before", shape, dtype, "activations") if anew else None
    scores = _product(t, q, k, shape, f"{name} scores")
    del made_before
    shares = _softmax_in_place(t, scores, name)
    shares = drop(t, shares, f"{name} attention dropout", dropout)
    mixed = _product(t, shares, v, (queries, width), f"{name} mix")
    return reordered(t, mixed, f"{name} context")


def _repeated(t: Tape, x: Tensor, name: str, width: int) -> Tensor:
    """``repeat_interleave`` of key/value heads."""
    source, dtype = x.shape, x.dtype

    def backward(node: Node, grads: list[Gradient]) -> list[Gradient]:
        return [t.allocate(f"{name} gradient", source, dtype, "temporary")]

    return t.output(name, (*source[:-1], width), dtype, t.node([edge(x)], backward))


def _product(t: Tape, a: Tensor, b: Tensor, shape: tuple[int, ...], name: str) -> Tensor:
    shapes, dtype = (a.shape, b.shape), a.dtype

    def backward(node: Node, grads: list[Gradient]) -> list[Gradient]:
        return [t.allocate(f"{name} factor gradient", each, dtype, "temporary") for each in shapes]

    node = t.node([edge(a), edge(b)], backward)
    t.save(node, a.storage, b.storage)
    return t.output(name, shape, dtype, node)


def _softmax_in_place(t: Tape, scores: Tensor, name: str) -> Tensor:
    """Keeps its output; backward works in place (scaled_upper_triang_masked_softmax_cuda.cu)."""

    def backward(node: Node, grads: list[Gradient]) -> list[Gradient]:
        return grads

    node = t.node([edge(scores)], backward)
    y = t.output(f"{name} probabilities", scores.shape, scores.dtype, node)
    t.save(node, y.storage)
    return y


def reordered(t: Tape, x: Tensor, name: str) -> Tensor:
    """A contiguous copy in another order: heads joined, or tokens before samples."""
    shape, dtype = x.shape, x.dtype

    def backward(node: Node, grads: list[Gradient]) -> list[Gradient]:
        return [t.allocate(f"{name} gradient", shape, dtype, "temporary")]

    return t.output(name, shape, dtype, t.node([edge(x)], backward))


def own_tokens(t: Tape, x: Tensor, name: str) -> Tensor:
    """A copy of this rank's share of the tokens; the gradient is gathered from all ranks."""
    layout, shape, dtype = t.layout, x.shape, x.dtype
    if not layout.sequence:
        return x

    def backward(node: Node, grads: list[Gradient]) -> list[Gradient]:
        return [t.allocate(f"{name} gathered gradient", shape, dtype, "communication")]

    part = (-(-shape[0] // layout.tensor), *shape[1:])
    return t.output(f"{name} of this rank", part, dtype, t.node([edge(x)], backward))
