"""A mixture of experts whose matrices are stacked in two tensors a block, on the tape, as transformers 5 has it.

Operation by operation as transformers/integrations/moe.py, ``grouped_mm_experts_forward``: the rows of all experts, in
the order of experts, go through one grouped product, so that it does not matter how evenly they are loaded.
"""

from __future__ import annotations

from memcalc.graph import Gradient, Node, Tensor
from memcalc.ops import cast, edge, multiply, pointwise, split
from memcalc.recorder import Storage
from memcalc.tape import Tape

__all__ = ["stacked_experts", "weighted"]


def stacked_experts(t: Tape, x: Tensor, name: str, shares: Tensor, order: Storage, tokens: Storage) -> Tensor:
    """What the experts say of each token, weighted and summed: ``x`` is ``[tokens, hidden]``, ``shares`` ``[tokens, top_k]``."""
    (count, width), rows = x.shape, shares.shape[0] * shares.shape[1]
    y = _selected(t, x, f"{name} rows", (rows, width), tokens)
    both = _grouped(t, y, f"{name}.gate_up_proj")
    del y
    gate, up = split(t, both, [both.shape[-1] // 2] * 2, f"{name} gate and up")
    del both
    y = multiply(t, pointwise(t, gate, f"{name}.silu"), up, f"{name}.product")
    del gate, up
    y = _grouped(t, y, f"{name}.down_proj")
    shares = _selected(t, cast(t, shares, x.dtype, f"{name} shares"), f"{name} row shares", (rows, 1), order)
    y = weighted(t, y, shares, f"{name} weighted")
    del shares
    inverse = t.allocate(f"{name} order of tokens", (rows,), "int64", "activations")
    y = _selected(t, y, f"{name} rows by token", y.shape, inverse)
    return cast(t, _summed(t, y, f"{name} output", (count, width)), x.dtype, f"{name} output")


def _selected(t: Tape, x: Tensor, name: str, shape: tuple[int, ...], index: Storage) -> Tensor:
    """``x[index]``: keeps the index; its gradient begins as zeros of the size of ``x``."""
    source, dtype = x.shape, x.dtype

    def backward(node: Node, grads: list[Gradient]) -> list[Gradient]:
        return [t.allocate(f"{name} source gradient", source, dtype, "temporary")]

    node = t.node([edge(x)], backward)
    t.save(node, index)
    return t.output(name, shape, dtype, node)


def _grouped(t: Tape, x: Tensor, name: str) -> Tensor:
    """``grouped_mm(x.to(weight.dtype), weight)``: keeps its input. Autocast does not know it."""
    w = t.weights[name]
    x = cast(t, x, t.dtype_of(w), f"{name} input")
    shape, dtype = x.shape, x.dtype

    def backward(node: Node, grads: list[Gradient]) -> list[Gradient]:
        results: list[Gradient] = [None, None]
        if node.wants(0):
            results[0] = t.allocate(f"{name} input gradient", shape, dtype, "temporary")
        if node.wants(1):
            results[1] = t.allocate(f"{name} gradient", w.shape, dtype, "gradients", batched=False)
        return results

    node = t.node([edge(x), w], backward)
    t.save(node, x.storage if w.trainable else None)
    return t.output(f"{name} output", (*shape[:-1], w.shape[1]), dtype, node)


def weighted(t: Tape, x: Tensor, by: Tensor, name: str) -> Tensor:
    """Each row times a number of its own: keeps both; the numbers' gradient is a sum over a product."""
    metas, rows = (x.shape, x.dtype), (by.shape, by.dtype)

    def backward(node: Node, grads: list[Gradient]) -> list[Gradient]:
        results: list[Gradient] = [t.allocate(f"{name} gradient", *metas, "temporary") if node.wants(0) else None, None]
        if node.wants(1):
            product = t.allocate(f"{name} product of gradients", *metas, "temporary")
            results[1] = t.allocate(f"{name} shares gradient", *rows, "temporary")
            del product
        return results

    node = t.node([edge(x), edge(by)], backward)
    t.save(node, *(z.storage for z, other in ((x, by), (by, x)) if other.node is not None))
    return t.output(name, *metas, node)


def _summed(t: Tape, x: Tensor, name: str, shape: tuple[int, int]) -> Tensor:
    """``x.view(tokens, top_k, hidden).sum(1)``: keeps nothing, and its gradient is a view."""

    def backward(node: Node, grads: list[Gradient]) -> list[Gradient]:
        return grads

    return t.output(name, shape, x.dtype, t.node([edge(x)], backward))
