"""Attention on the tape, one function per kernel that scaled_dot_product_attention may take.

Shapes are ``[tokens, width]`` per sample; ``head`` is the width of one head. Sources:
aten/src/ATen/native/transformers (attention.cpp, cpu/FlashAttentionKernel.cpp, cuda/flash_attn/flash_api.cpp,
cuda/attention_backward.cu) and Korthikanti et al. 2022 for the written-out form.
"""

from __future__ import annotations

from functools import partial

from memcalc.context_parallel import ring_attention
from memcalc.graph import Gradient, Node, Tensor
from memcalc.ops import cast, edge, soft_cap
from memcalc.ops import dropout as drop
from memcalc.precision import DTYPE_BYTES
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
) -> Tensor:
    """``softmax(q kᵀ) v`` by the kernel ``kind``; key/value heads may be fewer than ``heads``, and keys of other tokens.

    Written out, the softmax may be ``wide``, of float32, or a model's own (memcalc/softmaxes.py), and the scores ``capped`` by tanh. Fewer key/value heads are
    copied with ``repeat``, and for every kernel but flash, which alone takes them as they are.
    """
    run = partial(
        _attention, t, name=name, kind=kind, heads=heads, dropout=dropout, causal=causal, repeat=repeat, wide=wide,
        softmax=softmax, capped=capped,
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
) -> Tensor:
    if k.shape[-1] != q.shape[-1] and (repeat or kind != "flash"):
        k, v = (_convert(t, x, f"{name} repeated heads", shape=(x.shape[0], q.shape[-1])) for x in (k, v))
    if t.layout.context > 1:
        return ring_attention(t, q, k, v, name, heads=heads)
    if kind in ("flash", "efficient"):
        return _fused(t, q, k, v, name, kind, heads)
    if kind == "eager":
        mix = _eager(t, q, k, v, name, heads, dropout, causal, wide, softmax, capped)
    else:
        mix = _math(t, q, k, v, name, heads, dropout, causal)
    return _convert(t, mix, f"{name} heads joined")


