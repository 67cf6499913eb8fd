"""Adapters and quantised weights on the tape: what stands in place of a linear layer.

Sources: peft/tuners/lora/layer.py (Linear.forward), litgpt/lora.py (LoRALinear), litgpt/adapter_v2.py
(AdapterV2Linear), bitsandbytes/autograd/_functions.py (MatMul4Bit, MatMul8bitLt) and
auto_gptq/nn_modules/triton_utils/dequant.py (QuantLinearFunction).
"""

from __future__ import annotations

from functools import partial

from memcalc import ops
from memcalc.adapters import Adapter
from memcalc.quantised import QUANTISED, scales_unpacked
from memcalc.recorder import Storage
from memcalc.spec import Weight
from memcalc.tape import Adapts, Gradient, Linear, Node, Tape, Tensor

__all__ = ["adapting"]


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
    dtype = result.dtype
    factor = t.dtype_of(t.weights[f"{name}.lora_A.weight"])
    x = ops.cast(t, x, factor, f"{name}.lora input")
    update = ops.scale(
        t,
        ops.plain_linear(
            t,
            ops.plain_linear(t, ops.dropout(t, x, f"{name}.lora dropout", adapter.dropout), f"{name}.lora_A"),
            f"{name}.lora_B",
        ),
        f"{name}.lora scaled",
    )
    result = ops.add(t, result, update, f"{name} with lora")
    del update
    return ops.cast(t, result, dtype, f"{name} with lora")


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
