"""Llama on the tape, nearly line by line ``trainers/models/llama.py`` (Touvron et al. 2023)."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from memcalc import norms, ops
from memcalc.attention import attention as attend
from memcalc.cross_entropy import head
from memcalc.errors import PlanError
from memcalc.models.checks import causal_mask, head_is_tied, heads_divide, no_dropout, positive, reads_tokens
from memcalc.models.family import Block, Family, every_token
from memcalc.positions import rotary, rotary_tables
from memcalc.recorder import Storage
from memcalc.spec import HEAD, Model, Weight
from memcalc.tape import Tape, Tensor
from memcalc.tensor_parallel import enter as enter_products
from memcalc.tensor_parallel import leave as leave_products
from memcalc.vocab_parallel import embedding

if TYPE_CHECKING:
    from memcalc.plan import Plan

__all__ = ["LLAMA"]


def check(model: Model, plan: Plan) -> None:
    positive(model, "layers", "hidden", "heads", "kv_heads", "ffn", "vocab", "context")
    heads_divide(model)
    head_is_tied(model, False)
    if model.head_width % 2:
        raise PlanError(
            f"model {model.name}: hidden {model.hidden} over {model.heads} heads is {model.head_width} each; "
            "rotary positions need an even width"
        )
    reads_tokens(model, plan)
    no_dropout(model, plan)


def weights(model: Model) -> list[Weight]:
    """Nine tensors a block, no biases, a head of its own.

    >>> from memcalc.models import MODELS
    >>> sum(weight.numel for weight in weights(MODELS["llama-3-8b"]))
    8030261248
    """
    h, f = model.hidden, model.ffn
    q, kv = model.heads * model.head_width, model.kv_heads * model.head_width
    found = [Weight("embed_tokens.weight", (model.vocab, h))]
    for layer in range(model.layers):
        block = f"layers.{layer}"
        for name, shape in (
            ("input_layernorm", (h,)), ("self_attn.q_proj", (q, h)), ("self_attn.k_proj", (kv, h)),
            ("self_attn.v_proj", (kv, h)), ("self_attn.o_proj", (h, q)), ("post_attention_layernorm", (h,)),
            ("mlp.gate_proj", (f, h)), ("mlp.up_proj", (f, h)), ("mlp.down_proj", (h, f)),
        ):  # fmt: skip
            found.append(Weight(f"{block}.{name}.weight", shape, block))
    return [*found, Weight("norm.weight", (h,), HEAD), Weight("lm_head.weight", (model.vocab, h), HEAD)]


def rows(model: Model, tokens: int, weight: Weight) -> float:
    """Tokens are looked up."""
    return 0 if weight.name == "embed_tokens.weight" else every_token(model, tokens, weight)


def enter(t: Tape, plan: Plan, ids: Tensor) -> Tensor:
    return leave_products(t, embedding(t, ids, "embed_tokens"), "embed_tokens")


def blocks(t: Tape, plan: Plan) -> list[Block]:
    tables = rotary_tables(t, plan.tokens, plan.model.head_width)
    names = [f"layers.{layer}" for layer in range(plan.model.layers)]
    return [(name, partial(block, t, plan, tables, name)) for name in names]


def leave(t: Tape, plan: Plan, x: Tensor) -> Tensor:
    return head(t, plan, enter_products(t, norms.rms_norm(t, x, "norm"), "lm_head"), "lm_head")


def block(t: Tape, plan: Plan, tables: list[Storage], name: str, x: Tensor) -> Tensor:
    y = attention(t, plan, tables, norms.rms_norm(t, x, f"{name}.input_layernorm"), f"{name}.self_attn")
    x = ops.add(t, x, y, f"{name}.residual_1")
    del y
    y = mlp(t, norms.rms_norm(t, x, f"{name}.post_attention_layernorm"), f"{name}.mlp")
    return ops.add(t, x, y, f"{name}.residual_2")


def attention(t: Tape, plan: Plan, tables: list[Storage], x: Tensor, name: str) -> Tensor:
    x = enter_products(t, x, name)
    q = rotary(t, ops.linear(t, x, f"{name}.q_proj"), f"{name}.q_rotary", tables)
    k = rotary(t, ops.linear(t, x, f"{name}.k_proj"), f"{name}.k_rotary", tables)
    v = ops.linear(t, x, f"{name}.v_proj")
    x = attend(t, q, k, v, name, kind=plan.kernel, heads=plan.model.heads, dropout=0.0)
    return leave_products(t, ops.linear(t, x, f"{name}.o_proj"), name)


def mlp(t: Tape, x: Tensor, name: str) -> Tensor:
    x = enter_products(t, x, name)
    gate = ops.pointwise(t, ops.linear(t, x, f"{name}.gate_proj"), f"{name}.silu")
    y = ops.multiply(t, gate, ops.linear(t, x, f"{name}.up_proj"), f"{name}.product")
    return leave_products(t, ops.linear(t, y, f"{name}.down_proj"), name)


LLAMA = Family(
    name="llama",
    summary="Llama: rotary positions, RMSNorm, grouped queries, SwiGLU, no biases, a head of its own",
    reads="tokens",
    divides="dtensor",
    check=check,
    buffers=causal_mask,
    weights=weights,
    rows=rows,
    enter=enter,
    blocks=blocks,
    leave=leave,
)
