"""Where a token stands: learned positions and rotary ones, on the tape."""

from __future__ import annotations

from memcalc.graph import Gradient, Node, Tensor
from memcalc.ops import edge
from memcalc.recorder import Storage
from memcalc.tape import Tape

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


def rotary(
    t: Tape, x: Tensor, name: str, tables: list[Storage], *, form: str = "auto", head: int = 0, turned: int = 0
) -> Tensor:
    """``x * cos + rotate_half(x) * sin``: keeps nothing of ``x``, only the constant tables.

    ``turned`` of each ``head``'s elements are rotated and joined with the rest; 0 is all. Other forms: ``complex``
    multiplies float32 pairs (torchtitan, Llama), ``kernel`` writes over ``x`` (Liger-Kernel, ops/rope.py).
    """
    if form == "kernel":
        return _in_place(t, x, name, tables)
    if turned == head:
        return _turn(t, x, name, tables, form)
    part = (*x.shape[:-1], x.shape[-1] // head * turned)
    y = _turn(t, _slice(t, x, part, name), name, tables, form)
    return _join(t, y, x, name)


def _in_place(t: Tape, x: Tensor, name: str, tables: list[Storage]) -> Tensor:
    node = t.node([edge(x)], lambda node, grads: grads)
    t.save(node, *tables)
    return Tensor(x.storage, x.shape, x.dtype, node)


def _slice(t: Tape, x: Tensor, part: tuple[int, ...], name: str) -> Tensor:
    """A view of some elements of each head; its gradient is as large as ``x``."""
    shape, dtype = x.shape, x.dtype

    def backward(node: Node, grads: list[Gradient]) -> list[Gradient]:
        return [t.allocate(f"{name} slice gradient", shape, dtype, "temporary")]

    return Tensor(x.storage, part, dtype, t.node([edge(x)], backward))


def _join(t: Tape, turned: Tensor, x: Tensor, name: str) -> Tensor:
    """What was rotated beside what was not, in a new tensor."""
    metas, dtype = (turned.shape, x.shape), x.dtype

    def backward(node: Node, grads: list[Gradient]) -> list[Gradient]:
        return [t.allocate(f"{name} part gradient", shape, dtype, "temporary") for shape in metas]

    return t.output(f"{name} joined", x.shape, dtype, t.node([edge(turned), edge(x)], backward))


def _turn(t: Tape, x: Tensor, name: str, tables: list[Storage], form: str) -> Tensor:
    return _complex(t, x, name, tables) if form == "complex" else _written_out(t, x, name, tables)


def _complex(t: Tape, x: Tensor, name: str, tables: list[Storage]) -> Tensor:
    shape, dtype = x.shape, x.dtype

    def backward(node: Node, grads: list[Gradient]) -> list[Gradient]:
        wide = t.allocate(f"{name} float32 gradient", shape, "float32", "temporary")
        grads.clear()
        product = t.allocate(f"{name} complex gradient", shape, "float32", "temporary")
        del wide
        return [product if dtype == "float32" else t.allocate(f"{name} input gradient", shape, dtype, "temporary")]

    node = t.node([edge(x)], backward)
    t.save(node, *tables)
    wide = t.allocate(f"{name} pairs", shape, "float32", "temporary") if dtype != "float32" else None
    product = t.allocate(f"{name} complex product", shape, "float32", "temporary")
    if dtype == "float32":
        return Tensor(product, shape, dtype, node)
    y = t.output(f"{name} output", shape, dtype, node)
    del wide, product
    return y


def _written_out(t: Tape, x: Tensor, name: str, tables: list[Storage]) -> Tensor:
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
