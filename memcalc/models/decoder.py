"""Transformers that say the next token, on the tape: Llama and its relatives, told apart by fields of the Model.

Each option is torch code of a published model (transformers/models/*/modeling_*.py): biases (Qwen 2), norms of queries
and keys (Qwen 3), one product for all three (GPT-NeoX), rotary positions on a part of a head, attention beside the MLP
(GPT-J, Falcon), norms after both (Gemma 2), tanh on scores, multiplied residuals (Granite), ALiBi (BLOOM, MPT).
Dropout, where there is any, is where GPT-2 has it (GPTBigCode, GPT-NeoX): after embeddings, attention's shares, both parts.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from memcalc import norms, ops
from memcalc.attention import attention as attend
from memcalc.cross_entropy import head
from memcalc.errors import PlanError, UnknownNameError
from memcalc.graph import Gradient, Node, Tensor
from memcalc.models import latent
from memcalc.models.checks import causal_mask, heads_divide, positive, reads_tokens
from memcalc.models.decoder_weights import gated, weights
from memcalc.models.family import Block, Family, every_token
from memcalc.models.window import under_mask
from memcalc.positions import positions as learned
from memcalc.positions import rotary, rotary_tables
from memcalc.recorder import Storage
from memcalc.spec import Model, Weight
from memcalc.tape import Tape
from memcalc.tensor_parallel import enter as enter_products
from memcalc.tensor_parallel import leave as leave_products
from memcalc.vocab_parallel import embedding

if TYPE_CHECKING:
    from memcalc.plan import Plan

__all__ = ["DECODER", "FIELDS"]

FIELDS = (
    "layers", "hidden", "heads", "kv_heads", "head_dim", "ffn", "vocab", "context", "window", "gated", "tied", "biases",
    "fused_qkv", "fused_gate_up", "qk_norm", "q_lora", "kv_lora", "value_dim", "norm", "activation", "positions", "rotary_dim",
    "head_major", "side_by_side", "post_norm", "norm_after", "embedding_norm", "embedding_dim", "scaled", "capped",
    "wide_scores",
)  # fmt: skip

_TEXTS = {
    "norm": ("", "rms", "layer"),
    "activation": ("", "silu", "gelu", "relu"),
    "positions": ("", "rotary", "learned", "alibi"),
}
_LISTS = {
    "biases": ("qkv", "out", "mlp", "head", "norm"),
    "scaled": ("embedding", "residual", "logits"),
    "capped": ("attention", "logits"),
}


def check(model: Model, plan: Plan) -> None:
    positive(model, "layers", "hidden", "heads", "kv_heads", "ffn", "vocab", "context")
    for field, known in _TEXTS.items():
        _one_of(model, field, getattr(model, field), known)
    for field, known in _LISTS.items():
        for value in getattr(model, field):
            _one_of(model, field, value, known)
    if "norm" in model.biases and model.norm != "layer":
        raise PlanError(f"model {model.name}: a bias of norm, but RMSNorm has none; take norm layer")
    if model.side_by_side > 2:
        raise PlanError(f"model {model.name}: side by side {model.side_by_side} must be 0, 1 or 2 norms")
    for field in ("post_norm", "norm_after"):
        if model.side_by_side and getattr(model, field):
            raise PlanError(
                f"model {model.name}: {field.replace('_', ' ')} needs attention and MLP one after the other"
            )
    if model.post_norm and model.norm_after:
        raise PlanError(f"model {model.name}: post norm and norm after say two things of the same norms; take one")
    if model.fused_gate_up and not gated(model):
        raise PlanError(f"model {model.name}: fused gate and up, but its MLP has no gate")
    if model.embedding_dim and plan.layout.tensor > 1:
        raise PlanError(
            f"tensor parallel {plan.layout.tensor}: {model.name} has a narrower token table, which is not divided"
        )
    latent.check(model, plan)
    heads_divide(model)
    turned = rotated(model)
    if turned % 2 or turned > model.head_width:
        raise PlanError(
            f"model {model.name}: rotary positions on {turned} of a head's width {model.head_width}; they need an even "
            "width, and no more than all of it"
        )
    if plan.loss.chunk_head and "logits" in (*model.scaled, *model.capped):
        raise PlanError(
            f"model {model.name}: its logits are scaled or capped, which is not counted in chunks of the head"
        )
    if plan.attention in ("efficient", "math") and model.written_out:
        what = "ALiBi" if model.positions == "alibi" else "tanh on its scores"
        raise PlanError(f"attention {plan.attention}: {model.name} has {what}; take eager or flash (its own library)")
    reads_tokens(model, plan)


def _one_of(model: Model, field: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise UnknownNameError(f"model {model.name}: {field}", value, [name for name in known if name])


def rotated(model: Model) -> int:
    """The part of a head's width that rotary positions turn."""
    return (model.rotary_dim or model.head_width) if model.positions in ("", "rotary") else 0


