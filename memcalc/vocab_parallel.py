"""A vocabulary divided over the ranks of tensor parallel: the embedding, the logits and their loss.

Sources: NVIDIA/Megatron-LM megatron/core/tensor_parallel/layers.py (``VocabParallelEmbedding``) and cross_entropy.py;
torch/distributed/tensor/_ops/_mask_buffer.py, torch/distributed/tensor/parallel/loss.py.
"""

from __future__ import annotations

from memcalc import ops
from memcalc.graph import Gradient, Node, Tensor
from memcalc.ops import edge
from memcalc.tape import Tape

__all__ = ["embedding", "gather_logits", "in_place_loss", "loss_parallel"]


def embedding(t: Tape, ids: Tensor, name: str) -> Tensor:
    """Rows of a table that other ranks hold are zeros; the ranks' results are yet to be summed (``leave``).

    DTensor gives each rank the gradient of the whole table: torch/distributed/tensor/_ops/_embedding_ops.py,
    embedding_dense_backward_strategy, knows none that is divided by rows.
    """
    if t.layout.tensor == 1:
        return ops.embedding(t, ids, name)
    mask = t.allocate(f"{name} mask", ids.shape, "bool", "activations")
    kept = t.allocate(f"{name} masked indices", ids.shape, "int64", "activations")
    parts = 1 if t.reduces_in_place else t.layout.tensor
    x = ops.embedding(t, Tensor(kept, ids.shape, "int64", None), name, parts)
    shape, dtype = x.shape, x.dtype

    def backward(node: Node, grads: list[Gradient]) -> list[Gradient]:
        return [t.allocate(f"{name} masked gradient", shape, dtype, "temporary")]

    node = t.node([edge(x)], backward)
    t.save(node, mask)
    return Tensor(x.storage, shape, dtype, node)


def gather_logits(t: Tape, logits: Tensor) -> Tensor:
    """All ranks' columns of the logits, where the loss needs them; the gradient is a copy of this rank's own columns."""
    if t.layout.tensor == 1 or t.layout.loss_parallel or t.reduces_in_place:
        return logits
    shape, dtype = logits.shape, logits.dtype
    whole = (*shape[:-1], shape[-1] * t.layout.tensor)

    def backward(node: Node, grads: list[Gradient]) -> list[Gradient]:
        return [t.allocate("logits gradient of this rank", shape, dtype, "temporary")]

    node = t.node([edge(logits)], backward)
    parts = t.allocate("logits parts", whole, dtype, "communication")
    gathered = t.output("gathered logits", whole, dtype, node)
    del parts
    return gathered


def in_place_loss(t: Tape, logits: Tensor) -> Tensor:
    """Megatron's vocabulary-parallel cross-entropy: the maximum is subtracted from float32 logits in place, and they
    become the softmax, which becomes their gradient.

    Source: megatron/mpu/cross_entropy.py from March 2020 on, and megatron/core/tensor_parallel/cross_entropy.py.
    """
    shape, low, tokens = logits.shape, logits.dtype, logits.shape[:-1]

    def backward(node: Node, grads: list[Gradient]) -> list[Gradient]:
        softmax = node.saved[0]
        return [softmax if low == "float32" else t.allocate("logits gradient", shape, low, "temporary")]

    node = t.node([edge(logits)], backward)
    softmax = logits.storage
    if low != "float32":
        softmax = t.allocate("softmax of the logits", shape, "float32", "activations")
    for part in ("largest logit", "logit of the target", "sum of exponentials"):
        held = t.allocate(part, tokens, "float32", "temporary")
    del held
    mask = t.allocate("mask of the targets", tokens, "bool", "activations")
    own = t.allocate("targets of this rank", tokens, "int64", "activations")
    t.save(node, softmax, mask, own)
    return _mean(t, t.output("loss of each token", tokens, "float32", node))


def _mean(t: Tape, losses: Tensor) -> Tensor:
    """The mean over tokens that are not masked: Megatron multiplies by a float32 mask and sums."""
    shape = losses.shape

    def backward(node: Node, grads: list[Gradient]) -> list[Gradient]:
        return [t.allocate("gradient of each token's loss", shape, "float32", "temporary")]

    node = t.node([edge(losses)], backward)
    t.save(node, t.allocate("loss mask", shape, "float32", "inputs"))
    return Tensor(t.allocate("loss", (), "float32", "temporary", batched=False), (), "float32", node, batched=False)


def loss_parallel(t: Tape, logits: Tensor, targets: Tensor, *, upcast: bool) -> Tensor:
    """``loss_parallel``: log-softmax and its gradient written out in elementwise operations on this rank's columns."""
    logits = ops.cast(t, logits, "float32", "logits") if upcast else logits
    shape, dtype, tokens = logits.shape, logits.dtype, targets.shape

    def fused_backward(node: Node, grads: list[Gradient]) -> list[Gradient]:
        minus_one = t.allocate("zeros and minus ones", shape, dtype, "temporary")
        exponential = t.allocate("exponential of the log-softmax", shape, dtype, "temporary")
        total = t.allocate("sum of both", shape, dtype, "temporary")
        del exponential
        result = t.allocate("logits gradient", shape, dtype, "temporary")
        del minus_one, total
        return [result]

    def passed_on(node: Node, grads: list[Gradient]) -> list[Gradient]:
        return grads

    node = t.node([edge(logits)], passed_on)
    shifted = t.allocate("shifted logits", shape, dtype, "activations")
    exponential = t.allocate("exponential of the logits", shape, dtype, "temporary")
    del exponential
    log_softmax = t.output("log-softmax of the logits", shape, dtype, node)
    del shifted
    t.save(node, log_softmax.storage)
    node = t.node([edge(log_softmax)], fused_backward)
    t.save(node, log_softmax.storage, targets.storage)
    for part in ("masked targets", "log-probability of the target"):
        held = t.allocate(part, tokens, "int64", "temporary")
    del held
    return Tensor(t.allocate("loss", (), dtype, "temporary", batched=False), (), dtype, node, batched=False)
