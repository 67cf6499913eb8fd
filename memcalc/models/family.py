"""What a model family has to offer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from memcalc.graph import Tensor
from memcalc.recorder import Storage
from memcalc.spec import Model, Weight
from memcalc.tape import Tape

if TYPE_CHECKING:
    from memcalc.plan import Plan

__all__ = ["Block", "Family", "all_pairs", "causal_pairs", "every_token"]

Block = tuple[str, Callable[[Tensor], Tensor]]
"""A repeated part of the model: its name, and what it does to the residual stream."""


def every_token(model: Model, tokens: int, weight: Weight) -> float:
    """Each matrix multiplies every token of a sample."""
    return max(tokens, 1) if len(weight.shape) > 1 else 0


def causal_pairs(model: Model, tokens: int) -> tuple[int, int]:
    """Each layer attends once, under a causal mask."""
    return model.layers * tokens * tokens, 0


def all_pairs(model: Model, tokens: int) -> tuple[int, int]:
    """Each layer attends once, without a mask."""
    return 0, model.layers * tokens * tokens


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """One way to build a model; the numbers come from a Model."""

    name: str
    summary: str
    reads: str
    """What one sample is: ``tokens``, ``features`` or nothing that is known."""
    buffers: Callable[[Plan], list[tuple[str, tuple[int, ...], str]]] = lambda plan: []
    """Tensors that live between steps and are no parameters: name, shape, dtype."""
    divides: str = ""
    """How tensor parallel divides it, in words of ``memcalc.tensor_parallel``; blank where it cannot."""
    standing: Callable[[Tape, Plan], list[Storage]] = lambda t, plan: []
    """Buffers that live for the whole run and grow with the micro batch."""
    beside: Callable[[Tape, Plan], list[Storage]] = lambda t, plan: []
    """What else of a micro batch is on the device while its forward pass runs."""
    opaque: bool = False
    """Only its size is known: neither its tensors one by one nor its matrix products."""
    unplayed: bool = False
    """What it computes is not known, so that neither activations nor a loss are counted."""
    sequences: int = 1
    """Token sequences in one sample's input: two for an encoder and a decoder."""
    encodes: bool = False
    """Its first blocks are an encoder's, whose output the others take."""
    beside_tokens: Callable[[Model], tuple[int, ...]] = lambda model: ()
    """Shape of what one sample has beside its tokens, such as an image; empty where there is nothing."""
    convolves: bool = False
    """Most of its work is convolutions, which are played as oneDNN computes them on the CPU."""
    untrained: Callable[[Model], str] = lambda model: ""
    """What ``trainers/`` has no torch module for, in words that follow "cannot train"; blank when it has one."""
    drops: bool = True
    """It has dropout."""
    drops_shares: bool = True
    """Where it has dropout, attention has it, too."""
    written_out: bool = False
    """Attention is always written out, because no fused kernel can do it."""
    objective: str = "next"
    """What a token model learns to say: the ``next`` token of each, the ``masked`` ones, or how it goes on (``continue``)."""
    rows: Callable[[Model, int, Weight], float] = every_token
    """Rows of one sample that a weight multiplies in forward, by tokens; 0 for what is looked up or added."""
    pairs: Callable[[Model, int], tuple[int, int]] = causal_pairs
    """Query-key pairs of one sample over all layers, by tokens: under a causal mask, and without one."""
    assumption: str = ""
    """What the family takes for granted, in a sentence."""
    fields: tuple[str, ...]
    """Of a Model: those that it reads. A plan that says another is refused, because nobody would hear it."""
    check: Callable[[Model, Plan], None]
    """Raises PlanError when the numbers do not fit together."""
    weights: Callable[[Model], list[Weight]]
    """Every weight once, in the order of the torch module's parameters()."""
    enter: Callable[[Tape, Plan, Tensor], Tensor]
    """From inputs to what the first block takes."""
    between: Callable[[Tape, Plan, str, Tensor], Tensor] = lambda t, plan, name, x: x
    """What happens to the stream before the block of that name, outside of sharding and checkpoints."""
    blocks: Callable[[Tape, Plan], list[Block]]
    """The blocks in order; checkpointing and sharding work on these."""
    leave: Callable[[Tape, Plan, Tensor], Tensor]
    """From the last block to the tensor the loss is taken of."""
