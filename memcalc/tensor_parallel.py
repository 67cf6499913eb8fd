"""Tensor parallel: what one rank computes of a model, and what the ranks that share it send each other.

A rank's part of a model is a model with fewer heads, a narrower MLP and fewer rows of vocabulary, so a family's blocks
stay as they are. They only say where the stream of tokens enters products whose columns are divided (``enter``) and
where it leaves products whose rows are (``leave``). With sequence parallel the stream between has a rank's share of the
tokens.

Two libraries do it. ``dtensor`` is torch's own (torch/distributed/tensor/parallel/style.py): collectives return new
tensors, and what was gathered is what a product keeps. ``megatron`` (NVIDIA/Megatron-LM megatron/core/tensor_parallel/
layers.py and mappings.py) reduces in place, keeps its share of the tokens and gathers it again in backward.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from memcalc.graph import Gradient, Node, Tensor
from memcalc.layout import Layout
from memcalc.ops import edge, linear
from memcalc.recorder import Storage
from memcalc.spec import Model
from memcalc.tape import Tape

if TYPE_CHECKING:
    from memcalc.plan import Plan

__all__ = ["column", "enter", "leave", "local", "share", "split_model"]


def share(whole: int, parts: int) -> int:
    """The largest part when ``whole`` is divided as evenly as whole numbers allow.

    >>> share(50257, 8)
    6283
    """
    return -(-whole // parts)


def split_model(model: Model, layout: Layout) -> Model:
    """The model of one rank: heads, MLP and vocabulary divided over tensor parallel, experts over theirs, its width whole.

    >>> from memcalc.models import MODELS
    >>> part = split_model(MODELS["llama-3-8b"], Layout(tensor=4))
    >>> part.heads, part.kv_heads, part.head_width, part.ffn, part.vocab
    (8, 2, 128, 3584, 32064)
    """
    degree = layout.tensor
    return dataclasses.replace(
        model,
        heads=model.heads // degree,
        kv_heads=model.kv_heads // degree,
        head_dim=model.head_width if degree > 1 else model.head_dim,
        ffn=model.ffn // degree,
        shared_ffn=model.shared_ffn // degree,
        vocab=share(model.vocab, degree),
        experts=model.experts // layout.expert,
        routed=model.experts if layout.expert > 1 else model.routed,
    )


def local(plan: Plan) -> Plan:
    """The plan as one rank's modules see it: its part of the model, its part of each sequence, nothing else divided.

    >>> from memcalc.models import MODELS
    >>> from memcalc.plan import Plan
    >>> plan = Plan(model=MODELS["llama-3-8b"], tokens=4096, micro_batch=1, ranks=8, layout=Layout(tensor=4, context=2))
    >>> local(plan).tokens, local(plan).model.heads
    (2048, 8)
    """
    layout = plan.layout
    if layout == Layout():
        return plan
    ranks = plan.data_parallel * layout.context if plan.strategy_row.parallel else 1
    return dataclasses.replace(
        plan,
        model=split_model(plan.model, layout),
        tokens=share(plan.tokens, layout.context),
        ranks=ranks,
        nodes=1,
        layout=Layout(),
        loss=dataclasses.replace(plan.loss, vocab_multiple=1),
    )


def enter(t: Tape, x: Tensor, name: str) -> Tensor:
    """The stream on its way into products whose columns are divided.

    Forward does nothing, or gathers all tokens; backward sums the ranks' gradients, or scatters the sum.
    """
    layout, shape, dtype = t.layout, x.shape, x.dtype
    if layout.tensor == 1 or (t.reduces_in_place and not layout.sequence):
        return x
    if not layout.sequence:

        def reduce(node: Node, grads: list[Gradient]) -> list[Gradient]:
            return [t.allocate(f"{name} reduced gradient", shape, dtype, "communication")]

        return Tensor(x.storage, shape, dtype, t.node([edge(x)], reduce))

    def scatter(node: Node, grads: list[Gradient]) -> list[Gradient]:
        ordered = [] if t.reduces_in_place else [t.allocate(f"{name} ordered", whole, dtype, "communication")]
        result = t.allocate(f"{name} scattered gradient", shape, dtype, "communication")
        del ordered
        return [result]

    whole = (shape[0] * layout.tensor, *shape[1:])
    node = t.node([edge(x)], scatter)
    return Tensor(_gathered(t, whole, dtype, name), whole, dtype, node)


def leave(t: Tape, x: Tensor, name: str) -> Tensor:
    """The stream on its way out of products whose rows are divided: each rank holds a part of the sum.

    Forward sums the parts, or scatters the sum; backward does nothing, or gathers all tokens.
    """
    layout, shape, dtype = t.layout, x.shape, x.dtype
    if layout.tensor == 1 or (t.reduces_in_place and not layout.sequence):
        return x
    if not layout.sequence:

        def same(node: Node, grads: list[Gradient]) -> list[Gradient]:
            return grads

        return _sent(t, shape, dtype, f"{name} reduced", t.node([edge(x)], same))

    def gather(node: Node, grads: list[Gradient]) -> list[Gradient]:
        return [_gathered(t, shape, dtype, f"{name} gradient")]

    part = (share(shape[0], layout.tensor), *shape[1:])
    node = t.node([edge(x)], gather)
    ordered = [] if t.reduces_in_place else [t.allocate(f"{name} ordered", shape, dtype, "communication")]
    y = _sent(t, part, dtype, f"{name} scattered", node)
    del ordered
    return y


def column(t: Tape, x: Tensor, name: str, weight: str | None = None, *, bias: bool = True) -> Tensor:
    """Megatron's column-parallel product of the stream: it keeps its share of the tokens, not all of them."""
    layout, shape, dtype = t.layout, x.shape, x.dtype
    if layout.tensor == 1 or not layout.sequence:
        return linear(t, x, name, weight, bias=bias)
    w = t.weights[weight or f"{name}.weight"]
    added = t.weights.get(f"{name}.bias") if bias else None
    whole = (shape[0] * layout.tensor, *shape[1:])

    def backward(node: Node, grads: list[Gradient]) -> list[Gradient]:
        again = _gathered(t, whole, dtype, f"{name} input again")
        full = t.allocate(f"{name} input gradient", whole, dtype, "temporary")
        part = t.allocate(f"{name} scattered gradient", shape, dtype, "communication")
        results: list[Gradient] = [part]
        for each in (w, added):
            if each is not None and each.trainable:
                results.append(t.allocate(f"{each.name} gradient", each.shape, dtype, "gradients", batched=False))
            elif each is not None:
                results.append(None)
        del again, full
        return results

    node = t.node([edge(x), w, *([added] if added else [])], backward)
    t.save(node, x.storage if w.trainable else None)
    gathered = _gathered(t, whole, dtype, f"{name} input")
    y = t.output(f"{name} output", (*whole[:-1], w.shape[0]), dtype, node)
    del gathered
    return y


def _gathered(t: Tape, whole: tuple[int, ...], dtype: str, name: str) -> Storage:
    """All ranks' tokens. torch gathers along the first dimension, which is the batch, and then puts tokens in order."""
    parts = [] if t.reduces_in_place else [t.allocate(f"{name} parts", whole, dtype, "communication")]
    result = t.allocate(f"{name} gathered", whole, dtype, "activations")
    del parts
    return result


def _sent(t: Tape, shape: tuple[int, ...], dtype: str, name: str, node: Node) -> Tensor:
    return Tensor(t.allocate(name, shape, dtype, "activations"), shape, dtype, node)