def _mixed(q: Tensor, k: Tensor, v: Tensor) -> tuple[int, ...]:
    """The shape of what attention makes: as many heads as queries, each as wide as a value."""
    return (*q.shape[:-1], q.shape[-1] * v.shape[-1] // k.shape[-1])


def _fused(t: Tape, q: Tensor, k: Tensor, v: Tensor, name: str, kind: str, heads: int) -> Tensor:
    """Keeps q, k, v, the output and one float32 logarithm per row and head."""
    (tokens, width), keys = q.shape, k.shape[0]
    head, shapes, dtype = width // heads, [x.shape for x in (q, k, v)], q.dtype
    on_cpu = t.device == "cpu"

    def backward(node: Node, grads: list[Gradient]) -> list[Gradient]:
        results: list[Gradient] = [
            t.allocate(f"{name} {part} gradient", shape, dtype, "temporary")
            for part, shape in zip("qkv", shapes, strict=True)
        ]
        workspace = _cpu_backward(t, tokens, keys, dtype) if on_cpu else _cuda_backward(t, tokens, heads, head, kind)
        del workspace
        return results

    node = t.node([edge(q), edge(k), edge(v)], backward)
    t.save(node, q.storage, k.storage, v.storage)
    rows = tokens if kind == "flash" else -(-tokens // 32) * 32
    shape = _mixed(q, k, v)

    def compute() -> list[Storage]:
        y = t.allocate(f"{name} attention", shape, dtype, "activations")
        logsumexp = t.allocate(f"{name} log-sum-exp", (heads, rows), "float32", "activations")
        workspace = _cpu_forward(t, tokens, keys, head, dtype) if on_cpu else []
        del workspace
        return [y, logsumexp]

    y, logsumexp = t.computed("attention", compute)
    t.save(node, y, logsumexp)
    return Tensor(y, shape, dtype, node)


def _cpu_blocks(tokens: int, keys: int) -> tuple[int, int]:
    """Rows of queries and of keys one thread works on (cpu/FlashAttentionKernel.cpp)."""
    rows = 256 if tokens >= 768 else 64 if tokens >= 192 else 32
    return min(rows, tokens), min(512, keys)


def _scratch(t: Tape, elements: int, dtype: str) -> Storage:
    return t.allocate("attention workspace", (elements,), dtype, "temporary", batched=False)


def _cpu_forward(t: Tape, tokens: int, keys: int, head: int, dtype: str) -> list[Storage]:
    """Scores, maxima, sums and output of the block each thread works on; ranks run one thread."""
    rows, keys = _cpu_blocks(tokens, keys)
    buffers = [_scratch(t, rows * keys + 2 * rows + rows * head, "float32")]
    return buffers if DTYPE_BYTES[dtype] == 4 else [*buffers, _scratch(t, rows * keys, dtype)]


def _cpu_backward(t: Tape, tokens: int, keys: int, dtype: str) -> list[Storage]:
    rows, keys = _cpu_blocks(tokens, keys)
    buffers = [_scratch(t, 2 * rows * keys, "float32"), _scratch(t, rows, "float32")]
    return buffers if DTYPE_BYTES[dtype] == 4 else [*buffers, _scratch(t, 2 * rows * keys, dtype)]


def _cuda_backward(t: Tape, tokens: int, heads: int, head: int, kind: str) -> list[Storage]:
    """Flash keeps a float32 accumulator of the query gradient, rows rounded to 128 and heads to 32."""
    rows = -(-tokens // 128) * 128
    delta = t.allocate("attention row sums", (heads, rows if kind == "flash" else tokens), "float32", "temporary")
    if kind != "flash":
        return [delta]
    width = heads * -(-head // 32) * 32
    return [delta, t.allocate("attention query accumulator", (rows, width), "float32", "temporary")]


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
    shape = _mixed(q, k, v)
    left = _convert(t, _convert(t, q, f"{name} scaled query"), f"{name} query copy")
    scores = _product(t, left, _convert(t, k, f"{name} key copy"), _scores_shape(q, k, heads), f"{name} scores")
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
    return _product(t, probabilities, _convert(t, v, f"{name} value copy"), shape, f"{name} mix")


def _scores_shape(q: Tensor, k: Tensor, heads: int) -> tuple[int, int, int]:
    return heads, q.shape[0], k.shape[0]


def biased_attention(
    t: Tape, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, name: str, *, heads: int, dropout: float
) -> Tensor:
    """Written out with a bias added to the scores, no scaling and a float32 softmax: ``trainers/models/t5.py``."""
    left, right = _convert(t, q, f"{name} query copy"), _convert(t, k, f"{name} key copy")
    scores = _product(t, left, right, _scores_shape(q, k, heads), f"{name} scores")
    del left, right
    if bias is not None:
        scores = _biased(t, scores, bias, name)
    low = scores.dtype
    shares = cast(t, _softmax(t, cast(t, scores, "float32", f"{name} scores"), name), low, f"{name} shares")
    del scores
    shares = drop(t, shares, f"{name} attention dropout", dropout)
    mix = _product(t, shares, _convert(t, v, f"{name} value copy"), q.shape, f"{name} mix")
    del shares
    return _convert(t, mix, f"{name} heads joined")


def _biased(t: Tape, scores: Tensor, bias: Tensor, name: str) -> Tensor:
    """``scores += bias`` in place: the gradient of the bias is a sum over the batch."""
    shape, dtype = bias.shape, bias.dtype

    def backward(node: Node, grads: list[Gradient]) -> list[Gradient]:
        if not node.wants(1):
            return [grads[0], None]
        return [grads[0], t.allocate(f"{name} bias gradient", shape, dtype, "temporary", batched=False)]

    return Tensor(scores.storage, scores.shape, scores.dtype, t.node([edge(scores), edge(bias)], backward))


def _math(t: Tape, q: Tensor, k: Tensor, v: Tensor, name: str, heads: int, dropout: float, causal: bool) -> Tensor:
    """``_scaled_dot_product_attention_math``: 16-bit inputs are computed in float32."""
    tokens, low, shape = q.shape[0], q.dtype, _mixed(q, k, v)
    q, k, v = (cast(t, x, "float32", f"{name} {part}") for x, part in zip((q, k, v), "qkv", strict=True))
    scaled = _convert(t, q, f"{name} scaled query")
    bias = _causal_bias(t, name, tokens) if causal else None
    left, right = (
        _convert(t, scaled, f"{name} query copy"),
        _convert(t, _convert(t, k, f"{name} scaled key"), f"{name} key copy"),
    )
    scores = _product(t, left, right, _scores_shape(q, k, heads), f"{name} scores")
    del scaled, left, right
    probabilities = _softmax(t, scores, name)
    empty_rows = t.allocate(f"{name} rows without keys", scores.shape, "bool", "temporary")
    del empty_rows, scores
    probabilities = drop(t, probabilities, f"{name} attention dropout", dropout)
    mix = _product(t, probabilities, _convert(t, v, f"{name} value copy"), shape, f"{name} mix")
    del bias
    return cast(t, mix, low, f"{name} mix")


def _causal_bias(t: Tape, name: str, tokens: int) -> Storage:
    ones = t.allocate(f"{name} ones", (tokens, tokens), "bool", "temporary", batched=False)
    mask = t.allocate(f"{name} causal mask", (tokens, tokens), "bool", "temporary", batched=False)
    del ones
    bias = t.allocate(f"{name} mask bias", (tokens, tokens), "float32", "temporary", batched=False)
    del mask
    return bias


def _convert(t: Tape, x: Tensor, name: str, shape: tuple[int, ...] | None = None) -> Tensor:
    """A new tensor that keeps nothing of the old one: a copy in another layout, a scaling, repeated heads."""
    source, dtype = x.shape, x.dtype

    def backward(node: Node, grads: list[Gradient]) -> list[Gradient]:
        return [t.allocate(f"{name} gradient", source, dtype, "temporary")]

    return t.output(name, shape or source, dtype, t.node([edge(x)], backward))


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
