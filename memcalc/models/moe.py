"""Llama with a mixture of experts on the tape, nearly line by line ``trainers/models/moe.py`` (Jiang et al. 2024, Mixtral)."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from memcalc import norms, ops
from memcalc.errors import PlanError
from memcalc.experts import balanced, combine, dispatch, route
from memcalc.graph import Tensor
from memcalc.models import decoder, decoder_weights
from memcalc.models.checks import causal_mask, no_dropout, positive
from memcalc.models.family import Block, Family
from memcalc.models.llama import FIELDS, has_biases
from memcalc.models.window import under_mask
from memcalc.positions import rotary_tables
from memcalc.recorder import Storage
from memcalc.spec import Model, Weight
from memcalc.stacked_experts import stacked_experts, weighted
from memcalc.tape import Tape

if TYPE_CHECKING:
    from memcalc.plan import Plan

__all__ = ["MOE"]


def check(model: Model, plan: Plan) -> None:
    positive(model, "layers", "hidden", "heads", "kv_heads", "ffn", "experts", "top_k", "vocab", "context")
    if model.top_k > (model.routed or model.experts):
        raise PlanError(f"model {model.name}: each token takes {model.top_k} experts, but there are {model.experts}")
    if model.dense_layers and not model.dense_ffn:
        raise PlanError(
            f"model {model.name}: blocks {_listed(model)} have no experts; give dense_ffn, their MLP's width"
        )
    if model.shared_gate and not model.shared_ffn:
        raise PlanError(f"model {model.name}: a gate of the shared expert, but there is none; give shared_ffn")
    if plan.layout.expert > 1 and (model.dense_layers or model.kv_lora or model.stacked):
        raise PlanError(
            f"expert parallel: {model.name} has dense blocks, latent attention or stacked experts; leave it out"
        )
    has_biases(model, ("qkv", "out"))
    no_dropout(model, plan)
    decoder.check(model, plan)


def _listed(model: Model) -> str:
    return ", ".join(map(str, model.dense_layers[:5])) + ", ..." * (len(model.dense_layers) > 5)


def untrained(model: Model) -> str:
    """What the torch twin does not have."""
    special = {
        "a mixture whose experts are stacked, as transformers has them": model.stacked,
        "a mixture whose head is its embedding": model.tied,
        "a mixture with dense blocks": bool(model.dense_layers),
        "a rank's part of a mixture, which alone has not all experts": model.routed not in (0, model.experts),
        "a mixture that rotates a part of each head": model.rotary_dim not in (0, model.head_width),
        "a mixture whose queries lie head by head": model.head_major,
        "a mixture whose shared expert has a gate": model.shared_gate,
        "a mixture with a float32 router": model.wide_router,
        "latent attention": bool(model.kv_lora),
        "a mixture with a bias after attention": "out" in model.biases,
    }
    return next((said for said, there in special.items() if there), "")


def weights(model: Model) -> list[Weight]:
    """A decoder's, with a router, three matrices an expert or two of all, and three of the shared one, for the MLP.

    >>> from memcalc.models import MODELS
    >>> sum(weight.numel for weight in weights(MODELS["mixtral-8x7b"]))
    46702792704
    """
    found: list[Weight] = []
    for weight in decoder_weights.weights(model):
        if ".mlp." not in weight.name:
            found.append(weight)
        elif ".mlp.gate_proj" in weight.name:
            found += _inside(model, weight.group)
    return found


def dense(model: Model, block: str) -> bool:
    """A block, by name, that has one MLP."""
    return int(block.rpartition(".")[2]) in model.dense_layers


def _inside(model: Model, block: str) -> list[Weight]:
    h, f, shared = model.hidden, model.ffn, model.shared_ffn
    if dense(model, block):
        parts = dict(_swiglu(h, model.dense_ffn))
    else:
        parts = {"gate": (model.routed or model.experts, h)}
        for expert in range(model.experts * (not model.stacked)):
            parts |= {f"experts.{expert}.{name}": shape for name, shape in _swiglu(h, f)}
        if shared:
            parts |= {f"shared.{name}": shape for name, shape in _swiglu(h, shared)}
        if model.shared_gate:
            parts["shared_gate"] = (1, h)
    found = [Weight(f"{block}.mlp.{name}.weight", shape, block) for name, shape in parts.items()]
    if model.stacked and not dense(model, block):
        for name, each in (("gate_up_proj", (2 * f, h)), ("down_proj", (h, f))):
            found.append(Weight(f"{block}.mlp.experts.{name}", (model.experts, *each), block))
    return found


def _swiglu(h: int, f: int) -> list[tuple[str, tuple[int, int]]]:
    return [("gate_proj", (f, h)), ("up_proj", (f, h)), ("down_proj", (h, f))]


def rows(model: Model, tokens: int, weight: Weight) -> float:
    """A token's product with ``top_k`` of the experts, spread evenly over them."""
    share = model.top_k / model.experts if ".experts." in weight.name else 1
    return share * decoder.rows(model, tokens, weight)


