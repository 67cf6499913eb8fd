"""Llama with a mixture of experts on the tape, nearly line by line ``trainers/models/moe.py`` (Jiang et al. 2024, Mixtral)."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from memcalc import norms, ops
from memcalc.errors import PlanError
from memcalc.experts import balanced, combine, dispatch, route
from memcalc.graph import Tensor
from memcalc.models import decoder, llama
from memcalc.models.checks import causal_mask, head_is_tied, positive
from memcalc.models.family import Block, Family
from memcalc.positions import rotary_tables
from memcalc.recorder import Storage
from memcalc.spec import Model, Weight
from memcalc.tape import Tape

if TYPE_CHECKING:
    from memcalc.plan import Plan

__all__ = ["MOE"]


def check(model: Model, plan: Plan) -> None:
    positive(model, "layers", "hidden", "heads", "kv_heads", "ffn", "experts", "top_k", "vocab", "context")
    if model.top_k > (model.routed or model.experts):
        raise PlanError(f"model {model.name}: each token takes {model.top_k} experts, but there are {model.experts}")
    head_is_tied(model, False)
    llama.check(model, plan)


def weights(model: Model) -> list[Weight]:
    """Llama's, with a router, three matrices an expert and three of the shared one in place of the MLP.

    >>> from memcalc.models import MODELS
    >>> sum(weight.numel for weight in weights(MODELS["mixtral-8x7b"]))
    46702792704
    """
    found = []
    for weight in llama.weights(model):
        if ".mlp.gate_proj" in weight.name:
            found += _experts(model, weight.group)
        elif ".mlp." not in weight.name:
            found.append(weight)
    return found


def _experts(model: Model, block: str) -> list[Weight]:
    h, f, shared = model.hidden, model.ffn, model.shared_ffn
    parts = {"gate": (model.routed or model.experts, h)}
    for expert in range(model.experts):
        parts |= {f"experts.{expert}.{name}": shape for name, shape in _swiglu(h, f)}
    if shared:
        parts |= {f"shared.{name}": shape for name, shape in _swiglu(h, shared)}
    return [Weight(f"{block}.mlp.{name}.weight", shape, block) for name, shape in parts.items()]


def _swiglu(h: int, f: int) -> list[tuple[str, tuple[int, int]]]:
    return [("gate_proj", (f, h)), ("up_proj", (f, h)), ("down_proj", (h, f))]


def rows(model: Model, tokens: int, weight: Weight) -> float:
    """A token's product with ``top_k`` of the experts, spread evenly over them."""
    share = model.top_k / model.experts if ".experts." in weight.name else 1
    return share * decoder.rows(model, tokens, weight)


def blocks(t: Tape, plan: Plan) -> list[Block]:
    tables = rotary_tables(t, plan.tokens, plan.model.head_width)
    names = [f"layers.{layer}" for layer in range(plan.model.layers)]
    return [(name, partial(block, t, plan, tables, name)) for name in names]


def block(t: Tape, plan: Plan, tables: list[Storage], name: str, x: Tensor) -> Tensor:
    y = decoder.attention(t, plan, tables, norms.rms_norm(t, x, f"{name}.input_layernorm"), f"{name}.self_attn")
    x = ops.add(t, x, y, f"{name}.residual_1")
    del y
    y = mixture(t, plan, norms.rms_norm(t, x, f"{name}.post_attention_layernorm"), f"{name}.mlp")
    return ops.add(t, x, y, f"{name}.residual_2")


def mixture(t: Tape, plan: Plan, x: Tensor, name: str) -> Tensor:
    model = plan.model
    shares, order, tokens = route(t, x, name, model.top_k)
    sizes = balanced(plan.tokens * model.top_k, model.experts)
    y = dispatch(t, x, name, tokens, sizes, lambda part, index: swiglu(t, part, f"{name}.experts.{index}"))
    y = combine(t, y, shares, order, tokens, name)
    del shares, order, tokens
    return ops.add(t, y, swiglu(t, x, f"{name}.shared"), f"{name} with shared") if model.shared_ffn else y


def swiglu(t: Tape, x: Tensor, name: str) -> Tensor:
    gate = ops.pointwise(t, ops.linear(t, x, f"{name}.gate_proj", flat=True), f"{name}.silu")
    up = ops.linear(t, x, f"{name}.up_proj", flat=True)
    return ops.linear(t, ops.multiply(t, gate, up, f"{name}.product"), f"{name}.down_proj", flat=True)


MOE = Family(
    name="moe",
    summary="Llama with a mixture of experts: float32 router, top-k of SwiGLU experts, no token dropped, a shared one if any",
    reads="tokens",
    assumption="experts are loaded evenly and no token is dropped; what is kept does not depend on it, transients do",
    check=check,
    buffers=causal_mask,
    weights=weights,
    rows=rows,
    enter=decoder.enter,
    blocks=blocks,
    leave=decoder.leave,
)
