"""What each torch operation allocates, saves for backward (tools/autograd/derivatives.yaml) and allocates in backward.

One function per operation, called by the families in ``memcalc/models`` the way the torch module calls torch. ``t`` is
the tape; shapes leave out the batch. That sizes are torch's own is held by tests/trainers/test_knobs.py.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from memcalc.graph import Edge, Gradient, Node, Tensor
from memcalc.recorder import Storage
from memcalc.spec import Weight
from memcalc.tape import Tape

__all__ = [
    "add", "boundary", "cast", "casts_to_float8", "dropout", "edge", "embedding", "fused_product", "gelu", "gelu_in_python",
    "linear", "multiply", "opaque", "plain_linear", "pointwise", "relu", "reshape", "scale", "soft_cap", "split",
]  # fmt: skip


def edge(x: Tensor) -> Edge:
    """Where the gradient of ``x`` goes."""
    return None if x.node is None else (x.node, x.slot)


def cast(t: Tape, x: Tensor, dtype: str, name: str) -> Tensor:
    """``x.to(dtype)``; nothing when it has that dtype already. Casts of activations are never cached."""
    shape, back = x.shape, x.dtype
    if back == dtype:
        return x

    def backward(node: Node, grads: list[Gradient]) -> list[Gradient]:
        return [t.allocate(f"{name} gradient", shape, back, "temporary")]

    node = t.node([edge(x)], backward)
    return t.output(f"{name} as {dtype}", shape, dtype, node)


def linear(
    t: Tape, x: Tensor, name: str, weight: str | None = None, *, flat: bool = False, bias: bool = True
) -> Tensor:
    """``F.linear``, or the module that an adapter has put in its place.

    It saves its input where the weight is trained and, under autocast, the 16-bit copy of the weight. With a bias it is
    one ``addmm``, without one a ``mm`` of views, which makes the weight's gradient first. Rows that are ``flat``, of
    all samples together, need no view. ``bias=False`` leaves its addition to a later operation.
    """
    if t.adapt is None:
        return plain_linear(t, x, name, weight, flat=flat, bias=bias)
    return t.adapt(t, x, name, partial(plain_linear, t, name=name, weight=weight, flat=flat, bias=bias))


def plain_linear(
    t: Tape, x: Tensor, name: str, weight: str | None = None, *, flat: bool = False, bias: bool = True
) -> Tensor:
    """``F.linear`` itself, whatever adapters there are."""
    w = t.weights[weight or f"{name}.weight"]
    added = t.weights.get(f"{name}.bias") if bias else None
    # The caller's input lives as long as the call, beside its 16-bit copy.
    factor = cast(t, x, t.compute_dtype, f"{name} input") if t.autocast else x
    shape, dtype, wants_input = factor.shape, factor.dtype, factor.node is not None
    out = (*shape[:-1], w.shape[0])
    low = t.dtype_of(w) if not t.autocast else t.compute_dtype

    def backward(node: Node, grads: list[Gradient]) -> list[Gradient]:
        _ = casts_to_float8(
            t, w, [(out, True)] * (1 if t.float8 == "tensorwise" else 2) + [(w.shape, False), (shape, True)]
        )
        parts = [(f"{name} input gradient", shape, dtype, "temporary", True)]
        parts.append((f"{w.name} gradient", w.shape, low, "gradients", False))
        if added is None:
            parts.reverse()
        else:
            parts.append((f"{added.name} gradient", added.shape, low, "gradients", False))
        results: list[Gradient] = [
            t.allocate(*part[:4], batched=part[4]) if node.wants(index) else None for index, part in enumerate(parts)
        ]
        if wants_input and len(shape) > 1 and not flat:  # computed on flattened rows
            gradient = results[0 if added is not None else 1]
            assert gradient is not None
            gradient.view = True
        return results

    to_weight, copy = _operand(t, w)
    edges: list[Edge] = [to_weight, edge(factor)]
    if added is not None:
        to_bias, bias_copy = _operand(t, added)
        edges = [edge(factor), to_weight, to_bias]
    node = t.node(edges, backward)
    t.save(node, *([factor.storage] if to_weight is not None else []), *([copy] if wants_input else []))

    def product() -> list[Storage]:
        _ = casts_to_float8(t, w, [(shape, True), (w.shape, False)])
        return [t.allocate(f"{name} output", out, dtype, "activations")]

    (y,) = t.computed("mm" if added is None else "addmm", product)
    return Tensor(y, out, dtype, node)


def _operand(t: Tape, w: Weight) -> tuple[Edge, Storage | None]:
    """Where a weight's gradient goes, and its 16-bit copy under autocast, None where it is used as it is."""
    if not t.autocast or t.dtype_of(w) == t.compute_dtype:
        return (w if w.trainable else None), None
    copy, node = t.cast_weight(w)
    return ((node, 0) if w.trainable else None), copy


