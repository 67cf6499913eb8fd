"""T5 on the tape, nearly line by line ``trainers/models/t5.py`` (Raffel et al. 2020).

Encoder and decoder blocks stand in one list. What runs between the two, and what decoder blocks take besides the
residual stream, is kept in ``Tape.shared``.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from memcalc import norms, ops
from memcalc.attention import biased_attention
from memcalc.cross_entropy import head
from memcalc.errors import PlanError
from memcalc.graph import Tensor
from memcalc.models.checks import activation_is, full_heads, heads_divide, positive, reads_tokens
from memcalc.models.family import Block, Family
from memcalc.positions import position_bias
from memcalc.spec import HEAD, Model, Weight
from memcalc.tape import Tape

if TYPE_CHECKING:
    from memcalc.plan import Plan

__all__ = ["T5"]


def check(model: Model, plan: Plan) -> None:
    positive(model, "layers", "decoder_layers", "hidden", "heads", "ffn", "vocab", "context", "buckets")
    heads_divide(model)
    full_heads(model)
    activation_is(model, "gelu", "relu", "silu")
    reads_tokens(model, plan, limited=False)  # distances have a bias, and far ones share it
    if plan.attention not in ("auto", "eager"):
        raise PlanError(f"attention {plan.attention}: t5 adds a learned bias to its scores; leave --attention out")
    if plan.reentrant:
        raise PlanError("reentrant: t5's decoder blocks take two streams; leave --reentrant out")
    if plan.checkpoint_every and model.layers % plan.checkpoint_every:
        raise PlanError(
            f"checkpoints of {plan.checkpoint_every} blocks do not divide the {model.layers} encoder layers of {model.name}"
        )


def weights(model: Model) -> list[Weight]:
    """One token table for all, a table of biases each for encoder and decoder, and no bias in any product.

    >>> from memcalc.models import MODELS
    >>> sum(weight.numel for weight in weights(MODELS["t5-base"]))
    222903552
    """
    h, f, inner = model.hidden, model.ffn, model.heads * model.head_width
    attended = {"q": (inner, h), "k": (inner, h), "v": (inner, h), "o": (h, inner)}
    found = [
        Weight("shared.weight", (model.vocab, h)),
        Weight("encoder_bias.weight", (model.buckets, model.heads)),
        Weight("decoder_bias.weight", (model.buckets, model.heads)),
    ]
    for layer in range(model.layers + model.decoder_layers):
        block = f"blocks.{layer}"
        parts = ["attention", *(["cross"] if layer >= model.layers else [])]
        shapes: list[tuple[str, tuple[int, ...]]] = []
        for part in parts:
            shapes += [(f"{part}_norm", (h,)), *((f"{part}.{name}", shape) for name, shape in attended.items())]
        shapes.append(("mlp_norm", (h,)))
        shapes += [(f"mlp.{name}", (f, h)) for name in (("wi_0", "wi_1") if model.gated else ("wi",))]
        shapes.append(("mlp.wo", (h, f)))
        found += [Weight(f"{block}.{name}.weight", shape, block) for name, shape in shapes]
    found += [Weight(f"{side}_norm.weight", (h,), HEAD) for side in ("encoder", "decoder")]
    return found if model.tied else [*found, Weight("lm_head.weight", (model.vocab, h), HEAD)]


def rows(model: Model, tokens: int, weight: Weight) -> float:
    """Tables are looked up, but a tied one is the head as well."""
    looked_up = weight.name.endswith("_bias.weight") or (weight.name == "shared.weight" and not model.tied)
    return 0 if looked_up or len(weight.shape) < 2 else tokens


def pairs(model: Model, tokens: int) -> tuple[int, int]:
    """Written out, attention computes what a mask hides, too; decoder blocks attend twice."""
    return 0, (model.layers + 2 * model.decoder_layers) * tokens * tokens


def enter(t: Tape, plan: Plan, ids: Tensor) -> Tensor:
    half = Tensor(ids.storage, (plan.tokens,), ids.dtype, None)
    bias = position_bias(t, "encoder_bias", plan.tokens, plan.model.heads, causal=False)
    t.shared = {"encoder": {"bias": bias}, "decoder": {"ids": half}}
    return ops.dropout(t, ops.embedding(t, half, "shared"), "encoder dropout", plan.dropout)


def between(t: Tape, plan: Plan, name: str, x: Tensor) -> Tensor:
    """The encoder's output is kept for all decoder blocks, whose own stream begins with the other half of the tokens."""
    if name != f"blocks.{plan.model.layers}":
        return x
    forget(t, plan, "encoder")
    decoder = t.shared["decoder"]
    decoder["memory"] = ops.dropout(t, norms.rms_norm(t, x, "encoder_norm"), "memory dropout", plan.dropout)
    decoder["bias"] = position_bias(t, "decoder_bias", plan.tokens, plan.model.heads, causal=True)
    return ops.dropout(t, ops.embedding(t, decoder["ids"], "shared"), "decoder dropout", plan.dropout)


