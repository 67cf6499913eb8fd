"""Scores on their way into attention's softmax, where a model's own code keeps more of them than the softmax itself."""

from __future__ import annotations

from memcalc.graph import Gradient, Node, Tensor
from memcalc.ops import cast, edge
from memcalc.tape import Tape

__all__ = ["clamped", "scripted_softmax"]


def clamped(t: Tape, scores: Tensor, name: str) -> Tensor:
    """``torch.max(scores, lowest)``, which keeps the scores; backward halves the gradient where both are equal.

    Source: transformers/models/opt/modeling_opt.py up to 4.49, OPTAttention; maximum in tools/autograd/derivatives.yaml.
    """
    shape, dtype = scores.shape, scores.dtype

    def backward(node: Node, grads: list[Gradient]) -> list[Gradient]:
        half = t.allocate(f"{name} half of the gradient", shape, dtype, "temporary")
        equal = t.allocate(f"{name} equal scores", shape, "bool", "temporary")
        gradient = t.allocate(f"{name} clamped gradient", shape, dtype, "temporary")
        less = t.allocate(f"{name} lower scores", shape, "bool", "temporary")
        del half, equal, less  # all of one expression
        return [gradient]

    node = t.node([edge(scores)], backward)
    t.save(node, scores.storage)
    return t.output(f"{name} clamped scores", shape, dtype, node)


def scripted_softmax(t: Tape, scores: Tensor, name: str) -> Tensor:
    """``softmax(where(mask, scores.to(float32) * scale, mask_value)).to(scores.dtype)`` in one TorchScript function.

    Source: transformers/models/gpt_bigcode/modeling_gpt_bigcode.py, upcast_masked_softmax (``@torch.jit.script``), and
    what torch/csrc/jit/runtime/symbolic_script.cpp makes of its operations. The function is one node of autograd: all
    that it keeps, and the gradient it was given, stay until the last of its backward is done. Kept are the softmax and
    what went into it: its backward reads ``self.dtype``, and so has to have ``self``. The backward of ``where``
    multiplies by the mask in float32 (``mask.type_as(grad_output)``).
    """
    low = scores.dtype
    scores = cast(t, scores, "float32", f"{name} scores")
    shape = scores.shape

    def backward(node: Node, grads: list[Gradient]) -> list[Gradient]:
        of_masked = t.allocate(f"{name} masked scores gradient", shape, "float32", "temporary")
        mask = t.allocate(f"{name} float32 mask", shape[1:], "float32", "temporary")
        of_scaled = t.allocate(f"{name} scaled scores gradient", shape, "float32", "temporary")
        del of_masked, mask
        of_scores = t.allocate(f"{name} scores gradient", shape, "float32", "temporary")
        del of_scaled
        return [of_scores]

    node = t.node([edge(scores)], backward)
    scaled = t.allocate(f"{name} scaled scores", shape, "float32", "temporary")
    masked = t.allocate(f"{name} masked scores", shape, "float32", "activations")
    del scaled
    shares = t.output(f"{name} probabilities", shape, "float32", node)
    t.save(node, masked, shares.storage)
    del masked, scores
    return cast(t, shares, low, f"{name} shares")
