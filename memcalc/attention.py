"""Attention on the tape, one function per kernel that scaled_dot_product_attention may take.

Shapes are ``[tokens, width]`` per sample. Kernels that make no scores are in memcalc/fused_attention.py. Sources:
aten/src/ATen/native/transformers/attention.cpp, and Korthikanti et al. 2022 for the written-out form.
"""

from __future__ import annotations

from functools import partial

from memcalc.context_parallel import ring_attention
from memcalc.fused_attention import converted, fused, mask_bias, mixed
from memcalc.graph import Gradient, Node, Tensor
from memcalc.ops import cast, edge, soft_cap
from memcalc.ops import dropout as drop
from memcalc.recorder import Storage
from memcalc.softmaxes import clamped, scripted_softmax
from memcalc.tape import Tape

__all__ = ["attention", "biased_attention"]


def attention(
    t: Tape,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    name: str,
    *,
    kind: str,
    heads: int,
    dropout: float,
    causal: bool = True,
    repeat: bool = False,
    wide: bool = False,
    softmax: str = "auto",
    capped: bool = False,
    masked: bool = False,
) -> Tensor:
    """``softmax(q kᵀ) v`` by the kernel ``kind``; key/value heads may be fewer than ``heads``, and keys of other tokens.
    ``masked``: a mask of booleans says which keys each query sees, instead of ``causal``.

    Written out, the softmax may be ``wide``, of float32, or a model's own (memcalc/softmaxes.py), and the scores ``capped`` by tanh. Fewer key/value heads are
    copied with ``repeat``, and for every kernel but flash, which alone takes them as they are.
    """
    run = partial(
        _attention, t, name=name, kind=kind, heads=heads, dropout=dropout, causal=causal, repeat=repeat, wide=wide,
        softmax=softmax, capped=capped, masked=masked,
    )  # fmt: skip
    y = t.core(run, q, k, v) if t.core is not None else run(q, k, v)
    return t.prompt(t, q, y, name) if t.prompt is not None else y


def _attention(
    t: Tape,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    name: str,
    kind: str,
    heads: int,
    dropout: float,
    causal: bool,
    repeat: bool,
    wide: bool,
    softmax: str,
    capped: bool,
    masked: bool,
) -> Tensor:
    # transformers repeats them beside a mask (integrations/sdpa_attention.py, use_gqa_in_sdpa).
    if k.shape[-1] != q.shape[-1] and (repeat or masked or kind != "flash"):
        k, v = (converted(t, x, f"{name} repeated heads", shape=(x.shape[0], q.shape[-1])) for x in (k, v))
    if t.layout.context > 1:
        return ring_attention(t, q, k, v, name, heads=heads)
    if kind in ("flash", "efficient"):
        return fused(t, q, k, v, name, kind, heads, masked=masked)
    if kind == "eager":
        mix = _eager(t, q, k, v, name, heads, dropout, causal, wide, softmax, capped)
    else:
        mix = _math(t, q, k, v, name, heads, dropout, causal, masked)
    return converted(t, mix, f"{name} heads joined")


def _eager(
    t: Tape,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    name: str,
    heads: int,
    dropout: float,
    causal: bool,
    wide: bool,
    softmax: str,
    capped: bool,
) -> Tensor:
    """Written out in Python: ``trainers/models/layers.py``. Operands of a batched product are copied."""
    shape = mixed(q, k, v)
    left = converted(t, converted(t, q, f"{name} scaled query"), f"{name} query copy")
    scores = _product(t, left, converted(t, k, f"{name} key copy"), _scores_shape(q, k, heads), f"{name} scores")
    del left
    if capped:
        scores = soft_cap(t, scores, f"{name} score cap")
    if causal and softmax != "scripted":
        scores = _masked(t, scores, name)
    if softmax == "clamped":
        scores = clamped(t, scores, name)
        wide = scores.dtype == "float16"
    # aten/src/ATen/autocast_mode.h: softmax is in CUDA's float32 list, not in the CPU's
    if softmax == "scripted":
        probabilities = scripted_softmax(t, scores, name)
    elif wide or (t.autocast and t.device == "cuda"):
        probabilities = _softmax(t, cast(t, scores, "float32", f"{name} scores"), name)
    else:
        probabilities = _softmax(t, scores, name)
    if wide:  # transformers casts back before the dropout
        probabilities = cast(t, probabilities, q.dtype, f"{name} shares")
    probabilities = drop(t, probabilities, f"{name} attention dropout", dropout)
    probabilities = cast(t, probabilities, q.dtype, f"{name} probabilities")
    return _product(t, probabilities, converted(t, v, f"{name} value copy"), shape, f"{name} mix")


def _scores_shape(q: Tensor, k: Tensor, heads: int) -> tuple[int, int, int]:
    return heads, q.shape[0], k.shape[0]


