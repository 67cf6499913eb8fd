"""Convolutions on the tape, as oneDNN on the CPU and cuDNN on CUDA see them: shapes are ``[channels, height, width]``."""

from __future__ import annotations

from memcalc.ops import cast, edge
from memcalc.tape import Edge, Gradient, Node, Tape, Tensor

__all__ = ["conv2d"]


def conv2d(
    t: Tape, x: Tensor, name: str, *, stride: int = 1, padding: int = 0, transposed_after: bool = False
) -> Tensor:
    """``F.conv2d`` with a square kernel: saves its input and, under autocast, the 16-bit copy of the weight.

    Where the output is ``transposed_after``, its gradient comes transposed and is copied before use.
    """
    w, bias = t.weights[f"{name}.weight"], t.weights.get(f"{name}.bias")
    if t.autocast:
        x = cast(t, x, t.compute_dtype, f"{name} input")
    shape, dtype, wants_input = x.shape, x.dtype, x.node is not None
    kernel = w.shape[-1]
    height, width = ((size + 2 * padding - kernel) // stride + 1 for size in shape[1:])
    low = t.compute_dtype if t.autocast else t.weight_dtype

    def backward(node: Node, grads: list[Gradient]) -> list[Gradient]:
        if transposed_after:
            grads[0] = t.copy_of(grads[0], f"{name} output gradient", "temporary")  # type: ignore[arg-type]
        results: list[Gradient] = [
            t.allocate(f"{name} input gradient", shape, dtype, "temporary") if wants_input else None
        ]
        for part in (w, bias):
            if part is not None:
                results.append(t.allocate(f"{part.name} gradient", part.shape, low, "gradients", batched=False))
        return results

    edges: list[Edge] = [edge(x), w, *([bias] if bias else [])]
    copies = []
    if t.autocast:
        copy, node = t.cast_weight(w)
        copies, edges[1] = [copy], (node, 0)
        if bias is not None:
            edges[2] = (t.cast_weight(bias)[1], 0)
    node = t.node(edges, backward)
    t.save(node, x.storage, *copies)
    return t.output(f"{name} output", (w.shape[0], height, width), dtype, node)
