"""Mixture of experts on the tape: route each token to some experts, run them on their rows, and add up what they say.

Nothing is dropped. How many rows each expert gets depends on the data; what is kept is the same however they are
spread, because it is ``top_k`` rows a token in all. Transients are those of balanced experts. In expert parallel a rank
has some of the experts, sends their rows to the others and takes as many.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from memcalc.graph import Gradient, Node, Tensor
from memcalc.ops import cast, edge, linear
from memcalc.recorder import Storage
from memcalc.tape import Tape

__all__ = ["balanced", "combine", "dispatch", "route"]

Expert = Callable[[Tensor, int], Tensor]
"""Rows of an expert, and which one it is."""


def balanced(rows: int, experts: int) -> list[int]:
    """Rows of a sample spread over experts as evenly as whole numbers allow.

    >>> balanced(10, 4)
    [3, 3, 2, 2]
    """
    share, left = divmod(rows, experts)
    return [share + (index < left) for index in range(experts)]


def route(t: Tape, x: Tensor, name: str, top_k: int, *, wide: bool = False) -> tuple[Tensor, Storage, Storage]:
    """Shares of each token's ``top_k`` experts, in the router's dtype of float32, and where the rows come from.

    Softmax in float32 over all experts, then the largest, divided by their sum. Besides the shares two int64
    tensors of one element a row come back: the order by expert, and the token of each row. A sigmoid in its place
    (DeepSeek V3) keeps as much, and shares that are not divided by their sum less. ``wide``, the product is of float32.
    """
    logits = _in_float32(t, x, f"{name}.gate") if wide else linear(t, x, f"{name}.gate", flat=True)
    tokens, experts = logits.shape
    logits = cast(t, logits, "float32", f"{name} router logits")

    def small(part: str, width: int, dtype: str = "float32") -> Storage:
        return t.allocate(f"{name} {part}", (tokens, width), dtype, "activations")

    def softmax_backward(node: Node, grads: list[Gradient]) -> list[Gradient]:
        return [small("router logits gradient", experts)]

    def top_backward(node: Node, grads: list[Gradient]) -> list[Gradient]:
        return [small("router probabilities gradient", experts)]

    def share_backward(node: Node, grads: list[Gradient]) -> list[Gradient]:
        return [small("share gradient", top_k)]

    node = t.node([edge(logits)], softmax_backward)
    probabilities = Tensor(small("router probabilities", experts), (tokens, experts), "float32", node)
    t.save(node, probabilities.storage)
    del logits
    node = t.node([edge(probabilities)], top_backward)
    top = Tensor(small("largest probabilities", top_k), (tokens, top_k), "float32", node)
    chosen = small("chosen experts", top_k, "int64")
    t.save(node, chosen)
    del probabilities
    node = t.node([edge(top)], share_backward)
    total = small("sum of the largest", 1)
    shares = Tensor(small("shares", top_k), (tokens, top_k), "float32", node)
    t.save(node, top.storage, total)
    del top, total
    order = small("rows by expert", top_k, "int64")
    return shares, order, small("tokens of rows", top_k, "int64")


def _in_float32(t: Tape, x: Tensor, name: str) -> Tensor:
    """``F.linear(x.float(), weight.float())`` (transformers/models/deepseek_v3/modeling_deepseek_v3.py): keeps both copies.

    Autocast makes 16-bit copies of the float32 ones, and an adapter's product is its own.
    """
    w, x = t.weights[f"{name}.weight"], cast(t, x, "float32", f"{name} input")
    if t.autocast or t.adapt is not None or t.dtype_of(w) == "float32":
        return linear(t, x, name, flat=True)
    shape, low = x.shape, t.dtype_of(w)

    def weight_backward(node: Node, grads: list[Gradient]) -> list[Gradient]:
        return [t.allocate(f"{w.name} gradient", w.shape, low, "gradients", batched=False)]

    def backward(node: Node, grads: list[Gradient]) -> list[Gradient]:
        results: list[Gradient] = [None, None]
        if node.wants(0):
            results[0] = t.allocate(f"{w.name} float32 gradient", w.shape, "float32", "temporary", batched=False)
        if node.wants(1):
            results[1] = t.allocate(f"{name} input gradient", shape, "float32", "temporary")
        return results

    copy = t.allocate(f"{w.name} in float32", w.shape, "float32", "activations", batched=False)
    to_weight = t.node([w if w.trainable else None], weight_backward)
    node = t.node([(to_weight, 0) if to_weight.live else None, edge(x)], backward)
    t.save(node, x.storage if node.wants(0) else None, copy if node.wants(1) else None)
    return t.output(f"{name} output", (*shape[:-1], w.shape[0]), "float32", node)


def dispatch(t: Tape, x: Tensor, name: str, tokens: Storage, sizes: Sequence[int], expert: Expert) -> Tensor:
    """Copy the rows of each token together by expert, run each expert on its part, and concatenate."""
    shape, dtype, rows = x.shape, x.dtype, (sum(sizes), x.shape[1])

    def select_backward(node: Node, grads: list[Gradient]) -> list[Gradient]:
        return [t.allocate(f"{name} input gradient", shape, dtype, "temporary")]

    def split_backward(node: Node, grads: list[Gradient]) -> list[Gradient]:
        return [t.allocate(f"{name} rows gradient", rows, dtype, "temporary")]

    def join_backward(node: Node, grads: list[Gradient]) -> list[Gradient]:
        return [grads[0]] * len(sizes)

    node = t.node([edge(x)], select_backward)
    t.save(node, tokens)
    selected = _arranged(t, _exchanged(t, t.output(f"{name} rows", rows, dtype, node), name), name, len(sizes))
    node = t.node([edge(selected)], split_backward, outputs=len(sizes))
    parts = [Tensor(selected.storage, (size, rows[1]), dtype, node, slot) for slot, size in enumerate(sizes)]
    del selected
    said = [expert(part, index) for index, part in enumerate(parts)]
    node = t.node([edge(part) for part in said], join_backward)
    y = t.output(f"{name} experts' outputs", rows, said[0].dtype, node)
    del said
    return _exchanged(t, _arranged(t, y, name, len(sizes)), name)


def _exchanged(t: Tape, x: Tensor, name: str) -> Tensor:
    """Expert parallel: rows go to the ranks of their experts, as many as come (torch.distributed.all_to_all_single)."""
    return _moved(t, x, f"{name} rows of all ranks", "communication") if t.layout.expert > 1 else x


def _arranged(t: Tape, x: Tensor, name: str, experts: int) -> Tensor:
    """What came, by sender, in the order of this rank's experts, or back; nothing where it has one."""
    return _moved(t, x, f"{name} rows in order", "temporary") if t.layout.expert > 1 and experts > 1 else x


