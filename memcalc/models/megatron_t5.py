"""Megatron's T5 on the tape: its blocks as in ``memcalc/models/megatron.py``, decoder blocks with attention to the encoder.

Source: NVIDIA/Megatron-LM megatron/core/models/T5/t5_model.py. Unlike T5, it has learned positions, LayerNorm and biases,
and a bias of its tied head. Encoder and decoder blocks stand in one list, as in ``memcalc/models/t5.py``.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import TYPE_CHECKING

from memcalc.errors import PlanError
from memcalc.graph import Tensor
from memcalc.megatron import bias_dropout_add
from memcalc.models import megatron
from memcalc.models.checks import positive
from memcalc.models.family import Block
from memcalc.recorder import Storage
from memcalc.spec import HEAD, Model, Weight
from memcalc.tape import Tape
from memcalc.tensor_parallel import column

if TYPE_CHECKING:
    from memcalc.plan import Plan

__all__ = ["MEGATRON_T5"]


def check(model: Model, plan: Plan) -> None:
    positive(model, "decoder_layers")
    megatron.check(model, plan)
    if model.positions not in ("", "learned"):
        raise PlanError(f"model {model.name}: Megatron's T5 has learned positions, not {model.positions}")
    if plan.reentrant or plan.checkpoint_every:
        raise PlanError("checkpoints: decoder blocks of Megatron's T5 take two streams; leave --checkpoint-every out")
    if plan.layout.context > 1:
        raise PlanError(f"context parallel {plan.layout.context}: Megatron's T5 has sequences of two lengths")
    if plan.layout.sequence and decoder_tokens(plan) % plan.layout.tensor:
        raise PlanError(f"{decoder_tokens(plan)} tokens of the decoder do not divide over {plan.layout.tensor} ranks")


def decoder_tokens(plan: Plan) -> int:
    return plan.model.decoder_tokens or plan.tokens


def weights(model: Model) -> list[Weight]:
    """One token table and one of positions for both sides; the head is the token table with a bias.

    >>> t5 = Model(
    ...     name="t5", family="megatron-t5", layers=12, decoder_layers=12, hidden=768, heads=12, kv_heads=12, ffn=3072,
    ...     vocab=29184, context=512, biases=("qkv", "out", "mlp"), tied=True,
    ... )
    >>> sum(weight.numel for weight in weights(t5))
    221314560
    """
    found = megatron.table_weights(model)
    for layer in range(model.layers):
        found += megatron.block_weights(model, f"layers.{layer}")
    for layer in range(model.layers, model.layers + model.decoder_layers):
        found += megatron.block_weights(model, f"layers.{layer}", cross=True)
    for side in ("encoder", "decoder"):
        found += megatron.norm_weights(model, f"{side}.final_layernorm", HEAD)
    if not model.tied:
        return [*found, Weight("output_layer.weight", (model.vocab, model.hidden), HEAD)]
    return [*found, Weight("output_layer.bias", (model.vocab,), HEAD)]


def pairs(model: Model, tokens: int) -> tuple[int, int]:
    """Decoder blocks attend to themselves and to the encoder."""
    short = model.decoder_tokens or tokens
    return 0, model.layers * tokens**2 + model.decoder_layers * (short**2 + short * tokens)


def beside(t: Tape, plan: Plan) -> list[Storage]:
    """Masks of the encoder, of the decoder, and of the decoder's queries to the encoder (pretrain_t5.py, get_batch)."""
    long, short = plan.tokens, decoder_tokens(plan)
    return [
        t.allocate("attention mask", shape, "bool", "inputs") for shape in ((long,) * 2, (short,) * 2, (short, long))
    ]


def enter(t: Tape, plan: Plan, ids: Tensor) -> Tensor:
    words = Tensor(ids.storage, (decoder_tokens(plan),), ids.dtype, None)
    t.shared = {"encoder": {}, "decoder": {"ids": words}}
    return megatron.enter(t, plan, Tensor(ids.storage, (plan.tokens,), ids.dtype, None))


def between(t: Tape, plan: Plan, name: str, x: Tensor) -> Tensor:
    """The encoder's output is kept for all decoder blocks, whose own stream begins with the decoder's words."""
    if name != f"layers.{plan.model.layers}":
        return x
    decoder = t.shared["decoder"]
    decoder["memory"] = megatron.norm(t, plan, x, "encoder.final_layernorm")
    return megatron.enter(t, plan, decoder["ids"])


def blocks(t: Tape, plan: Plan) -> list[Block]:
    names = [f"layers.{layer}" for layer in range(plan.model.layers + plan.model.decoder_layers)]
    first, shared = plan.model.layers, t.shared["decoder"]
    encoder = [(name, partial(megatron.block, t, plan, [], name)) for name in names[:first]]
    return [*encoder, *((name, partial(block, t, plan, shared, name)) for name in names[first:])]


def leave(t: Tape, plan: Plan, x: Tensor) -> Tensor:
    t.shared["decoder"].clear()
    t.shared = {}
    x = megatron.norm(t, plan, x, "decoder.final_layernorm")
    return column(t, x, "output_layer", "word_embeddings.weight" if plan.model.tied else None)


def block(t: Tape, plan: Plan, shared: dict[str, Tensor], name: str, x: Tensor) -> Tensor:
    normed = megatron.norm(t, plan, x, f"{name}.input_layernorm")
    attended = megatron.attention(t, plan, [], normed, f"{name}.self_attention")
    after = t.weights.get(f"{name}.self_attention.dense.bias")
    x = bias_dropout_add(t, attended, x, f"{name}.residual_1", after, plan.dropout)
    normed = megatron.norm(t, plan, x, f"{name}.post_attention_layernorm")
    attended = cross_attention(t, plan, normed, shared["memory"], f"{name}.cross_attention")
    after = t.weights.get(f"{name}.cross_attention.dense.bias")
    x = bias_dropout_add(t, attended, x, f"{name}.residual_2", after, plan.dropout)
    normed = megatron.norm(t, plan, x, f"{name}.post_cross_layernorm")
    y = megatron.mlp(t, plan, normed, f"{name}.mlp")
    after = t.weights.get(f"{name}.mlp.dense_4h_to_h.bias")
    return bias_dropout_add(t, y, x, f"{name}.residual_3", after, plan.dropout)


def cross_attention(t: Tape, plan: Plan, x: Tensor, memory: Tensor, name: str) -> Tensor:
    """Queries of the decoder's stream, keys and values of what the encoder made."""
    width = plan.model.kv_heads * plan.model.head_width
    k, v = megatron.split(t, column(t, memory, f"{name}.key_value"), [width, width], f"{name} key and value")
    return megatron.attend(t, plan, column(t, x, f"{name}.query"), k, v, name)


MEGATRON_T5 = dataclasses.replace(
    megatron.MEGATRON,
    name="megatron-t5",
    untrained=lambda model: "models of the family megatron-t5",
    summary="Megatron's T5: encoder and decoder of Megatron's blocks, learned positions, a tied head with a bias",
    sequences=2,
    encodes=True,
    fields=(*megatron.FIELDS, "decoder_layers", "decoder_tokens"),
    check=check,
    weights=weights,
    pairs=pairs,
    beside=beside,
    enter=enter,
    between=between,
    blocks=blocks,
    leave=leave,
)
