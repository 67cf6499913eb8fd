"""Whisper on the tape: an encoder of log-mel frames and a decoder of tokens; mBART and BART, whose encoder reads tokens.

Sources: transformers/models/whisper/modeling_whisper.py (Radford et al. 2023) and models/mbart/modeling_mbart.py (Liu et
al. 2020). Encoder and decoder blocks stand in one list, as in ``memcalc/models/t5.py``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from memcalc import norms, ops
from memcalc.attention import attention as attend
from memcalc.convolution import conv
from memcalc.cross_entropy import head
from memcalc.errors import PlanError
from memcalc.graph import Gradient, Node, Tensor
from memcalc.models.checks import activation_is, heads_divide, positive, reads_tokens
from memcalc.models.family import Block, Family
from memcalc.models.whisper_weights import weights
from memcalc.positions import positions as learned
from memcalc.spec import Model, Weight
from memcalc.tape import Tape

if TYPE_CHECKING:
    from memcalc.plan import Plan

__all__ = ["MBART", "WHISPER"]

_FIELDS = (
    "layers", "decoder_layers", "hidden", "heads", "decoder_heads", "ffn", "decoder_ffn", "vocab", "context", "activation",
    "tied", "embedding_norm", "norm_after", "scaled",
)  # fmt: skip


def check(model: Model, plan: Plan) -> None:
    positive(model, "decoder_layers", "hidden", "heads", "ffn", "vocab", "context")
    if model.family == "whisper":
        positive(model, "layers", "channels", "encoder_tokens")
    for side in (model, of_decoder(model)):
        heads_divide(dataclasses.replace(side, kv_heads=0))
    activation_is(model, "gelu", "relu")
    if model.scaled not in ((), ("embedding",)):
        raise PlanError(
            f"model {model.name}: scaled {', '.join(model.scaled)}, but {model.family} scales its embedding alone"
        )
    reads_tokens(model, plan)
    if plan.reentrant:
        raise PlanError(f"reentrant: {model.name}'s decoder blocks take two streams; leave --reentrant out")
    if plan.checkpoint_every and model.layers % plan.checkpoint_every:
        raise PlanError(
            f"checkpoints of {plan.checkpoint_every} blocks do not divide the {model.layers} encoder layers of {model.name}"
        )


def of_decoder(model: Model) -> Model:
    """The same with the decoder's own numbers where an encoder's are asked for."""
    return dataclasses.replace(model, heads=model.decoder_heads or model.heads)


def encoder_tokens(model: Model, tokens: int) -> int:
    """Positions of the encoder: fixed where it reads frames, else as many as the decoder's."""
    return model.encoder_tokens or tokens


def rows(model: Model, tokens: int, weight: Weight) -> float:
    """Encoder weights meet its positions, and so do keys and values of the attention to it; tables are looked up."""
    name, long = weight.name, encoder_tokens(model, tokens)
    if len(weight.shape) < 2 or name.endswith("embed_positions.weight"):
        return 0
    if name == "shared.weight":
        return tokens if model.tied else 0
    if name == "encoder.conv1.weight":
        return 2 * long
    of_encoder = name.startswith("encoder.") or "encoder_attn.k_proj" in name or "encoder_attn.v_proj" in name
    return long if of_encoder else tokens


def pairs(model: Model, tokens: int) -> tuple[int, int]:
    """Decoder blocks attend to themselves under a causal mask, and to the encoder without one."""
    long = encoder_tokens(model, tokens)
    return model.decoder_layers * tokens**2, model.layers * long**2 + model.decoder_layers * long * tokens


def enter(t: Tape, plan: Plan, ids: Tensor) -> Tensor:
    model = plan.model
    words = Tensor(ids.storage, (plan.tokens,), ids.dtype, None)
    t.shared = {"decoder": {"ids": words}}
    if not model.layers:
        return embedded(t, plan, words, "decoder")
    if model.family == "mbart":
        return embedded(t, plan, words, "encoder")
    assert t.sensed is not None
    x = ops.pointwise(t, conv(t, t.sensed, "encoder.conv1", padding=1), "encoder.gelu 1")
    x = ops.pointwise(t, conv(t, x, "encoder.conv2", stride=2, padding=1), "encoder.gelu 2")
    x = transposed(t, x)
    x = ops.add(t, x, learned(t, "encoder.embed_positions", model.encoder_tokens), "encoder.embeddings")
    return ops.dropout(t, x, "encoder.dropout", plan.dropout)


def transposed(t: Tape, x: Tensor) -> Tensor:
    """``x.permute(0, 2, 1)``: a view both ways."""
    node = t.node([ops.edge(x)], lambda node, grads: grads)
    return Tensor(x.storage, x.shape[::-1], x.dtype, node)


def embedded(t: Tape, plan: Plan, ids: Tensor, side: str) -> Tensor:
    """Tokens with their positions, and normalised in mBART."""
    x = ops.embedding(t, ids, "shared")
    if "embedding" in plan.model.scaled:
        x = ops.scale(t, x, f"{side}.embedding scale")
    # Both look up a row of positions for each sample.
    rows = Tensor(t.allocate("positions", ids.shape, "int64", "temporary"), ids.shape, "int64", None)
    places = ops.embedding(t, rows, f"{side}.embed_positions")
    del rows
    x = ops.add(t, x, places, f"{side}.embeddings")
    del places
    if plan.model.embedding_norm:
        x = norms.layer_norm(t, x, f"{side}.layernorm_embedding")
    return ops.dropout(t, x, f"{side}.dropout", plan.dropout)


