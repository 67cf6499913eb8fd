"""Normalisation on the tape: LayerNorm and RMSNorm, as torch's kernels for CUDA and for the CPU do them."""

from __future__ import annotations

from memcalc.graph import Gradient, Node, Tensor
from memcalc.ops import cast, edge
from memcalc.recorder import Storage
from memcalc.tape import Tape

__all__ = ["layer_norm", "rms_norm"]


def layer_norm(t: Tape, x: Tensor, name: str) -> Tensor:
    """``F.layer_norm``: saves its input, mean and reciprocal deviation (float32, one each per row)."""
    w, bias = t.weights[f"{name}.weight"], t.weights.get(f"{name}.bias")
    if t.autocast and t.device == "cuda":  # in CUDA's float32 list (aten/src/ATen/autocast_mode.h), not in the CPU's
        x = cast(t, x, "float32", f"{name} input")
    shape, dtype = x.shape, x.dtype

    def backward(node: Node, grads: list[Gradient]) -> list[Gradient]:
        grad = t.allocate(f"{name} input gradient", shape, dtype, "temporary") if node.wants(0) else None
        results: list[Gradient] = [grad]
        for part in (w, bias):
            if part is not None and part.trainable:
                results.append(
                    t.allocate(f"{part.name} gradient", part.shape, t.weight_dtype, "gradients", batched=False)
                )
            elif part is not None:
                results.append(None)
        if w.trainable:
            sums = t.allocate(f"{name} partial sums", (2, shape[-1]), t.weight_dtype, "temporary", batched=False)
            del sums
        return results

    node = t.node([edge(x), w, *([bias] if bias else [])], backward)
    t.save(node, x.storage)
    y = t.output(f"{name} output", shape, dtype, node)
    stats = t.weight_dtype if t.device == "cpu" else "float32"
    t.save(node, *(t.allocate(f"{name} {part}", shape[:-1], stats, "activations") for part in ("mean", "rstd")))
    return y


def rms_norm(t: Tape, x: Tensor, name: str) -> Tensor:
    """One kernel, or a chain of small operations in float32: see ``Plan.rms_norm``."""
    if t.rms_norm == "fused":
        return _rms_norm_fused(t, x, name)
    return _rms_norm_composite(t, x, name, python=t.rms_norm == "python")


def _rms_norm_fused(t: Tape, x: Tensor, name: str) -> Tensor:
    """Saves its input and one float32 reciprocal per row."""
    w = t.weights[f"{name}.weight"]
    shape, dtype = x.shape, x.dtype

    def backward(node: Node, grads: list[Gradient]) -> list[Gradient]:
        grad = t.allocate(f"{name} input gradient", shape, dtype, "temporary")
        if not w.trainable:
            return [grad, None]
        return [grad, t.allocate(f"{w.name} gradient", w.shape, t.weight_dtype, "gradients", batched=False)]

    node = t.node([edge(x), w], backward)
    t.save(node, x.storage)
    y = t.output(f"{name} output", shape, dtype, node)
    t.save(node, t.allocate(f"{name} rstd", shape[:-1], "float32", "activations"))
    return y


def _rms_norm_composite(t: Tape, x: Tensor, name: str, *, python: bool) -> Tensor:
    """Keeps the input in float32, the reciprocal and the normalised input (aten/src/ATen/native/layer_norm.cpp).

    Written in ``python``, the normalised input goes back to the model's dtype before the product with the weight, which
    keeps it (transformers/models/llama/modeling_llama.py, LlamaRMSNorm).
    """
    w = t.weights[f"{name}.weight"]
    shape, rows, dtype = x.shape, (*x.shape[:-1], 1), x.dtype

    def wide(part: str) -> Storage:
        return t.allocate(f"{name} {part}", shape, "float32", "temporary")

    def narrow(part: str) -> Storage:
        return t.allocate(f"{name} {part}", rows, "float32", "temporary")

    def statistics_backward(node: Node, grads: list[Gradient]) -> list[Gradient]:
        grads.clear()
        mean = wide("mean gradient")
        power, scaled = wide("power"), wide("scaled power")
        result = wide("square gradient")
        del mean, power, scaled
        return [result]

    def normalise_backward(node: Node, grads: list[Gradient]) -> list[Gradient]:
        result, product = wide("input gradient"), wide("product")
        rstd = narrow("rstd gradient")
        del product
        return [result, rstd]

    def scale_backward(node: Node, grads: list[Gradient]) -> list[Gradient]:
        result = wide("normalised gradient")
        if not w.trainable:
            return [result, None]
        product = wide("product")
        grad = t.allocate(f"{w.name} gradient", w.shape, t.weight_dtype, "gradients", batched=False)
        del product
        return [result, grad]

    x = cast(t, x, "float32", f"{name} input")
    node = t.node([edge(x)], statistics_backward)
    t.save(node, x.storage)
    square = wide("square")
    mean = narrow("mean")
    rstd = Tensor(t.allocate(f"{name} rstd", rows, "float32", "activations"), rows, "float32", node)
    t.save(node, rstd.storage)
    del square, mean
    node = t.node([edge(x), edge(rstd)], normalise_backward)
    t.save(node, x.storage, rstd.storage)
    normalised = t.output(f"{name} normalised", shape, "float32", node)
    del rstd, x
    if python:
        return _scaled_in_python(t, normalised, dtype, name)
    node = t.node([edge(normalised), w], scale_backward)
    t.save(node, normalised.storage if w.trainable else None)
    y = t.output(f"{name} output", shape, "float32", node)
    del normalised
    return cast(t, y, dtype, f"{name} output")


def _scaled_in_python(t: Tape, normalised: Tensor, dtype: str, name: str) -> Tensor:
    """``weight * normalised.to(dtype)``; the float32 one lives as long as the call."""
    w = t.weights[f"{name}.weight"]
    x = cast(t, normalised, dtype, f"{name} normalised")
    shape = x.shape

    def backward(node: Node, grads: list[Gradient]) -> list[Gradient]:
        grad: Gradient = None
        if w.trainable:
            product = t.allocate(f"{name} product", shape, dtype, "temporary")
            grad = t.allocate(f"{w.name} gradient", w.shape, t.weight_dtype, "gradients", batched=False)
            del product
        return [grad, t.allocate(f"{name} normalised gradient", shape, dtype, "temporary")]

    node = t.node([w, edge(x)], backward)
    t.save(node, x.storage if w.trainable else None)
    return t.output(f"{name} output", shape, dtype, node)
