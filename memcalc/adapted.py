"""Adapters and quantised weights on the tape: what stands in place of a linear layer.

Sources: peft/tuners/lora/layer.py (Linear.forward), litgpt/lora.py (LoRALinear), litgpt/adapter_v2.py
(AdapterV2Linear), litgpt/adapter.py (CausalSelfAttention), bitsandbytes/autograd/_functions.py (MatMul4Bit, MatMul8bitLt) and
auto_gptq/nn_modules/triton_utils/dequant.py (QuantLinearFunction).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from memcalc import ops
from memcalc.adapters import PROMPT, Adapter
from memcalc.graph import Gradient, Node, Tensor
from memcalc.quantised import QUANTISED, scales_unpacked
from memcalc.recorder import Storage
from memcalc.spec import Weight
from memcalc.tape import Adapts, Linear, Tape

__all__ = ["adapting", "prompting"]


FUSED = ("qkv_proj", "c_attn", "query_key_value", "qkv")
"""Leaf names of layers that make queries, keys and values in one product."""


def adapting(adapter: Adapter) -> Adapts | None:
    """The wrapper that a plan's adapter puts around each linear layer; None without an adapter."""
    return partial(_layer, adapter) if adapter.freezes else None


def _layer(adapter: Adapter, t: Tape, x: Tensor, name: str, plain: Linear) -> Tensor:
    w = t.weights.get(f"{name}.weight")
    base = plain
    if w is not None and w.dtype in QUANTISED:
        base = partial(_quantised, adapter, t, w)
    if f"{name}.lora_A.weight" in t.weights:
        return _lora(adapter, t, x, name, base)
    if f"{name}.adapter_scale" in t.weights:
        return _scaled(t, base(x), name)
    return base(x)


def _lora(adapter: Adapter, t: Tape, x: Tensor, name: str, base: Linear) -> Tensor:
    """``base(x) + B(A(dropout(x))) * scaling``, the factors in a dtype of their own."""
    result = base(x)
    if adapter.fused and name.rsplit(".", 1)[-1] == "down_proj":
        del x
        return _recomputed(t, result, name)
    dtype = result.dtype
    factor = t.dtype_of(t.weights[f"{name}.lora_A.weight"])
    # Under autocast, PEFT leaves the input of quantised layers as it is (peft/tuners/lora/bnb.py, requires_conversion).
    # Fused, the input is taken as it comes (unsloth/kernels/fast_lora.py, LoRA_QKV and LoRA_W).
    if not adapter.fused and not (adapter.autocast and adapter.quantize != "none"):
        x = ops.cast(t, x, factor, f"{name}.lora input")
    x = ops.dropout(t, x, f"{name}.lora dropout", adapter.dropout)
    if adapter.autocast or adapter.fused:
        x = ops.cast(t, x, t.compute_dtype, f"{name}.lora input")
    update = ops.plain_linear(t, x, f"{name}.lora_A")
    del x
    update = ops.plain_linear(t, update, f"{name}.lora_B")
    if adapter.scattered and name.rsplit(".", 1)[-1] in FUSED:
        update = _in_place(t, update, f"{name}.lora in its place")
    update = ops.scale(t, update, f"{name}.lora scaled")
    result = ops.add(t, result, update, f"{name} with lora")
    del update
    return ops.cast(t, result, dtype, f"{name} with lora")


def _recomputed(t: Tape, y: Tensor, name: str) -> Tensor:
    """LoRA of a fused MLP's last layer, which adds to its output in place and makes its input again in backward, over
    what the MLP keeps (unsloth/kernels/fast_lora.py, LoRA_MLP)."""
    factors = [t.weights[f"{name}.lora_{part}.weight"] for part in "AB"]

    def backward(node: Node, grads: list[Gradient]) -> list[Gradient]:
        made = [t.allocate(f"{w.name} gradient", w.shape, t.dtype_of(w), "gradients", batched=False) for w in factors]
        return [grads[0], *made]

    return Tensor(y.storage, y.shape, y.dtype, t.node([ops.edge(y), *factors], backward))