def biased_attention(
    t: Tape, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, name: str, *, heads: int, dropout: float
) -> Tensor:
    """Written out with a bias added to the scores, no scaling and a float32 softmax: ``trainers/models/t5.py``."""
    left, right = converted(t, q, f"{name} query copy"), converted(t, k, f"{name} key copy")
    scores = _product(t, left, right, _scores_shape(q, k, heads), f"{name} scores")
    del left, right
    if bias is not None:
        scores = _biased(t, scores, bias, name)
    low = scores.dtype
    shares = cast(t, _softmax(t, cast(t, scores, "float32", f"{name} scores"), name), low, f"{name} shares")
    del scores
    shares = drop(t, shares, f"{name} attention dropout", dropout)
    mix = _product(t, shares, converted(t, v, f"{name} value copy"), q.shape, f"{name} mix")
    del shares
    return converted(t, mix, f"{name} heads joined")


def _biased(t: Tape, scores: Tensor, bias: Tensor, name: str) -> Tensor:
    """``scores += bias`` in place: the gradient of the bias is a sum over the batch."""
    shape, dtype = bias.shape, bias.dtype

    def backward(node: Node, grads: list[Gradient]) -> list[Gradient]:
        if not node.wants(1):
            return [grads[0], None]
        return [grads[0], t.allocate(f"{name} bias gradient", shape, dtype, "temporary", batched=False)]

    return Tensor(scores.storage, scores.shape, scores.dtype, t.node([edge(scores), edge(bias)], backward))


def _math(
    t: Tape, q: Tensor, k: Tensor, v: Tensor, name: str, heads: int, dropout: float, causal: bool, masked: bool
) -> Tensor:
    """``_scaled_dot_product_attention_math``: 16-bit inputs are computed in float32."""
    tokens, low, shape = q.shape[0], q.dtype, mixed(q, k, v)
    q, k, v = (cast(t, x, "float32", f"{name} {part}") for x, part in zip((q, k, v), "qkv", strict=True))
    scaled = converted(t, q, f"{name} scaled query")
    bias: list[Storage] = []
    if masked:
        bias = [mask_bias(t, name, tokens, k.shape[0], low)]
        if low != "float32":
            bias.append(t.allocate(f"{name} mask bias in float32", (tokens, k.shape[0]), "float32", "temporary"))
    elif causal:
        bias = [_causal_bias(t, name, tokens)]
    left, right = (
        converted(t, scaled, f"{name} query copy"),
        converted(t, converted(t, k, f"{name} scaled key"), f"{name} key copy"),
    )
    scores = _product(t, left, right, _scores_shape(q, k, heads), f"{name} scores")
    del scaled, left, right
    probabilities = _softmax(t, scores, name)
    empty_rows = t.allocate(f"{name} rows without keys", scores.shape, "bool", "temporary")
    del empty_rows, scores
    probabilities = drop(t, probabilities, f"{name} attention dropout", dropout)
    mix = _product(t, probabilities, converted(t, v, f"{name} value copy"), shape, f"{name} mix")
    del bias
    return cast(t, mix, low, f"{name} mix")


def _causal_bias(t: Tape, name: str, tokens: int) -> Storage:
    ones = t.allocate(f"{name} ones", (tokens, tokens), "bool", "temporary", batched=False)
    mask = t.allocate(f"{name} causal mask", (tokens, tokens), "bool", "temporary", batched=False)
    del ones
    bias = t.allocate(f"{name} mask bias", (tokens, tokens), "float32", "temporary", batched=False)
    del mask
    return bias


def _product(t: Tape, a: Tensor, b: Tensor, shape: tuple[int, ...], name: str) -> Tensor:
    """A batched matrix product: keeps both factors; the second one's gradient is made first."""
    shapes, dtype = (b.shape, a.shape), a.dtype

    def backward(node: Node, grads: list[Gradient]) -> list[Gradient]:
        return [
            t.allocate(f"{name} factor gradient", shape, dtype, "temporary") if node.wants(index) else None
            for index, shape in enumerate(shapes)
        ]

    node = t.node([edge(b), edge(a)], backward)
    t.save(node, *(x.storage for x, other in ((a, b), (b, a)) if other.node is not None))
    return t.output(name, shape, dtype, node)


def _masked(t: Tape, scores: Tensor, name: str) -> Tensor:
    """``masked_fill_`` in place with a mask all layers share: keeps nothing, copies the gradient."""
    shape, dtype = scores.shape, scores.dtype

    def backward(node: Node, grads: list[Gradient]) -> list[Gradient]:
        return [t.allocate(f"{name} masked gradient", shape, dtype, "temporary")]

    return Tensor(scores.storage, shape, dtype, t.node([edge(scores)], backward))


def _softmax(t: Tape, scores: Tensor, name: str) -> Tensor:
    """Keeps its output, and in old torch its input."""
    shape, dtype = scores.shape, scores.dtype

    def backward(node: Node, grads: list[Gradient]) -> list[Gradient]:
        return [t.allocate(f"{name} scores gradient", shape, dtype, "temporary")]

    node = t.node([edge(scores)], backward)
    t.save(node, *([scores.storage] if t.keeps_softmax_input else []))
    y = t.output(f"{name} probabilities", shape, dtype, node)
    t.save(node, y.storage)
    return y
