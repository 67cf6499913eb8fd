"""Where a token stands: learned positions and rotary ones, on the tape."""

from __future__ import annotations

from memcalc.ops import edge
from memcalc.recorder import Storage
from memcalc.tape import Gradient, Node, Tape, Tensor

__all__ = ["position_bias", "positions", "rotary", "rotary_tables"]


def positions(t: Tape, name: str, tokens: int) -> Tensor:
    """Learned positions, looked up once per sequence and shared by the batch."""
    w = t.weights[f"{name}.weight"]
    ids = t.allocate(f"{name} indices", (tokens,), "int64", "temporary", batched=False)

    def backward(node: Node, grads: list[Gradient]) -> list[Gradient]:
        return [t.allocate(f"{w.name} gradient", w.shape, t.weight_dtype, "gradients", batched=False)]

    node = t.node([w], backward)
    t.save(node, ids)
    shape = (tokens, w.shape[1])
    return Tensor(
        t.allocate(f"{name} output", shape, t.weight_dtype, "activations", batched=False),
        shape,
        t.weight_dtype,
        node,
        batched=False,
    )


def rotary_tables(t: Tape, tokens: int, head: int) -> list[Storage]:
    """Cosines and sines of the rotary angles, shared by all layers; they need no gradient."""
    return [
        t.allocate(f"rotary {part}", (tokens, head), t.weight_dtype, "buffers", batched=False)
        for part in ("cos", "sin")
    ]


def rotary(t: Tape, x: Tensor, name: str, tables: list[Storage]) -> Tensor:
    """``x * cos + rotate_half(x) * sin``: keeps nothing of ``x``, only the constant tables."""
    shape, dtype = x.shape, x.dtype
    half = (*shape[:-1], shape[-1] // 2)

    def backward(node: Node, grads: list[Gradient]) -> list[Gradient]:
        rotated = t.allocate(f"{name} rotated gradient", shape, dtype, "temporary")
        negated = t.allocate(f"{name} negated gradient", half, dtype, "temporary")
        result = t.allocate(f"{name} input gradient", shape, dtype, "temporary")
        grads.clear()
        joined = t.allocate(f"{name} joined gradient", shape, dtype, "temporary")
        del rotated, negated, joined
        return [result]

    node = t.node([edge(x)], backward)
    t.save(node, *tables)
    straight = t.allocate(f"{name} cos part", shape, dtype, "activations")
    negated = t.allocate(f"{name} negated half", half, dtype, "activations")
    joined = t.allocate(f"{name} rotated half", shape, dtype, "activations")
    del negated
    turned = t.allocate(f"{name} sin part", shape, dtype, "activations")
    del joined
    y = t.output(f"{name} output", shape, dtype, node)
    del straight, turned
    return y


def position_bias(t: Tape, name: str, tokens: int, heads: int, *, causal: bool) -> Tensor:
    """A learned bias for each head and distance, ``[heads, tokens, tokens]``, shared by the batch and all blocks.

    Under a causal mask, minus infinity is added to it in a second tensor.
    """
    w = t.weights[f"{name}.weight"]
    shape, dtype = (heads, tokens, tokens), t.weight_dtype

    def backward(node: Node, grads: list[Gradient]) -> list[Gradient]:
        return [t.allocate(f"{w.name} gradient", w.shape, dtype, "gradients", batched=False)]

    def mask_backward(node: Node, grads: list[Gradient]) -> list[Gradient]:
        return grads

    buckets = t.allocate(f"{name} buckets", (tokens, tokens), "int64", "activations", batched=False)
    node = t.node([w], backward)
    t.save(node, buckets)
    bias = Tensor(t.allocate(f"{name} bias", shape, dtype, "activations", batched=False), shape, dtype, node)
    if not causal:
        return bias
    mask = t.allocate(f"{name} mask", shape[1:], dtype, "temporary", batched=False)
    masked = t.allocate(f"{name} masked bias", shape, dtype, "activations", batched=False)
    del mask
    return Tensor(masked, shape, dtype, t.node([edge(bias)], mask_backward))
