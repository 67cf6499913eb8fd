"""Llama on the tape, nearly line by line ``trainers/models/llama.py`` (Touvron et al. 2023), and its nearest relatives.

Of the options of the family ``decoder`` it has those that its torch twin runs: biases of query, key and value (Qwen 2),
norms of query and key (Qwen 3), a width of its own for a head, one product for all three, and a tied head.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from memcalc.errors import PlanError
from memcalc.models import decoder, decoder_weights
from memcalc.models.checks import causal_mask, no_dropout
from memcalc.models.family import Family
from memcalc.spec import Model, Weight

if TYPE_CHECKING:
    from memcalc.plan import Plan

__all__ = ["FIELDS", "LLAMA", "has_biases"]

FIELDS = (
    "layers", "hidden", "heads", "kv_heads", "head_dim", "ffn", "vocab", "context", "tied", "biases", "fused_qkv", "qk_norm",
    "window",
)  # fmt: skip


def check(model: Model, plan: Plan) -> None:
    has_biases(model, ("qkv",))
    no_dropout(model, plan)
    decoder.check(model, plan)


def has_biases(model: Model, biased: tuple[str, ...]) -> None:
    """No other parts than those have a bias."""
    for part in model.biases:
        if part not in biased:
            raise PlanError(
                f"model {model.name}: a bias of {part} is for the family decoder; {model.family} has only "
                f"{' and '.join(biased)}"
            )


def weights(model: Model) -> list[Weight]:
    """Nine tensors a block, no biases, a head of its own; more or fewer by option.

    >>> from memcalc.models import MODELS
    >>> sum(weight.numel for weight in weights(MODELS["llama-3-8b"]))
    8030261248
    """
    return decoder_weights.weights(model)


LLAMA = Family(
    name="llama",
    summary="Llama: rotary positions, RMSNorm, grouped queries, SwiGLU; also Mistral, Qwen 2 and 3 (biases, norms of q and k)",
    reads="tokens",
    drops=False,
    divides="dtensor",
    fields=FIELDS,
    check=check,
    buffers=causal_mask,
    weights=weights,
    rows=decoder.rows,
    enter=decoder.enter,
    blocks=decoder.blocks,
    leave=decoder.leave,
)
