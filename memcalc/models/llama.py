"""Llama on the tape, nearly line by line ``trainers/models/llama.py`` (Touvron et al. 2023), and its nearest relatives.

Of the options of the family ``decoder`` it has those that its torch twin runs: biases of query, key and value (Qwen 2),
norms of query and key (Qwen 3), a width of its own for a head, one product for all three, and a tied head.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from memcalc.errors import PlanError
from memcalc.models import decoder
from memcalc.models.checks import causal_mask
from memcalc.models.family import Family
from memcalc.spec import Model, Weight

if TYPE_CHECKING:
    from memcalc.plan import Plan

__all__ = ["LLAMA"]

_OF_DECODERS = (
    "norm", "activation", "positions", "rotary_dim", "side_by_side", "post_norm", "embedding_norm", "scaled", "capped",
)  # fmt: skip


def check(model: Model, plan: Plan) -> None:
    blank = {field.name: field.default for field in dataclasses.fields(Model)}
    for field in _OF_DECODERS:
        if getattr(model, field) != blank[field]:
            raise PlanError(
                f"model {model.name}: {field.replace('_', ' ')} is for the family decoder, not {model.family}"
            )
    for part in model.biases:
        if part != "qkv":
            raise PlanError(
                f"model {model.name}: a bias of {part} is for the family decoder; {model.family} has only qkv"
            )
    decoder.check(model, plan)


def weights(model: Model) -> list[Weight]:
    """Nine tensors a block, no biases, a head of its own; more or fewer by option.

    >>> from memcalc.models import MODELS
    >>> sum(weight.numel for weight in weights(MODELS["llama-3-8b"]))
    8030261248
    """
    return decoder.weights(model)


LLAMA = Family(
    name="llama",
    summary="Llama: rotary positions, RMSNorm, grouped queries, SwiGLU; also Mistral, Qwen 2 and 3 (biases, norms of q and k)",
    reads="tokens",
    divides="dtensor",
    check=check,
    buffers=causal_mask,
    weights=weights,
    rows=decoder.rows,
    enter=decoder.enter,
    blocks=decoder.blocks,
    leave=decoder.leave,
)
