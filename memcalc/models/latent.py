"""Attention whose keys and values come through a narrow width, on the tape (DeepSeek-AI 2024, section 2.1).

Operation by operation as transformers/models/deepseek_v3/modeling_deepseek_v3.py: one rotated key for all heads, joined
with what each head has of its own; values are views of the product that makes both.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from memcalc import norms, ops
from memcalc.errors import PlanError
from memcalc.graph import Gradient, Node, Tensor
from memcalc.models.checks import positive
from memcalc.positions import rotary
from memcalc.recorder import Storage
from memcalc.spec import Model
from memcalc.tape import Tape

if TYPE_CHECKING:
    from memcalc.plan import Plan

__all__ = ["check", "products"]


def check(model: Model, plan: Plan) -> None:
    """Fields of latent attention go together, and stand alone."""
    if not model.kv_lora:
        if model.q_lora or model.value_dim:
            raise PlanError(f"model {model.name}: q_lora and value_dim are of latent attention, which needs kv_lora")
        return
    positive(model, "head_dim", "rotary_dim", "value_dim")
    if model.rotary_dim >= model.head_dim:
        raise PlanError(
            f"model {model.name}: {model.rotary_dim} rotated elements leave nothing of a head's {model.head_dim}"
        )
    if model.kv_heads != model.heads or model.fused_qkv or model.qk_norm or model.positions not in ("", "rotary"):
        raise PlanError(
            f"model {model.name}: latent attention has rotary positions, keys of every head, products apart and norms of "
            "its own"
        )
    if plan.layout.tensor > 1 or plan.layout.context > 1:
        raise PlanError(f"model {model.name}: latent attention is not divided by tensor or context parallel")
    if plan.adapter.kind in ("adapter", "adapter-v2"):
        raise PlanError(f"adapters of kind {plan.adapter.kind} are not known for latent attention; take --adapter lora")


def products(t: Tape, plan: Plan, tables: list[Storage], x: Tensor, name: str) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values of every head."""
    model, form = plan.model, plan.implementation.rotary
    head, turned = model.head_width, model.rotary_dim
    if model.q_lora:
        narrow = norms.rms_norm(t, ops.linear(t, x, f"{name}.q_a_proj"), f"{name}.q_a_layernorm")
        q = ops.linear(t, narrow, f"{name}.q_b_proj")
        del narrow
    else:
        q = ops.linear(t, x, f"{name}.q_proj")
    both = ops.linear(t, x, f"{name}.kv_a_proj_with_mqa")
    narrow, shared = ops.split(t, both, [model.kv_lora, turned], f"{name}.kv_a split")
    del both
    narrow = norms.rms_norm(t, narrow, f"{name}.kv_a_layernorm")
    q = rotary(t, q, f"{name}.q_rotary", tables, form=form, head=head, turned=turned)
    shared = rotary(t, shared, f"{name}.k_rotary", tables, form=form, head=turned, turned=turned)
    pairs = ops.linear(t, narrow, f"{name}.kv_b_proj")
    del narrow
    widths = [model.heads * (head - turned), model.heads * model.value_dim]
    own, v = ops.split(t, pairs, widths, f"{name}.kv_b split")
    del pairs
    return q, _joined(t, own, shared, (q.shape[0], model.heads * head), f"{name}.k"), v


def _joined(t: Tape, own: Tensor, shared: Tensor, shape: tuple[int, ...], name: str) -> Tensor:
    """Each head's own part of a key beside the one all share, in a new tensor; the shared one's gradient is a sum."""
    metas, dtype = (own.shape, shared.shape), own.dtype

    def backward(node: Node, grads: list[Gradient]) -> list[Gradient]:
        return [
            t.allocate(f"{name} part gradient", part, dtype, "temporary") if node.wants(index) else None
            for index, part in enumerate(metas)
        ]

    return t.output(f"{name} joined", shape, dtype, t.node([ops.edge(own), ops.edge(shared)], backward))