def forget(t: Tape, plan: Plan, part: str) -> None:
    """Let go of what blocks took, unless checkpoints will run them again."""
    if not plan.checkpoint_every:
        t.shared[part].clear()


def blocks(t: Tape, plan: Plan) -> list[Block]:
    count, (encoder, decoder) = plan.model.layers + plan.model.decoder_layers, t.shared.values()
    return [
        (f"blocks.{layer}", partial(block, t, plan, layer, encoder if layer < plan.model.layers else decoder))
        for layer in range(count)
    ]


def leave(t: Tape, plan: Plan, x: Tensor) -> Tensor:
    forget(t, plan, "decoder")
    t.shared = {}
    x = ops.dropout(t, norms.rms_norm(t, x, "decoder_norm"), "output dropout", plan.dropout)
    if not plan.model.tied:
        return head(t, plan, x, "lm_head")
    return head(t, plan, ops.scale(t, x, "output scaled"), "lm_head", weight="shared.weight")


def block(t: Tape, plan: Plan, layer: int, shared: dict[str, Tensor], x: Tensor) -> Tensor:
    name = f"blocks.{layer}"
    y = norms.rms_norm(t, x, f"{name}.attention_norm")
    x = ops.add(t, x, attention(t, plan, y, y, f"{name}.attention", shared["bias"]), f"{name}.residual_1")
    del y
    if "memory" in shared:
        y = norms.rms_norm(t, x, f"{name}.cross_norm")
        x = ops.add(t, x, attention(t, plan, y, shared["memory"], f"{name}.cross", None), f"{name}.residual_2")
        del y
    return ops.add(t, x, mlp(t, plan, norms.rms_norm(t, x, f"{name}.mlp_norm"), f"{name}.mlp"), f"{name}.residual_3")


def attention(t: Tape, plan: Plan, x: Tensor, memory: Tensor, name: str, bias: Tensor | None) -> Tensor:
    q = ops.linear(t, x, f"{name}.q")
    k, v = (ops.linear(t, memory, f"{name}.{part}") for part in "kv")
    y = biased_attention(t, q, k, v, bias, name, heads=plan.model.heads, dropout=plan.dropout)
    del q, k, v
    return ops.dropout(t, ops.linear(t, y, f"{name}.o"), f"{name}.dropout", plan.dropout)


def mlp(t: Tape, plan: Plan, x: Tensor, name: str) -> Tensor:
    if plan.model.gated:
        gate = ops.gelu(t, ops.linear(t, x, f"{name}.wi_0"), f"{name}.gelu", plan.implementation.gelu)
        x = ops.multiply(t, gate, ops.linear(t, x, f"{name}.wi_1"), f"{name}.product")
        del gate
    else:
        x = ops.relu(t, ops.linear(t, x, f"{name}.wi"), f"{name}.relu")
    x = ops.dropout(t, x, f"{name}.inner dropout", plan.dropout)
    return ops.dropout(t, ops.linear(t, x, f"{name}.wo"), f"{name}.dropout", plan.dropout)


T5 = Family(
    name="t5",
    summary="T5: encoder and decoder, learned bias by distance, RMSNorm, no scaling, no biases, ReLU or gated GELU",
    reads="tokens",
    sequences=2,
    encodes=True,
    written_out=True,
    objective="continue",
    assumption="encoder and decoder each read as many tokens as the sequence length says",
    fields=(
        "layers",
        "decoder_layers",
        "hidden",
        "heads",
        "kv_heads",
        "head_dim",
        "ffn",
        "vocab",
        "context",
        "buckets",
        "gated",
        "activation",
        "tied",
    ),  # fmt: skip
    check=check,
    weights=weights,
    rows=rows,
    pairs=pairs,
    enter=enter,
    between=between,
    blocks=blocks,
    leave=leave,
)