def _moved(t: Tape, x: Tensor, name: str, category: str) -> Tensor:
    shape, dtype = x.shape, x.dtype

    def backward(node: Node, grads: list[Gradient]) -> list[Gradient]:
        return [t.allocate(f"{name} gradient", shape, dtype, category)]

    return t.output(name, shape, dtype, t.node([edge(x)], backward))


def combine(t: Tape, y: Tensor, shares: Tensor, order: Storage, tokens: Storage, name: str) -> Tensor:
    """Each row times its share, added to its token."""
    shape, dtype = y.shape, y.dtype
    per_token = shares.shape
    count = shape[0]

    def pick_backward(node: Node, grads: list[Gradient]) -> list[Gradient]:
        return [t.allocate(f"{name} shares gradient", (count,), dtype, "temporary")]

    def multiply_backward(node: Node, grads: list[Gradient]) -> list[Gradient]:
        rows = t.allocate(f"{name} outputs gradient", shape, dtype, "temporary")
        if not node.wants(1):
            return [rows, None]
        product = t.allocate(f"{name} product of gradients", shape, dtype, "temporary")
        weight = t.allocate(f"{name} row shares gradient", (count,), dtype, "temporary")
        del product
        return [rows, weight]

    def add_backward(node: Node, grads: list[Gradient]) -> list[Gradient]:
        return [t.allocate(f"{name} weighted gradient", shape, dtype, "temporary")]

    shares = cast(t, shares, dtype, f"{name} shares")
    node = t.node([edge(shares)], pick_backward)
    t.save(node, order)
    picked = t.output(f"{name} row shares", (count,), dtype, node)
    del shares
    node = t.node([edge(y), edge(picked)], multiply_backward)
    t.save(node, *(z.storage for z, other in ((y, picked), (picked, y)) if other.node is not None))
    weighted = t.output(f"{name} weighted", shape, dtype, node)
    del y, picked
    node = t.node([edge(weighted)], add_backward)
    t.save(node, tokens, weighted.storage)  # index_add keeps what it adds, only to know its shape
    return t.output(f"{name} output", (per_token[0], shape[1]), dtype, node)
