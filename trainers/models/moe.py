"""Llama with a mixture of experts (Jiang et al. 2024, Mixtral; the shared expert of Dai et al. 2024) for one device."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from memcalc.plan import Plan
from trainers.models import llama
from trainers.models.layers import head, rms_norm

__all__ = ["MoE"]


class Expert(nn.Module):
    def __init__(self, hidden: int, ffn: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, ffn, bias=False)
        self.up_proj = nn.Linear(hidden, ffn, bias=False)
        self.down_proj = nn.Linear(ffn, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Mixture(nn.Module):
    """Each token's ``top_k`` experts, weighted; every expert runs, on no rows at all when nothing chose it."""

    def __init__(self, plan: Plan) -> None:
        super().__init__()
        model = plan.model
        self.top_k = model.top_k
        self.gate = nn.Linear(model.hidden, model.experts, bias=False)
        self.experts = nn.ModuleList(Expert(model.hidden, model.ffn) for _ in range(model.experts))
        self.shared = Expert(model.hidden, model.shared_ffn) if model.shared_ffn else None

    def forward(self, x: Tensor) -> Tensor:
        flat = x.view(-1, x.shape[-1])
        shares, order, tokens, counts = self.route(flat)
        parts = flat.index_select(0, tokens).split(counts)
        y = torch.cat([expert(part) for expert, part in zip(self.experts, parts, strict=True)])
        del parts
        y = self.combine(y, shares, order, tokens, len(flat))
        return (y if self.shared is None else y + self.shared(flat)).view_as(x)

    def route(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, list[int]]:
        """Shares ``[tokens, top_k]``, rows by expert, the token of each row, and rows of each expert."""
        top, chosen = self.gate(x).float().softmax(dim=-1).topk(self.top_k, dim=-1)
        shares = top / top.sum(dim=-1, keepdim=True)
        order = chosen.flatten().argsort(stable=True)
        return shares, order, order // self.top_k, chosen.flatten().bincount(minlength=len(self.experts)).tolist()

    def combine(self, y: Tensor, shares: Tensor, order: Tensor, tokens: Tensor, count: int) -> Tensor:
        """Each row times its share, added to its token."""
        y = y * shares.to(y.dtype).flatten().index_select(0, order).unsqueeze(-1)
        return y.new_zeros(count, y.shape[-1]).index_add(0, tokens, y)


class Block(nn.Module):
    def __init__(self, plan: Plan) -> None:
        super().__init__()
        self.input_layernorm = rms_norm(plan, plan.model.hidden, 1e-5)
        self.self_attn = llama.Attention(plan)
        self.post_attention_layernorm = rms_norm(plan, plan.model.hidden, 1e-5)
        self.mlp = Mixture(plan)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class MoE(nn.Module):
    """Token ids ``[batch, tokens]`` to logits ``[batch, tokens, vocab]``."""

    def __init__(self, plan: Plan) -> None:
        super().__init__()
        self.plan, self.head = plan, plan.model.head_width
        self.embed_tokens = nn.Embedding(plan.model.vocab, plan.model.hidden)
        self.layers = nn.ModuleList(Block(plan) for _ in range(plan.model.layers))
        self.norm = rms_norm(plan, plan.model.hidden, 1e-5)
        self.lm_head = nn.Linear(plan.model.hidden, plan.model.vocab, bias=False)

    def forward(self, ids: Tensor) -> Tensor | list[Tensor]:
        x = self.embed_tokens(ids)
        cos, sin = llama.rotary_tables(ids.shape[1], self.head, x)
        for block in self.layers:
            x = block(x, cos, sin)
        return head(self.lm_head, self.norm(x), self.plan)