def rows(model: Model, tokens: int, weight: Weight) -> float:
    """Tokens and positions are looked up; the token table is, too, but it may be the head as well."""
    looked_up = ["embed_positions.weight"] if model.tied else ["embed_positions.weight", "embed_tokens.weight"]
    return 0 if weight.name in looked_up else every_token(model, tokens, weight)


def enter(t: Tape, plan: Plan, ids: Tensor) -> Tensor:
    model = plan.model
    x = leave_products(t, embedding(t, ids, "embed_tokens"), "embed_tokens")
    if model.embedding_dim:
        x = ops.linear(t, x, "project_in")
    if "embedding" in model.scaled:
        x = ops.scale(t, x, "embedding scale")
    if model.positions == "learned":
        x = ops.add(t, x, learned(t, "embed_positions", x.shape[0]), "embeddings")
    x = ops.dropout(t, x, "embedding dropout", plan.dropout)
    return norm(t, plan, x, "embed_norm") if model.embedding_norm else x


def blocks(t: Tape, plan: Plan) -> list[Block]:
    width = rotated(plan.model)
    tables = rotary_tables(t, plan.tokens, width) if width else []
    names = [f"layers.{layer}" for layer in range(plan.model.layers)]
    return under_mask(t, plan, [(name, partial(block, t, plan, tables, name)) for name in names])


def leave(t: Tape, plan: Plan, x: Tensor) -> Tensor:
    tied = "embed_tokens.weight" if plan.model.tied else None
    if not plan.model.norm_after:
        x = norm(t, plan, x, "norm")
    if plan.model.embedding_dim:
        x = ops.linear(t, x, "project_out")
    x = head(t, plan, enter_products(t, x, "lm_head"), "lm_head", tied)
    if plan.loss.takes_head:  # its kernel scales and caps logits, too
        return x
    if "logits" in plan.model.scaled:
        x = ops.scale(t, x, "logits scale")
    return ops.soft_cap(t, x, "logits cap") if "logits" in plan.model.capped else x


def norm(t: Tape, plan: Plan, x: Tensor, name: str) -> Tensor:
    return norms.layer_norm(t, x, name) if plan.model.norm == "layer" else norms.rms_norm(t, x, name)


def block(t: Tape, plan: Plan, tables: list[Storage], name: str, x: Tensor) -> Tensor:
    if plan.model.side_by_side:
        return beside(t, plan, tables, name, x)
    if plan.model.norm_after:
        return normed_after(t, plan, tables, name, x)
    y = attention(t, plan, tables, norm(t, plan, x, f"{name}.input_layernorm"), f"{name}.self_attn")
    x = residual(t, plan, x, y, f"{name}.self_attn_norm", f"{name}.residual_1")
    del y
    y = mlp(t, plan, norm(t, plan, x, f"{name}.post_attention_layernorm"), f"{name}.mlp")
    return residual(t, plan, x, y, f"{name}.mlp_norm", f"{name}.residual_2")


def normed_after(t: Tape, plan: Plan, tables: list[Storage], name: str, x: Tensor) -> Tensor:
    """Each norm takes the sum (transformers/models/opt/modeling_opt.py, do_layer_norm_before)."""
    y = attention(t, plan, tables, x, f"{name}.self_attn")
    x = norm(t, plan, residual(t, plan, x, y, "", f"{name}.residual_1"), f"{name}.input_layernorm")
    del y
    y = mlp(t, plan, x, f"{name}.mlp")
    return norm(t, plan, residual(t, plan, x, y, "", f"{name}.residual_2"), f"{name}.post_attention_layernorm")


def residual(t: Tape, plan: Plan, x: Tensor, y: Tensor, after: str, name: str) -> Tensor:
    if plan.model.post_norm:
        y = norm(t, plan, y, after)
    if "residual" in plan.model.scaled:
        y = ops.scale(t, y, f"{name} scale")
    return ops.add(t, x, y, name)


def beside(t: Tape, plan: Plan, tables: list[Storage], name: str, x: Tensor) -> Tensor:
    """Attention and MLP read the same stream, through one norm or through two."""
    normed = norm(t, plan, x, f"{name}.input_layernorm")
    y = attention(t, plan, tables, normed, f"{name}.self_attn")
    if plan.model.side_by_side == 2:
        normed = norm(t, plan, x, f"{name}.post_attention_layernorm")
    z = mlp(t, plan, normed, f"{name}.mlp")
    del normed
    return ops.add(t, ops.add(t, z, y, f"{name}.both"), x, f"{name}.residual")


