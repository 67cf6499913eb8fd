"""Cross-entropy in all its forms: what each keeps between forward and backward, and what backward makes.

Sources stand at each form; ``plan.loss`` (memcalc/loss.py) says which one a run has.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from memcalc import vocab_parallel
from memcalc.graph import Edge, Gradient, Node, Tensor
from memcalc.ops import cast, edge, linear
from memcalc.recorder import Storage
from memcalc.tape import Tape

if TYPE_CHECKING:
    from memcalc.plan import Plan

__all__ = ["head", "liger_chunk", "loss_of"]


def head(t: Tape, plan: Plan, x: Tensor, name: str, weight: str | None = None) -> Tensor:
    """The product that makes logits.

    Where the loss takes it along it is only noted, and ``x`` is the model's output. In chunks, all are made before the
    first loss is taken (torchtune/modules/transformer.py, chunked_output); the last one is the output.
    """
    if plan.loss.takes_head:
        t.head = (name, weight or f"{name}.weight")
        return x
    if not plan.loss.chunk_head:
        return linear(t, x, name, weight)
    t.chunks = [linear(t, part, name, weight, flat=True) for part in rows(t, x, plan.loss.chunks, "hidden state")]
    return t.chunks.pop()


def loss_of(t: Tape, plan: Plan, output: Tensor, targets: Tensor) -> Tensor:
    """The mean loss of a micro batch, from the model's output (logits, or what the head multiplies)."""
    loss, upcast = plan.loss, plan.loss_dtype == "float32"
    if t.reduces_in_place:
        return vocab_parallel.in_place_loss(t, output)
    if loss.form == "fused-linear":
        return _fused_linear(t, output, loss.chunks)
    if loss.form == "cut":
        return _cut(t, output, targets)
    if not loss.chunks:
        if loss.shift_copy:  # the whole ones stay bound beside the copy
            whole = cast(t, output, "float32", "logits") if upcast else output
            output = _shifted(t, whole)
        return _one(t, output, targets, loss.form, upcast)
    parts = [*t.chunks, output] if loss.chunk_head else rows(t, output, loss.chunks, "logits")
    t.chunks = []
    return _sum(t, [_one(t, part, targets, loss.form, upcast) for part in parts])