def between(t: Tape, plan: Plan, name: str, x: Tensor) -> Tensor:
    """The encoder's output is kept for all decoder blocks, whose own stream begins with the tokens."""
    if name != "decoder.layers.0" or not plan.model.layers:
        return x
    decoder = t.shared["decoder"]
    decoder["memory"] = last_norm(t, plan, x, "encoder")
    return embedded(t, plan, decoder["ids"], "decoder")


def blocks(t: Tape, plan: Plan) -> list[Block]:
    model, shared = plan.model, t.shared["decoder"]
    sides = {"encoder": (model.layers, {}), "decoder": (model.decoder_layers, shared)}
    return [
        (f"{side}.layers.{layer}", partial(block, t, plan, f"{side}.layers.{layer}", takes))
        for side, (count, takes) in sides.items()
        for layer in range(count)
    ]


def leave(t: Tape, plan: Plan, x: Tensor) -> Tensor:
    if not plan.checkpoint_every:  # checkpoints will run blocks again
        t.shared["decoder"].clear()
    t.shared = {}
    x = last_norm(t, plan, x, "decoder")
    return head(t, plan, x, "proj_out", weight="shared.weight" if plan.model.tied else None)


def last_norm(t: Tape, plan: Plan, x: Tensor, side: str) -> Tensor:
    return x if plan.model.norm_after else norms.layer_norm(t, x, f"{side}.layer_norm")


def block(t: Tape, plan: Plan, name: str, shared: dict[str, Tensor], x: Tensor) -> Tensor:
    cross = name.startswith("decoder.")
    x = beside(t, plan, f"{name}.self_attn", 1, x, lambda y, part: attention(t, plan, y, y, part, causal=cross))
    if "memory" in shared:
        memory = shared["memory"]
        x = beside(t, plan, f"{name}.encoder_attn", 2, x, lambda y, part: attention(t, plan, y, memory, part))
    return beside(t, plan, f"{name}.final", 3, x, lambda y, part: mlp(t, plan, y, name))


def beside(t: Tape, plan: Plan, part: str, index: int, x: Tensor, run: Callable[[Tensor, str], Tensor]) -> Tensor:
    """A part with its norm before it, or in BART after it is added."""
    name = f"{part.rsplit('.', 1)[0]}.residual_{index}"
    if plan.model.norm_after:
        return norms.layer_norm(t, residual(t, plan, x, run(x, part), name), f"{part}_layer_norm")
    return residual(t, plan, x, run(norms.layer_norm(t, x, f"{part}_layer_norm"), part), name)


def mlp(t: Tape, plan: Plan, x: Tensor, name: str) -> Tensor:
    act = ops.relu if plan.model.activation == "relu" else ops.pointwise
    x = act(t, ops.linear(t, x, f"{name}.fc1"), f"{name}.activation")
    return ops.linear(t, x, f"{name}.fc2")


def residual(t: Tape, plan: Plan, x: Tensor, y: Tensor, name: str) -> Tensor:
    return ops.add(t, x, ops.dropout(t, y, f"{name}.dropout", plan.dropout), name)


def attention(t: Tape, plan: Plan, x: Tensor, memory: Tensor, name: str, *, causal: bool = False) -> Tensor:
    """Queries of ``x``, keys and values of ``memory``; both models scale the queries before, Whisper in a copy."""
    heads = (of_decoder(plan.model) if name.startswith("decoder.") else plan.model).heads
    q = ops.linear(t, x, f"{name}.q_proj")
    if plan.model.family == "whisper":
        q = copied(t, ops.scale(t, q, f"{name}.scaled queries"), f"{name}.queries by head")
    k, v = (ops.linear(t, memory, f"{name}.{part}_proj") for part in "kv")
    wide = plan.implementation.softmax == "float32"
    y = attend(t, q, k, v, name, kind=plan.kernel, heads=heads, dropout=0.0, causal=causal, wide=wide)
    del q, k, v
    if plan.model.family == "whisper" and plan.kernel in ("flash", "efficient"):
        # The kernel's output has the layout of its queries (at::empty_like), which Whisper alone has put head by head.
        y = copied(t, y, f"{name}.heads joined")
    return ops.linear(t, y, f"{name}.out_proj")


def copied(t: Tape, x: Tensor, name: str) -> Tensor:
    """``x.contiguous()`` of a transposed view; its gradient is transposed in place."""

    def backward(node: Node, grads: list[Gradient]) -> list[Gradient]:
        return grads

    return t.output(name, x.shape, x.dtype, t.node([ops.edge(x)], backward))


WHISPER = Family(
    name="whisper",
    summary="Whisper: two convolutions over log-mel frames, LayerNorm before each part, encoder and decoder, a tied head",
    reads="tokens",
    encodes=True,
    drops_shares=False,
    beside_tokens=lambda model: (model.channels, 2 * model.encoder_tokens),
    untrained=lambda model: f"models of the family {model.family}",
    assumption="every sample has all frames the encoder takes; dropout is that of residuals, none of attention",
    fields=(*_FIELDS, "channels", "encoder_tokens"),
    check=check,
    weights=weights,
    rows=rows,
    pairs=pairs,
    enter=enter,
    between=between,
    blocks=blocks,
    leave=leave,
)
MBART = dataclasses.replace(
    WHISPER,
    name="mbart",
    fields=(*_FIELDS, "position_offset"),
    summary="mBART: encoder and decoder of tokens, LayerNorm before each part and of embeddings, learned positions, a tied head",
    sequences=2,
    objective="continue",
    beside_tokens=lambda model: (),
    assumption="encoder and decoder each read as many tokens as the sequence length says; no dropout of attention",
)