def attention(t: Tape, plan: Plan, tables: list[Storage], x: Tensor, name: str) -> Tensor:
    model, form = plan.model, plan.implementation
    x = enter_products(t, x, name)
    if model.kv_lora:
        q, k, v = latent.products(t, plan, tables, x, name)
    elif model.fused_qkv:
        widths = [heads * model.head_width for heads in (model.heads, model.kv_heads, model.kv_heads)]
        q, k, v = ops.split(t, ops.linear(t, x, f"{name}.qkv_proj"), widths, f"{name}.qkv split")
        q, k = place(t, plan, tables, q, f"{name}.q"), place(t, plan, tables, k, f"{name}.k")
    else:
        q = place(t, plan, tables, ops.linear(t, x, f"{name}.q_proj"), f"{name}.q")
        k = place(t, plan, tables, ops.linear(t, x, f"{name}.k_proj"), f"{name}.k")
        v = ops.linear(t, x, f"{name}.v_proj")
    x = attend(
        t, q, k, v, name, kind=plan.kernel, heads=model.heads, dropout=plan.dropout, repeat=form.grouped == "repeat",
        wide=form.softmax == "float32", softmax=form.softmax, capped="attention" in model.capped,
        masked=plan.masked,
    )  # fmt: skip
    if model.head_major and plan.kernel == "flash":
        x = copied(t, x, f"{name} heads in order")
    return ops.dropout(t, leave_products(t, ops.linear(t, x, f"{name}.o_proj"), name), f"{name}.dropout", plan.dropout)


def copied(t: Tape, x: Tensor, name: str) -> Tensor:
    """``contiguous``: a new tensor whose gradient needs none (cuda/flash_attn/flash_api.cpp: outputs lie as queries do)."""

    def backward(node: Node, grads: list[Gradient]) -> list[Gradient]:
        return grads

    return t.output(name, x.shape, x.dtype, t.node([ops.edge(x)], backward))


def place(t: Tape, plan: Plan, tables: list[Storage], x: Tensor, name: str) -> Tensor:
    """Queries or keys with their norm and their positions."""
    model = plan.model
    if model.qk_norm:
        x = head_norm(t, plan, x, f"{name}_norm")
    if not tables:
        return x
    form, head = plan.implementation.rotary, model.head_width
    return rotary(t, x, f"{name}_rotary", tables, form=form, head=head, turned=rotated(model))


def head_norm(t: Tape, plan: Plan, x: Tensor, name: str) -> Tensor:
    """The model's norm over each head."""
    (tokens, width), head = x.shape, plan.model.head_width
    return ops.reshape(norm(t, plan, ops.reshape(x, (tokens, width // head, head)), name), (tokens, width))


def mlp(t: Tape, plan: Plan, x: Tensor, name: str) -> Tensor:
    x = enter_products(t, x, name)
    if not gated(plan.model):
        x = activation(t, plan, ops.linear(t, x, f"{name}.up_proj"), f"{name}.activation")
    elif plan.implementation.gate_up == "kernel" or plan.model.fused_gate_up:
        gate, up = both(t, plan, x, name)
        if plan.implementation.gate_up == "kernel":
            x = ops.fused_product(t, gate, up, f"{name}.product")
        else:
            x = ops.multiply(t, activation(t, plan, gate, f"{name}.activation"), up, f"{name}.product")
        del gate, up
    else:
        gate = activation(t, plan, ops.linear(t, x, f"{name}.gate_proj"), f"{name}.activation")
        x = ops.multiply(t, gate, ops.linear(t, x, f"{name}.up_proj"), f"{name}.product")
        del gate
    return ops.dropout(
        t, leave_products(t, ops.linear(t, x, f"{name}.down_proj"), name), f"{name}.dropout", plan.dropout
    )


def both(t: Tape, plan: Plan, x: Tensor, name: str) -> list[Tensor]:
    """What a gated MLP multiplies: two products, or halves of one (transformers/models/phi3/modeling_phi3.py)."""
    if not plan.model.fused_gate_up:
        return [ops.linear(t, x, f"{name}.{part}_proj") for part in ("gate", "up")]
    y = ops.linear(t, x, f"{name}.gate_up_proj")
    return ops.split(t, y, [y.shape[-1] // 2] * 2, f"{name}.gate_up split")


def activation(t: Tape, plan: Plan, x: Tensor, name: str) -> Tensor:
    kind = plan.model.activation
    if kind == "relu":
        return ops.relu(t, x, name)
    if kind == "gelu" and plan.implementation.gelu == "python":
        return ops.gelu_in_python(t, x, name)
    return ops.pointwise(t, x, name)


DECODER = Family(
    name="decoder",
    summary="relatives of Llama and GPT by options: Gemma, Granite, GPT-NeoX, Phi, Falcon, OPT, BLOOM, MPT, StarCoder",
    reads="tokens",
    divides="dtensor",
    untrained=lambda model: "models of the family decoder",
    fields=FIELDS,
    check=check,
    buffers=causal_mask,
    weights=weights,
    rows=rows,
    enter=enter,
    blocks=blocks,
    leave=leave,
)