def rows(t: Tape, x: Tensor, parts: int, name: str) -> list[Tensor]:
    """``x.chunk(parts)`` of all rows: views of one storage; their gradients are concatenated."""
    shape, dtype = x.shape, x.dtype

    def backward(node: Node, grads: list[Gradient]) -> list[Gradient]:
        return [t.allocate(f"{name} gradient of all chunks", shape, dtype, "temporary")]

    each = -(-shape[0] // parts)
    counts = [min(each, shape[0] - first) for first in range(0, shape[0], each)]
    node = t.node([edge(x)], backward, outputs=len(counts))
    return [Tensor(x.storage, (count, *shape[1:]), dtype, node, slot) for slot, count in enumerate(counts)]


def _one(t: Tape, logits: Tensor, targets: Tensor, form: str, upcast: bool) -> Tensor:
    if form == "plain" and t.layout.loss_parallel:
        return vocab_parallel.loss_parallel(t, logits, targets, upcast=upcast)
    if form == "plain":
        return _plain(t, logits, targets, upcast=upcast)
    return _kernel(t, logits, targets, form)


def _plain(t: Tape, logits: Tensor, targets: Tensor, *, upcast: bool) -> Tensor:
    """``F.cross_entropy``, of ``logits.float()`` when ``upcast``: the log-softmax is kept.

    Backward makes two more tensors of its size, and the gradient of the 16-bit logits where they are that
    (aten/src/ATen/native/LossNLL.cpp, cross_entropy_loss; tools/autograd/derivatives.yaml).
    """
    logits = cast(t, logits, "float32", "logits") if upcast else logits
    shape, dtype = logits.shape, logits.dtype

    def softmax_backward(node: Node, grads: list[Gradient]) -> list[Gradient]:
        return [t.allocate("logits gradient", shape, dtype, "temporary")]

    def loss_backward(node: Node, grads: list[Gradient]) -> list[Gradient]:
        return [t.allocate("log-softmax gradient", shape, dtype, "temporary")]

    node = t.node([edge(logits)], softmax_backward)
    t.save(node, *([logits.storage] if t.keeps_softmax_input else []))
    log_softmax = t.output("log-softmax of the logits", shape, dtype, node)
    t.save(node, log_softmax.storage)
    node = t.node([edge(log_softmax)], loss_backward)
    t.save(node, log_softmax.storage, targets.storage)
    total = t.allocate("weight of the loss", (), dtype, "temporary", batched=False)
    t.save(node, total)
    return _scalar(t, dtype, node)


def _kernel(t: Tape, logits: Tensor, targets: Tensor, form: str) -> Tensor:
    """One kernel that reads the logits as they are and sums in float32 registers.

    By hand (flash_attn/ops/triton/cross_entropy.py, CrossEntropyLoss; alike liger_kernel/ops/cross_entropy.py) it
    keeps the logits and a float32 logarithm a row, and backward makes their gradient in their own dtype, or writes
    it over them. What inductor makes of ``F.cross_entropy(logits.float())`` keeps the logits and two numbers a row:
    the casts and exponentials are pointwise and are computed again (torch/_functorch/partitioners.py).
    """
    shape, dtype = logits.shape, logits.dtype

    def backward(node: Node, grads: list[Gradient]) -> list[Gradient]:
        if form == "in-place":
            return [node.saved[0]]
        return [t.allocate("logits gradient", shape, dtype, "temporary")]

    node = t.node([edge(logits)], backward)
    each = [t.allocate(f"{name} of a row", shape[:-1], "float32", "activations") for name in ("logarithm", "maximum")]
    t.save(node, logits.storage, targets.storage, *(each if form == "compiled" else each[:1]))
    return _scalar(t, "float32", node)


def liger_chunk(tokens: int, hidden: int, vocab: int) -> int:
    """Rows of one chunk in Liger's fused linear cross-entropy: logits as large as the hidden state, to a power of two.

    Source: liger_kernel/ops/fused_linear_cross_entropy.py, fused_linear_cross_entropy_forward.

    >>> liger_chunk(4096, 4096, 32000), liger_chunk(4096, 4096, 128256)
    (512, 128)
    """
    factor = -(-vocab // hidden)
    return min(1 << (-(-tokens // factor) - 1).bit_length(), tokens)


def _fused_linear(t: Tape, x: Tensor, chunks: int) -> Tensor:
    """Liger's fused linear cross-entropy: both gradients are made in forward, chunk by chunk, and kept for backward.

    The weight's gradient has the weight's dtype (``accum_dtype=None``), and each chunk adds to it in place; a frozen
    weight has none (``grad_weight = ... if weight.requires_grad else None``). The
    chunk rule holds for all rows of a micro batch together; it is taken for each sample here, which is the same
    for a power of two.
    """
    assert t.head is not None
    name, weight = t.head
    w, bias, low = t.weights[weight], t.weights.get(f"{name}.bias"), t.compute_dtype
    each = -(-x.shape[0] // chunks) if chunks else liger_chunk(x.shape[0], *reversed(w.shape))

    def backward(node: Node, grads: list[Gradient]) -> list[Gradient]:
        return [*node.saved]

    edges = [edge(x), w] if bias is None else [edge(x), w, bias]
    node = t.node(edges, backward)
    made: list[Gradient] = [t.allocate("hidden state gradient", x.shape, x.dtype, "activations")]
    made += [
        t.allocate(f"{part.name} gradient", part.shape, t.weight_dtype, "gradients", batched=False)
        if part.trainable
        else None
        for part in (w, bias)
        if part is not None
    ]
    t.allocate("losses", x.shape[:1], "float32", "temporary")
    # Under autocast each product casts its factors anew: a transposed view is not cached (ATen/autocast_mode.cpp).
    factors: list[Storage] = []
    if t.autocast:
        factors.append(t.allocate(f"{w.name} autocast copy", w.shape, low, "temporary", batched=False))
    logits = t.allocate("logits of a chunk", (each, w.shape[0]), low, "temporary")
    product = t.allocate("hidden state gradient of a chunk", (each, w.shape[1]), low, "temporary")
    del factors, logits, product
    t.save(node, *made)
    return _scalar(t, "float32", node)


def _cut(t: Tape, x: Tensor, targets: Tensor) -> Tensor:
    """Apple's cut cross-entropy: logits exist in registers only; both gradients are made in backward.

    Source: cut_cross_entropy/cce.py and cce_backward.py; factors must have 16 bits there, so float32 ones are cast.
    """
    assert t.head is not None
    name, weight = t.head
    w, bias, low = t.weights[weight], t.weights.get(f"{name}.bias"), t.compute_dtype
    factor = cast(t, x, low, "hidden state") if t.autocast else x
    shape, dtype = factor.shape, factor.dtype
    parts = [part for part in (w, bias) if part is not None]

    def backward(node: Node, grads: list[Gradient]) -> list[Gradient]:
        made: list[Gradient] = [t.allocate("hidden state gradient", shape, dtype, "temporary")]
        for p in parts:
            grad = t.allocate(f"{p.name} gradient", p.shape, low, "gradients", batched=False) if p.trainable else None
            made.append(grad)
        return made

    copies = [t.cast_weight(part) for part in parts] if t.autocast else []
    to_parts: list[Edge] = [(node, 0) if node.live else None for _, node in copies] if t.autocast else [*parts]
    node = t.node([edge(factor), *to_parts], backward)
    t.save(node, factor.storage, targets.storage, *(copy for copy, _ in copies))
    t.save(node, t.allocate("logarithm of a row", shape[:-1], "float32", "activations"))
    return _scalar(t, "float32", node)


def _shifted(t: Tape, logits: Tensor) -> Tensor:
    """``logits[..., :-1, :].contiguous()``, which leaves out each sample's last token.

    Source: transformers/loss/loss_utils.py of 4.49, and every model's forward before it. Backward pads with zeros.
    """
    shape, dtype = logits.shape, logits.dtype

    def backward(node: Node, grads: list[Gradient]) -> list[Gradient]:
        return [t.allocate("logits gradient, padded", shape, dtype, "temporary")]

    node = t.node([edge(logits)], backward)
    return t.output("logits shifted", (max(shape[0] - 1, 1), *shape[1:]), dtype, node)


def _scalar(t: Tape, dtype: str, node: Node) -> Tensor:
    return Tensor(t.allocate("loss", (), dtype, "temporary", batched=False), (), dtype, node, batched=False)


def _sum(t: Tape, losses: list[Tensor]) -> Tensor:
    """Numbers added up and divided: one node that hands each the gradient it needs."""
    dtype = losses[0].dtype

    def backward(node: Node, grads: list[Gradient]) -> list[Gradient]:
        return [grads[0]] * len(losses)

    return _scalar(t, dtype, t.node([edge(loss) for loss in losses], backward))
