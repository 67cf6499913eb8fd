"""Convolutions and what goes with them on the tape, as oneDNN on the CPU and cuDNN on CUDA see them.

Shapes are ``[channels, height, width]``, or ``[channels, length]`` in one dimension.
"""

from __future__ import annotations

from memcalc.graph import Edge, Gradient, Node, Tensor
from memcalc.ops import cast, edge
from memcalc.recorder import Storage
from memcalc.tape import Tape

__all__ = ["add_in_place", "batch_norm", "conv", "max_pool", "mean_of_pixels", "relu_in_place"]

ONEDNN_CHANNELS = 4
"""From so many input channels on, oneDNN copies the input into blocks of channels."""


def conv(t: Tape, x: Tensor, name: str, *, stride: int = 1, padding: int = 0, transposed_after: bool = False) -> Tensor:
    """``F.conv2d`` with a square kernel, or ``F.conv1d``: saves its input and, under autocast, the 16-bit copy of the weight.

    Where the output is ``transposed_after``, its gradient comes transposed and is copied before use.
    """
    w, bias = t.weights[f"{name}.weight"], t.weights.get(f"{name}.bias")
    if t.autocast:
        x = cast(t, x, t.compute_dtype, f"{name} input")
    shape, dtype, wants_input = x.shape, x.dtype, x.node is not None
    kernel = w.shape[-1]
    out = (w.shape[0], *((size + 2 * padding - kernel) // stride + 1 for size in shape[1:]))
    low = t.compute_dtype if t.autocast else t.weight_dtype

    # With very few channels oneDNN reads an image as it is.
    copies_input = shape[0] >= ONEDNN_CHANNELS

    def copy(part: str, shape: tuple[int, ...], *, batched: bool = True) -> Storage | None:
        """oneDNN computes on copies in a layout of its own."""
        if t.device != "cpu":
            return None
        return t.allocate(f"{name} {part} in oneDNN's layout", shape, dtype, "temporary", batched=batched)

    def backward(node: Node, grads: list[Gradient]) -> list[Gradient]:
        result: Gradient = None
        if transposed_after:
            grads[0] = t.allocate(f"{name} output gradient", out, dtype, "temporary")
        if wants_input:
            parts = [
                copy("output gradient", out),
                copy("weight", w.shape, batched=False),
                copy("input gradient", shape),
            ]
            del parts[:2]
            result = t.allocate(f"{name} input gradient", shape, dtype, "temporary")
            if stride > 1 and t.device == "cpu":  # comes back in an order of its own
                result = t.copy_of(result, f"{name} input gradient", "temporary")
            del parts
        parts = [copy("output gradient", out), copy("input", shape) if copies_input else None]
        ours = copy("weight gradient", w.shape, batched=False)
        del parts
        results = [result]
        for part in (w, bias):
            if part is not None:
                results.append(t.allocate(f"{part.name} gradient", part.shape, low, "gradients", batched=False))
        del ours
        return results

    edges: list[Edge] = [edge(x), w, *([bias] if bias else [])]
    copies = []
    if t.autocast:
        low_weight, node = t.cast_weight(w)
        copies, edges[1] = [low_weight], (node, 0) if w.trainable else None
        if bias is not None:
            edges[2] = (t.cast_weight(bias)[1], 0)
    node = t.node(edges, backward)
    t.save(node, x.storage, *copies)
    parts = [copy("input", shape) if copies_input else None, copy("weight", w.shape, batched=False)]
    ours = copy("output", out)
    del parts
    y = t.output(f"{name} output", out, dtype, node)
    del ours
    return y


def batch_norm(t: Tape, x: Tensor, name: str) -> Tensor:
    """``F.batch_norm`` in training: saves its input, and mean and reciprocal deviation of each channel."""
    w, bias = t.weights[f"{name}.weight"], t.weights[f"{name}.bias"]
    shape, dtype = x.shape, x.dtype

    def backward(node: Node, grads: list[Gradient]) -> list[Gradient]:
        results: list[Gradient] = [t.allocate(f"{name} input gradient", shape, dtype, "temporary")]
        for part in (w, bias):
            results.append(t.allocate(f"{part.name} gradient", part.shape, t.weight_dtype, "gradients", batched=False))
        if t.device == "cpu":
            scratch = t.allocate(f"{name} scratch", shape, dtype, "temporary")
            del scratch
        return results

    node = t.node([edge(x), w, bias], backward)
    t.save(node, x.storage)
    y = t.output(f"{name} output", shape, dtype, node)
    stats = t.weight_dtype if t.device == "cpu" else "float32"
    for part in ("mean", "rstd"):
        t.save(node, t.allocate(f"{name} {part}", w.shape, stats, "activations", batched=False))
    return y


def relu_in_place(t: Tape, x: Tensor, name: str) -> Tensor:
    """``F.relu(x, inplace=True)``: saves its output, which stands where the input stood."""
    shape, dtype = x.shape, x.dtype

    def backward(node: Node, grads: list[Gradient]) -> list[Gradient]:
        return [t.allocate(f"{name} input gradient", shape, dtype, "temporary")]

    node = t.node([edge(x)], backward)
    t.save(node, x.storage)
    return Tensor(x.storage, shape, dtype, node)


def add_in_place(t: Tape, x: Tensor, y: Tensor, name: str) -> Tensor:
    """``x += y``: both sides receive the very same gradient."""

    def backward(node: Node, grads: list[Gradient]) -> list[Gradient]:
        return [grads[0], grads[0]]

    return Tensor(x.storage, x.shape, x.dtype, t.node([edge(x), edge(y)], backward))


def max_pool(t: Tape, x: Tensor, name: str, *, kernel: int, stride: int, padding: int) -> Tensor:
    """``F.max_pool2d``: saves its input and one int64 index for each element of its output."""
    shape, dtype = x.shape, x.dtype
    height, width = ((size + 2 * padding - kernel) // stride + 1 for size in shape[1:])
    pooled = (shape[0], height, width)

    def backward(node: Node, grads: list[Gradient]) -> list[Gradient]:
        return [t.allocate(f"{name} input gradient", shape, dtype, "temporary")]

    node = t.node([edge(x)], backward)
    t.save(node, x.storage)
    y = t.output(f"{name} output", pooled, dtype, node)
    t.save(node, t.allocate(f"{name} indices", pooled, "int64", "activations"))
    return y


def mean_of_pixels(t: Tape, x: Tensor, name: str) -> Tensor:
    """Adaptive average pooling to one pixel: saves nothing; its gradient is spread over all pixels."""
    shape, dtype = x.shape, x.dtype

    def backward(node: Node, grads: list[Gradient]) -> list[Gradient]:
        return [t.allocate(f"{name} input gradient", shape, dtype, "temporary")]

    return t.output(f"{name} output", shape[:1], dtype, t.node([edge(x)], backward))
