"""Context parallel: each rank has a share of every sequence's tokens, and attention needs the keys and values of all.

Source: torch/distributed/tensor/experimental/_context_parallel/_attention.py, ``_templated_ring_attention`` and its
backward. By default keys and values of all ranks are gathered once; attention is computed share by share, and the results
are merged in float32. The last rank's queries see all shares whole, so it is the fullest.
"""

from __future__ import annotations

from memcalc.graph import Gradient, Node, Tensor
from memcalc.ops import edge
from memcalc.recorder import Storage
from memcalc.tape import Tape

__all__ = ["ring_attention"]


def ring_attention(t: Tape, q: Tensor, k: Tensor, v: Tensor, name: str, *, heads: int) -> Tensor:
    """Keeps what flash attention keeps of this rank's tokens: q, k, v, the output and a float32 logarithm a row."""
    shape, dtype = q.shape, q.dtype
    tokens, both = shape[0], (shape[0], k.shape[1] + v.shape[1])
    shapes = [x.shape for x in (q, k, v)]

    def wide(part: str, of: tuple[int, ...]) -> Storage:
        return t.allocate(f"{name} float32 {part}", of, "float32", "temporary")

    def backward(node: Node, grads: list[Gradient]) -> list[Gradient]:
        query, pair = wide("query gradient", shape), wide("key and value gradient", both)
        shares = _shares(t, both, dtype, name)
        each = [t.allocate(f"{name} gradient of one share", part, dtype, "temporary") for part in shapes]
        rows = -(-tokens // 128) * 128
        workspace = [
            t.allocate("attention row sums", (heads, rows), "float32", "temporary"),
            t.allocate("attention query accumulator", (rows, shape[1]), "float32", "temporary"),
        ]
        workspace.clear()
        sent = wide("gradients to send", both)
        received = wide("gradients received", both)
        del sent, each, shares, pair
        results: list[Gradient] = [t.allocate(f"{name} query gradient", shape, dtype, "temporary")]
        del query
        # One tensor of both, of which each is a view.
        joined = t.allocate(f"{name} key and value gradient", both, dtype, "temporary")
        del received
        return [*results, joined, joined]

    node = t.node([edge(q), edge(k), edge(v)], backward)
    t.save(node, q.storage, k.storage, v.storage)
    shares = _shares(t, both, dtype, name)
    merged = wide("output", shape)
    logarithms = [t.allocate(f"{name} log-sum-exp of a share", (heads, tokens), "float32", "temporary") for _ in "12"]
    share = t.allocate(f"{name} output of a share", shape, dtype, "temporary")
    in_float32 = wide("output of a share", shape)
    difference = wide("difference", shape)
    correction = wide("correction", shape)
    del difference
    corrected = wide("corrected output", shape)
    del merged, share, in_float32, correction, logarithms, shares
    y = t.output(f"{name} attention", shape, dtype, node)
    del corrected
    t.save(node, y.storage, t.allocate(f"{name} log-sum-exp", (heads, tokens), "float32", "activations"))
    return y


def _shares(t: Tape, both: tuple[int, int], dtype: str, name: str) -> list[Storage]:
    """Contiguous copies of this rank's keys and values, and those of all ranks; one more copy is there on the way."""
    copies = t.allocate(f"{name} keys and values", both, dtype, "communication")
    sent = t.allocate(f"{name} keys and values to send", both, dtype, "communication")
    whole = (both[0] * t.layout.context, both[1])
    gathered = t.allocate(f"{name} keys and values of all ranks", whole, dtype, "communication")
    del sent
    return [copies, gathered]