def blocks(t: Tape, plan: Plan) -> list[Block]:
    tables = rotary_tables(t, plan.tokens, decoder.rotated(plan.model))
    names = [f"layers.{layer}" for layer in range(plan.model.layers)]
    return under_mask(t, plan, [(name, partial(block, t, plan, tables, name)) for name in names])


def block(t: Tape, plan: Plan, tables: list[Storage], name: str, x: Tensor) -> Tensor:
    y = decoder.attention(t, plan, tables, norms.rms_norm(t, x, f"{name}.input_layernorm"), f"{name}.self_attn")
    x = ops.add(t, x, y, f"{name}.residual_1")
    del y
    inside = decoder.mlp if dense(plan.model, name) else mixture
    y = inside(t, plan, norms.rms_norm(t, x, f"{name}.post_attention_layernorm"), f"{name}.mlp")
    return ops.add(t, x, y, f"{name}.residual_2")


def mixture(t: Tape, plan: Plan, x: Tensor, name: str) -> Tensor:
    model = plan.model
    shares, order, tokens = route(t, x, name, model.top_k, wide=model.wide_router)
    if model.stacked:
        y = stacked_experts(t, x, f"{name}.experts", shares, order, tokens)
    else:
        sizes = balanced(plan.tokens * model.top_k, model.experts)
        y = dispatch(t, x, name, tokens, sizes, lambda part, index: swiglu(t, part, f"{name}.experts.{index}"))
        y = combine(t, y, shares, order, tokens, name)
    del shares, order, tokens
    return ops.add(t, y, shared(t, model, x, f"{name}.shared"), f"{name} with shared") if model.shared_ffn else y


def shared(t: Tape, model: Model, x: Tensor, name: str) -> Tensor:
    """The expert every token takes, times a sigmoid of its own for each token where it has a gate."""
    y = swiglu(t, x, name)
    if not model.shared_gate:
        return y
    gate = ops.relu(t, ops.linear(t, x, f"{name}_gate", flat=True), f"{name}_gate.sigmoid")  # both keep their output
    return weighted(t, y, gate, f"{name}.weighted")


def swiglu(t: Tape, x: Tensor, name: str) -> Tensor:
    gate = ops.pointwise(t, ops.linear(t, x, f"{name}.gate_proj", flat=True), f"{name}.silu")
    up = ops.linear(t, x, f"{name}.up_proj", flat=True)
    return ops.linear(t, ops.multiply(t, gate, up, f"{name}.product"), f"{name}.down_proj", flat=True)


MOE = Family(
    name="moe",
    summary="Llama with a mixture of experts: top-k of SwiGLU experts, no token dropped, shared ones if any; DeepSeek, Qwen MoE",
    reads="tokens",
    drops=False,
    untrained=untrained,
    assumption="experts are loaded evenly and no token is dropped; what is kept does not depend on it, transients do",
    fields=(
        *FIELDS,
        "experts",
        "routed",
        "top_k",
        "shared_ffn",
        "shared_gate",
        "dense_layers",
        "dense_ffn",
        "stacked",
        "wide_router",
        "q_lora",
        "kv_lora",
        "value_dim",
        "rotary_dim",
        "head_major",
    ),  # fmt: skip
    check=check,
    buffers=causal_mask,
    weights=weights,
    rows=rows,
    enter=decoder.enter,
    blocks=blocks,
    leave=decoder.leave,
)