def _in_place(t: Tape, update: Tensor, name: str) -> Tensor:
    """Zeros for all outputs, and a copy of them with LoRA's of queries and values put in: index_copy keeps those.

    Its gradient is spread to the shape of its source, for which torch saves the source (tools/autograd/derivatives.yaml,
    index_copy; litgpt/lora.py, zero_pad). Queries and values are counted as two thirds of the outputs, as they are with
    as many heads for keys.
    """
    shape, dtype = update.shape, update.dtype
    kept = (*shape[:-1], 2 * shape[-1] // 3)

    def backward(node: Node, grads: list[Gradient]) -> list[Gradient]:
        return [t.allocate(f"{name} gradient", kept, dtype, "temporary")]

    source = t.allocate(f"{name} source", kept, dtype, "activations")
    zeros = t.allocate(f"{name} zeros", shape, dtype, "temporary")
    node = t.node([ops.edge(update)], backward)
    t.save(node, source)
    found = t.output(name, shape, dtype, node)
    del zeros, source
    return found


def _scaled(t: Tape, y: Tensor, name: str) -> Tensor:
    """``scale * (y + bias)``: keeps the sum, for the scale's gradient."""
    shape, dtype = y.shape, y.dtype
    scale, bias = t.weights[f"{name}.adapter_scale"], t.weights[f"{name}.adapter_bias"]

    def small(w: Weight) -> Storage:
        return t.allocate(f"{w.name} gradient", w.shape, t.dtype_of(w), "gradients", batched=False)

    def bias_backward(node: Node, grads: list[Gradient]) -> list[Gradient]:
        return [grads[0], small(bias)]

    def scale_backward(node: Node, grads: list[Gradient]) -> list[Gradient]:
        product = t.allocate(f"{name} scale product", shape, dtype, "temporary")
        grad = small(scale)
        del product
        return [grad, t.allocate(f"{name} shifted gradient", shape, dtype, "temporary")]

    node = t.node([ops.edge(y), bias], bias_backward)
    shifted = t.output(f"{name} shifted", shape, dtype, node)
    del y
    node = t.node([scale, ops.edge(shifted)], scale_backward)
    t.save(node, shifted.storage)
    return t.output(f"{name} scaled", shape, dtype, node)


def _quantised(adapter: Adapter, t: Tape, w: Weight, x: Tensor) -> Tensor:
    """The product with a matrix that is unpacked to 16 bit for it, in forward (but int8) and again in backward.

    What bitsandbytes keeps it keeps as attributes of its context.
    """
    name = w.name.removesuffix(".weight")
    shape, dtype = x.shape, x.dtype

    def unpack() -> Storage:
        size = scales_unpacked(w.dtype, w.shape)
        scales = t.allocate(f"{name} unpacked scales", (size,), "uint8", "temporary", batched=False) if size else None
        full = t.allocate(f"{name} unpacked", w.shape, t.compute_dtype, "temporary", batched=False)
        del scales
        return full

    def backward(node: Node, grads: list[Gradient]) -> list[Gradient]:
        full = unpack()
        grad = t.allocate(f"{name} input gradient", shape, dtype, "temporary")
        del full
        return [grad]

    x = ops.cast(t, x, t.compute_dtype, f"{name} input")
    node = t.node([ops.edge(x)], backward)
    if adapter.quantized_saves_input or w.dtype == "int8":
        t.hold(node, x.storage)
    out = (*shape[:-1], w.shape[0])
    if w.dtype == "int8":  # of the input in 8 bit, into int32
        packed = t.allocate(f"{name} input in 8 bit", shape, "uint8", "temporary")
        product = t.allocate(f"{name} product in int32", out, "float32", "temporary")
        if adapter.quantized_saves_input:
            t.hold(node, t.allocate(f"{name} transposed input in 8 bit", shape, "uint8", "activations"))
        del packed
        y = t.output(f"{name} output", out, dtype, node)
        del product
        return y
    full = unpack()
    y = t.output(f"{name} output", out, dtype, node)
    del full
    return y


def prompting(adapter: Adapter, heads: int) -> Callable[[Tape, Tensor, Tensor, str], Tensor] | None:
    """What LLaMA-Adapter adds to attention: the queries' attention to a learned prompt, times a gate for each head."""
    return partial(_prompted, heads) if adapter.kind in ("adapter", "adapter-v2") else None


def _prompted(heads: int, t: Tape, q: Tensor, y: Tensor, name: str) -> Tensor:
    """``y + gate * attention(q, prompt)``: keeps what the second attention keeps, and its output once more for the gate.

    A mask of ones makes scaled_dot_product_attention take the memory-efficient kernel.
    """
    block = name.rpartition(".")[0]
    if f"{block}.adapter_wte" not in t.weights:
        return y
    prompt, gate = t.weights[f"{block}.adapter_wte"], t.weights[f"{block}.gating_factor"]
    shape, dtype, keys = q.shape, q.dtype, (PROMPT, 3 * q.shape[1])

    def wide(part: str) -> Storage:
        return t.allocate(f"{name} {part}", shape, dtype, "temporary")

    def small(w: Weight) -> Storage:
        return t.allocate(f"{w.name} gradient", w.shape, t.dtype_of(w), "gradients", batched=False)

    def prompt_backward(node: Node, grads: list[Gradient]) -> list[Gradient]:
        return [small(prompt)]

    def attention_backward(node: Node, grads: list[Gradient]) -> list[Gradient]:
        query = wide("gradient of the queries to the prompt") if node.wants(0) else None
        return [query, t.allocate(f"{name} prompt keys gradient", keys, dtype, "temporary", batched=False)]

    def gate_backward(node: Node, grads: list[Gradient]) -> list[Gradient]:
        product = wide("gate product")
        grad = small(gate)
        del product
        return [grad, wide("prompt attention gradient")]

    said = Tensor(
        t.allocate(f"{name} prompt keys", keys, dtype, "activations", batched=False), keys, dtype,
        t.node([prompt], prompt_backward), batched=False,
    )  # fmt: skip
    node = t.node([ops.edge(q), ops.edge(said)], attention_backward)
    t.save(node, q.storage, said.storage)
    heard = t.output(f"{name} prompt attention", shape, dtype, node)
    t.save(node, heard.storage, t.allocate(f"{name} prompt log-sum-exp", (heads, shape[0]), "float32", "activations"))
    del said
    node = t.node([gate, ops.edge(heard)], gate_backward)
    t.save(node, heard.storage)
    gated = t.output(f"{name} gated", shape, dtype, node)
    del heard
    return ops.add(t, y, gated, f"{name} with prompt")
