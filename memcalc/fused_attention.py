"""Attention by the kernels that make no scores, on the tape: flash and memory-efficient.

Shapes are ``[tokens, width]`` per sample; ``head`` is the width of one head. Sources:
aten/src/ATen/native/transformers (attention.cpp, cpu/FlashAttentionKernel.cpp, cuda/flash_attn/flash_api.cpp,
cuda/attention_backward.cu, cuda/mem_eff_attention/kernel_backward.h and kernels/generate_kernels.py).
"""

from __future__ import annotations

from memcalc.graph import Gradient, Node, Tensor
from memcalc.ops import edge
from memcalc.precision import DTYPE_BYTES
from memcalc.recorder import Storage
from memcalc.tape import Tape

__all__ = ["converted", "fused", "mask_bias", "mixed"]

# attention.cpp, pad_last_dim<8>: flash on CUDA takes heads of so many elements.
_PADDED_TO = 8
# attention.cpp, preprocess_mask.
_MASK_PADDED_TO = 16
# mem_eff_attention/kernel_backward.h: keys of one block; with fewer blocks than this, they are split (attention_backward.cu).
_BLOCK, _SPLITS = 64, 200


def mixed(q: Tensor, k: Tensor, v: Tensor) -> tuple[int, ...]:
    """The shape of what attention makes: as many heads as queries, each as wide as a value."""
    return (*q.shape[:-1], q.shape[-1] * v.shape[-1] // k.shape[-1])


def converted(t: Tape, x: Tensor, name: str, shape: tuple[int, ...] | None = None) -> Tensor:
    """A new tensor that keeps nothing of the old one: a copy in another layout, a scaling, repeated heads."""
    source, dtype = x.shape, x.dtype

    def backward(node: Node, grads: list[Gradient]) -> list[Gradient]:
        return [t.allocate(f"{name} gradient", source, dtype, "temporary")]

    return t.output(name, shape or source, dtype, t.node([edge(x)], backward))


def fused(
    t: Tape, q: Tensor, k: Tensor, v: Tensor, name: str, kind: str, heads: int, *, masked: bool = False
) -> Tensor:
    """Attention that keeps q, k, v, its output and one float32 logarithm per row and head."""
    head = q.shape[-1] // heads
    if kind == "flash" and t.device == "cuda" and head % _PADDED_TO:
        wide = -(-head // _PADDED_TO) * _PADDED_TO
        q, k, v = (
            converted(t, x, f"{name} padded {part}", shape=(x.shape[0], x.shape[-1] // head * wide))
            for x, part in zip((q, k, v), "qkv", strict=True)
        )
        y = _kernel(t, q, k, v, name, kind, heads)
        return converted(t, y, f"{name} heads joined", shape=(y.shape[0], heads * head))
    return _kernel(t, q, k, v, name, kind, heads, masked)


def _kernel(t: Tape, q: Tensor, k: Tensor, v: Tensor, name: str, kind: str, heads: int, masked: bool = False) -> Tensor:
    (tokens, width), keys = q.shape, k.shape[0]
    head, shapes, dtype = width // heads, [x.shape for x in (q, k, v)], q.dtype
    on_cpu, shape = t.device == "cpu", mixed(q, k, v)
    grouped = k.shape[-1] < width

    def backward(node: Node, grads: list[Gradient]) -> list[Gradient]:
        results: list[Gradient] = [
            t.allocate(f"{name} {part} gradient", part_shape, dtype, "temporary")
            for part, part_shape in zip("qkv", shapes, strict=True)
        ]
        if on_cpu:
            workspace = _cpu_backward(t, tokens, keys, dtype)
        elif kind == "flash":
            workspace = _flash_backward(t, tokens, keys, heads, head, dtype, grouped)
        else:
            workspace = _efficient_backward(t, tokens, keys, heads, head, shape, dtype)
        del workspace
        return results

    node = t.node([edge(q), edge(k), edge(v)], backward)
    t.save(node, q.storage, k.storage, v.storage)
    if masked:
        t.save(node, mask_bias(t, name, tokens, keys, dtype))
    rows = tokens if kind == "flash" else -(-tokens // 32) * 32

    def compute() -> list[Storage]:
        y = t.allocate(f"{name} attention", shape, dtype, "activations")
        logsumexp = t.allocate(f"{name} log-sum-exp", (heads, rows), "float32", "activations")
        workspace = _cpu_forward(t, tokens, keys, head, dtype) if on_cpu else []
        del workspace
        return [y, logsumexp]

    y, logsumexp = t.computed("attention", compute)
    t.save(node, y, logsumexp)
    return Tensor(y, shape, dtype, node)


def mask_bias(t: Tape, name: str, tokens: int, keys: int, dtype: str) -> Storage:
    """A mask of booleans as what is added to scores: one of each sample, as where() makes of a mask that is expanded over them
    (attention.cpp, convert_boolean_attn_mask), on CUDA padded to rows of a multiple of 16 (pad_bias)."""
    bias = t.allocate(f"{name} mask bias", (tokens, keys), dtype, "activations")
    if t.device == "cuda" and keys % _MASK_PADDED_TO:
        wide = -(-keys // _MASK_PADDED_TO) * _MASK_PADDED_TO
        bias = t.allocate(f"{name} mask bias, padded", (tokens, wide), dtype, "activations")
    return bias


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


def _flash_backward(t: Tape, tokens: int, keys: int, heads: int, head: int, dtype: str, grouped: bool) -> list[Storage]:
    """mha_bwd: row sums, a float32 accumulator of the query gradient, rows rounded to 128 and heads to 32, and of grouped
    queries the gradients of keys and values for every head, before they are summed."""
    rows, width = -(-tokens // 128) * 128, heads * -(-head // 32) * 32
    buffers = [
        t.allocate("attention row sums", (heads, rows), "float32", "temporary"),
        t.allocate("attention query accumulator", (rows, width), "float32", "temporary"),
    ]
    if grouped:
        buffers += [
            t.allocate(f"attention {part} gradient of every head", (keys, heads * head), dtype, "temporary")
            for part in ("key", "value")
        ]
    return buffers


def _efficient_backward(
    t: Tape, tokens: int, keys: int, heads: int, head: int, shape: tuple[int, ...], dtype: str
) -> list[Storage]:
    """_efficient_attention_backward: row sums, in float32 made of a product as large as the output, and a workspace in
    tiles, for the query gradient and, where no registers hold them, for those of keys and values. Which tiles a card takes
    depends on its shared memory: counted are the largest."""
    half = DTYPE_BYTES[dtype] == 2
    if not half:
        product = t.allocate("attention output times gradient", shape, "float32", "temporary")
        sums = t.allocate("attention row sums", (heads, tokens), "float32", "temporary")
        del product
        row_sums = t.allocate("attention row sums in order", (heads, tokens), "float32", "temporary")
        del sums
    else:
        row_sums = t.allocate("attention row sums", (heads, tokens), "float32", "temporary")
    rows = 2 * _BLOCK if head > _BLOCK else _BLOCK
    columns = -(-head // _BLOCK) * _BLOCK
    tiles = -(-tokens // rows) * (columns // _BLOCK)
    # Each tile has a lock and a counter, padded to 128 bits (GradQTempStorage).
    buffers = [row_sums, t.allocate(
        "attention query accumulator", (heads, tiles * (rows * _BLOCK + 4)), "float32", "temporary"
    )]  # fmt: skip
    if not half or head > _BLOCK:
        tile = _BLOCK * -(-head // rows) * rows
        splits = max(_SPLITS - max(heads, _SPLITS // -(-keys // _BLOCK)), 0)  # the most of any micro batch
        for part in ("key", "value"):
            buffers.append(t.allocate(f"attention {part} accumulator", (heads, tile), "float32", "temporary"))
            buffers.append(
                t.allocate(
                    f"attention {part} accumulator, split", (splits, tile), "float32", "temporary", batched=False
                )
            )
    return buffers
