"""GPT-2 on the tape, nearly line by line ``trainers/models/gpt2.py`` (Radford et al. 2019)."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from memcalc import norms, ops
from memcalc.attention import attention as attend
from memcalc.cross_entropy import head
from memcalc.errors import PlanError
from memcalc.graph import Tensor
from memcalc.models.checks import causal_mask, head_is_tied, heads_divide, positive, reads_tokens
from memcalc.models.family import Block, Family, every_token
from memcalc.positions import positions as learned
from memcalc.spec import HEAD, Model, Weight
from memcalc.tape import Tape
from memcalc.tensor_parallel import enter as enter_products
from memcalc.tensor_parallel import leave as leave_products
from memcalc.vocab_parallel import embedding

if TYPE_CHECKING:
    from memcalc.plan import Plan

__all__ = ["GPT2"]


def check(model: Model, plan: Plan) -> None:
    positive(model, "layers", "hidden", "heads", "ffn", "vocab", "context")
    heads_divide(model)
    head_is_tied(model, True)
    if model.kv_heads != model.heads:
        raise PlanError(
            f"model {model.name}: {model.kv_heads} key/value heads, but GPT-2 has one for each of its {model.heads} heads"
        )
    reads_tokens(model, plan)


def weights(model: Model) -> list[Weight]:
    """148 tensors for 12 layers; the head is the token embedding, so it is counted once.

    >>> from memcalc.models import MODELS
    >>> sum(weight.numel for weight in weights(MODELS["gpt2"]))
    124439808
    """
    h, f, width = model.hidden, model.ffn, model.heads * model.head_width
    found = [Weight("wte.weight", (model.vocab, h)), Weight("wpe.weight", (model.context, h))]
    for layer in range(model.layers):
        block = f"h.{layer}"
        for name, shape in (
            ("ln_1", (h,)), ("attn.c_attn", (3 * width, h)), ("attn.c_proj", (h, width)),
            ("ln_2", (h,)), ("mlp.c_fc", (f, h)), ("mlp.c_proj", (h, f)),
        ):  # fmt: skip
            found.append(Weight(f"{block}.{name}.weight", shape, block))
            found.append(Weight(f"{block}.{name}.bias", shape[:1], block))
    return [*found, Weight("ln_f.weight", (h,), HEAD), Weight("ln_f.bias", (h,), HEAD)]


def rows(model: Model, tokens: int, weight: Weight) -> float:
    """Positions are looked up; the token table is, too, but it is the head as well."""
    return 0 if weight.name == "wpe.weight" else every_token(model, tokens, weight)


def enter(t: Tape, plan: Plan, ids: Tensor) -> Tensor:
    words = leave_products(t, embedding(t, ids, "wte"), "wte")
    x = ops.add(t, words, learned(t, "wpe", words.shape[0]), "embeddings")
    return ops.dropout(t, x, "embedding dropout", plan.dropout)


def blocks(t: Tape, plan: Plan) -> list[Block]:
    return [(f"h.{layer}", partial(block, t, plan, f"h.{layer}")) for layer in range(plan.model.layers)]


def leave(t: Tape, plan: Plan, x: Tensor) -> Tensor:
    x = enter_products(t, norms.layer_norm(t, x, "ln_f"), "lm_head")
    return head(t, plan, x, "lm_head", weight="wte.weight")


def block(t: Tape, plan: Plan, name: str, x: Tensor) -> Tensor:
    x = ops.add(t, x, attention(t, plan, norms.layer_norm(t, x, f"{name}.ln_1"), f"{name}.attn"), f"{name}.residual_1")
    return ops.add(t, x, mlp(t, plan, norms.layer_norm(t, x, f"{name}.ln_2"), f"{name}.mlp"), f"{name}.residual_2")


def attention(t: Tape, plan: Plan, x: Tensor, name: str) -> Tensor:
    x = enter_products(t, x, name)
    width = plan.model.heads * plan.model.head_width
    q, k, v = ops.split(t, ops.linear(t, x, f"{name}.c_attn"), [width] * 3, f"{name}.c_attn split")
    wide = plan.implementation.softmax == "float32"
    x = attend(t, q, k, v, name, kind=plan.kernel, heads=plan.model.heads, dropout=plan.dropout, wide=wide)
    x = leave_products(t, ops.linear(t, x, f"{name}.c_proj"), name)
    return ops.dropout(t, x, f"{name}.dropout", plan.dropout)


def mlp(t: Tape, plan: Plan, x: Tensor, name: str) -> Tensor:
    gelu = ops.gelu_in_python if plan.implementation.gelu == "python" else ops.pointwise
    x = gelu(t, ops.linear(t, enter_products(t, x, name), f"{name}.c_fc"), f"{name}.gelu")
    x = leave_products(t, ops.linear(t, x, f"{name}.c_proj"), name)
    return ops.dropout(t, x, f"{name}.dropout", plan.dropout)


GPT2 = Family(
    name="gpt2",
    summary="GPT-2: learned positions, LayerNorm, one QKV matrix, GELU, head tied to the embedding",
    reads="tokens",
    divides="dtensor",
    fields=("layers", "hidden", "heads", "kv_heads", "head_dim", "ffn", "vocab", "context", "tied"),
    check=check,
    buffers=causal_mask,
    weights=weights,
    rows=rows,
    enter=enter,
    blocks=blocks,
    leave=leave,
)