def casts_to_float8(t: Tape, weight: Weight, parts: list[tuple[tuple[int, ...], bool]]) -> list[Storage]:
    """8-bit forms of the factors of a product inside a block, by torchao: a byte an element, alive while it is computed.

    By tensor each factor is cast once; by row or block of 32 the output's gradient has one form for each direction it is
    multiplied in. MX formats have a byte of scale for each 32 elements. Scales by tensor or row are not counted.
    """
    if t.float8 == "none" or "." not in weight.group:
        return []
    casts = [t.allocate(f"{weight.name} factor in 8 bit", shape, "uint8", "temporary", batched=b) for shape, b in parts]
    if t.float8 == "mxfp8":
        scaled = [(shape[:-1] + (-(-shape[-1] // 32),), b) for shape, b in parts]
        casts += [t.allocate(f"{weight.name} scales", shape, "uint8", "temporary", batched=b) for shape, b in scaled]
    return casts


def embedding(t: Tape, ids: Tensor, name: str, parts: int = 1) -> Tensor:
    """``F.embedding``: saves the indices; its weight gradient is dense, and of all ``parts`` of a table that has several."""
    w = t.weights[f"{name}.weight"]

    def backward(node: Node, grads: list[Gradient]) -> list[Gradient]:
        shape = (w.shape[0] * parts, *w.shape[1:])
        return [t.allocate(f"{w.name} gradient", shape, t.dtype_of(w), "gradients", batched=False)]

    node = t.node([w], backward)
    t.save(node, ids.storage)
    return t.output(f"{name} output", (*ids.shape, w.shape[1]), t.dtype_of(w), node)


def pointwise(t: Tape, x: Tensor, name: str) -> Tensor:
    """An activation function that saves its input: GELU, SiLU."""
    shape, dtype = x.shape, x.dtype

    def backward(node: Node, grads: list[Gradient]) -> list[Gradient]:
        return [t.allocate(f"{name} input gradient", shape, dtype, "temporary")]

    node = t.node([edge(x)], backward)
    t.save(node, x.storage)
    return t.output(f"{name} output", shape, dtype, node)


def relu(t: Tape, x: Tensor, name: str) -> Tensor:
    """``F.relu`` saves its output, which the next layer saves anyway."""
    shape, dtype = x.shape, x.dtype

    def backward(node: Node, grads: list[Gradient]) -> list[Gradient]:
        return [t.allocate(f"{name} input gradient", shape, dtype, "temporary")]

    node = t.node([edge(x)], backward)
    y = t.output(f"{name} output", shape, dtype, node)
    t.save(node, y.storage)
    return y


def add(t: Tape, x: Tensor, y: Tensor, name: str) -> Tensor:
    """``x + y``: saves nothing; both sides receive the very same gradient."""
    dtype = "float32" if "float32" in (x.dtype, y.dtype) else x.dtype
    metas = [(z.dtype, z.batched, z.shape) for z in (x, y)]

    def backward(node: Node, grads: list[Gradient]) -> list[Gradient]:
        results: list[Gradient] = []
        for index, (low, batched, shape) in enumerate(metas):
            same = (low == dtype and batched) or not node.wants(index)
            results.append(
                grads[0] if same else t.allocate(f"{name} gradient", shape, low, "temporary", batched=batched)
            )
        return results

    node = t.node([edge(x), edge(y)], backward)
    return t.output(f"{name} output", x.shape, dtype, node)


def multiply(t: Tape, x: Tensor, y: Tensor, name: str) -> Tensor:
    """``x * y``: saves both factors and makes two gradients."""
    shape, dtypes = x.shape, (x.dtype, y.dtype)

    def backward(node: Node, grads: list[Gradient]) -> list[Gradient]:
        return [
            t.allocate(f"{name} factor gradient", shape, dtype, "temporary") if node.wants(index) else None
            for index, dtype in enumerate(dtypes)
        ]

    node = t.node([edge(x), edge(y)], backward)
    t.save(node, *(z.storage for z, other in ((x, y), (y, x)) if other.node is not None))
    return t.output(f"{name} output", shape, "float32" if "float32" in dtypes else x.dtype, node)


def scale(t: Tape, x: Tensor, name: str) -> Tensor:
    """``x`` times a number: saves nothing."""
    shape, dtype = x.shape, x.dtype

    def backward(node: Node, grads: list[Gradient]) -> list[Gradient]:
        return [t.allocate(f"{name} gradient", shape, dtype, "temporary")]

    return t.output(f"{name} output", shape, dtype, t.node([edge(x)], backward))


def fused_product(t: Tape, gate: Tensor, up: Tensor, name: str) -> Tensor:
    """SwiGLU in one kernel: saves both factors, and writes their gradients over them (Liger-Kernel, ops/swiglu.py)."""

    def backward(node: Node, grads: list[Gradient]) -> list[Gradient]:
        return [*node.saved]

    node = t.node([edge(gate), edge(up)], backward)
    t.save(node, gate.storage, up.storage)
    return t.output(f"{name} output", gate.shape, gate.dtype, node)


def gelu_in_python(t: Tape, x: Tensor, name: str) -> Tensor:
    """``0.5 x (1 + tanh(c (x + 0.044715 x^3)))`` operation by operation (transformers/activations.py, NewGELUActivation).

    Kept are x, the tanh, and both factors of the last product; under CUDA's autocast the power and all after it are
    float32.
    """
    half = scale(t, x, f"{name} half")
    base = cast(t, x, "float32", f"{name} base") if t.autocast and t.device == "cuda" else x
    cubed = scale(t, pointwise(t, base, f"{name} power"), f"{name} share of the power")
    inner = scale(t, add(t, x, cubed, f"{name} sum"), f"{name} argument")
    del base, cubed
    inner = relu(t, inner, f"{name} tanh")
    inner = scale(t, inner, f"{name} tanh + 1")
    return multiply(t, half, inner, f"{name} product")


def gelu(t: Tape, x: Tensor, name: str, form: str) -> Tensor:
    """GELU in one kernel, or written out where the ``form`` is ``python``."""
    return gelu_in_python(t, x, name) if form == "python" else pointwise(t, x, name)


def soft_cap(t: Tape, x: Tensor, name: str) -> Tensor:
    """``cap * tanh(x / cap)``: the tanh keeps its output (transformers/models/gemma2)."""
    return scale(t, relu(t, scale(t, x, f"{name} share"), f"{name} tanh"), f"{name} times cap")


def reshape(x: Tensor, shape: tuple[int, ...]) -> Tensor:
    """``x.view``: the same storage in another shape; its gradient needs no memory of its own."""
    return Tensor(x.storage, shape, x.dtype, x.node, x.slot, x.batched)


def split(t: Tape, x: Tensor, widths: list[int], name: str) -> list[Tensor]:
    """``x.split(widths)``: views of one storage, which lives as long as any of them; gradients are concatenated."""
    shape, dtype = x.shape, x.dtype

    def backward(node: Node, grads: list[Gradient]) -> list[Gradient]:
        return [t.allocate(f"{name} gradient", shape, dtype, "temporary")]

    node = t.node([edge(x)], backward, outputs=len(widths))
    return [Tensor(x.storage, (*shape[:-1], width), dtype, node, slot) for slot, width in enumerate(widths)]


def dropout(t: Tape, x: Tensor, name: str, probability: float) -> Tensor:
    """``F.dropout``: CUDA saves a one-byte mask, the CPU kernel a mask in the input's dtype."""
    if not probability:
        return x
    shape, dtype = x.shape, x.dtype

    def backward(node: Node, grads: list[Gradient]) -> list[Gradient]:
        return [t.allocate(f"{name} gradient", shape, dtype, "temporary")]

    node = t.node([edge(x)], backward)
    y = t.output(f"{name} output", shape, dtype, node)
    t.save(node, t.allocate(f"{name} mask", shape, dtype if t.device == "cpu" else "bool", "activations"))
    return y


def opaque(t: Tape, x: Tensor, name: str, kept: tuple[int, ...], stated_bytes: int) -> Tensor:
    """A layer of which only what it keeps is known: stated bytes, or an output of shape ``kept``."""
    w = t.weights[f"{name}.weight"]
    dtype = t.compute_dtype

    def backward(node: Node, grads: list[Gradient]) -> list[Gradient]:
        nothing = t.allocate(f"{name} input gradient", (0,), dtype, "temporary")
        return [nothing, t.allocate(f"{w.name} gradient", w.shape, t.weight_dtype, "gradients", batched=False)]

    node = t.node([edge(x), w], backward)
    if stated_bytes:
        held = t.allocate(f"{name} output", (stated_bytes,), "uint8", "activations", batched=False)
        y = Tensor(held, kept, dtype, node)
    else:
        y = t.output(f"{name} output", kept, dtype, node)
    t.save(node, y.storage)
    return y


def boundary(t: Tape, x: Tensor, then: Callable[[], None]) -> Tensor:
    """No operation: calls ``then`` when the gradient of ``x`` comes by, if one does. Sharding hooks on here."""

    def backward(node: Node, grads: list[Gradient]) -> list[Gradient]:
        then()
        return grads

    return Tensor(x.storage, x.shape, x.dtype, t.node([edge(x)], backward), batched=x.batched)
