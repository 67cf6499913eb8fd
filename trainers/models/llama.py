"""Llama (Touvron et al. 2023; grouped queries as in Llama 2 70B and Llama 3) for one device."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from memcalc.plan import Plan
from trainers.models.layers import attend, head

__all__ = ["Llama"]


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions on ``[batch, heads, tokens, head width]``; the tables are ``[tokens, head width]``."""
    low, high = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-high, low), dim=-1) * sin


def rotary_tables(tokens: int, width: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the rotary angles, ``[tokens, width]`` each, in the dtype of ``like``."""
    frequency = 10000.0 ** (-torch.arange(0, width, 2, device=like.device, dtype=torch.float32) / width)
    angle = torch.outer(torch.arange(tokens, device=like.device, dtype=torch.float32), frequency).repeat(1, 2)
    return angle.cos().to(like.dtype), angle.sin().to(like.dtype)


class Attention(nn.Module):
    def __init__(self, plan: Plan) -> None:
        super().__init__()
        model = plan.model
        self.kind, self.head = plan.kernel, model.hidden // model.heads
        self.q_proj = nn.Linear(model.hidden, model.heads * self.head, bias=False)
        self.k_proj = nn.Linear(model.hidden, model.kv_heads * self.head, bias=False)
        self.v_proj = nn.Linear(model.hidden, model.kv_heads * self.head, bias=False)
        self.o_proj = nn.Linear(model.heads * self.head, model.hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, tokens, _ = x.shape
        q = rotate(self.q_proj(x).view(batch, tokens, -1, self.head).transpose(1, 2), cos, sin)
        k = rotate(self.k_proj(x).view(batch, tokens, -1, self.head).transpose(1, 2), cos, sin)
        v = self.v_proj(x).view(batch, tokens, -1, self.head).transpose(1, 2)
        x = attend(q, k, v, kind=self.kind, dropout=0.0)
        return self.o_proj(x.transpose(1, 2).reshape(batch, tokens, -1))


class MLP(nn.Module):
    def __init__(self, plan: Plan) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(plan.model.hidden, plan.model.ffn, bias=False)
        self.up_proj = nn.Linear(plan.model.hidden, plan.model.ffn, bias=False)
        self.down_proj = nn.Linear(plan.model.ffn, plan.model.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    def __init__(self, plan: Plan) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(plan.model.hidden, eps=1e-5)
        self.self_attn = Attention(plan)
        self.post_attention_layernorm = nn.RMSNorm(plan.model.hidden, eps=1e-5)
        self.mlp = MLP(plan)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class Llama(nn.Module):
    """Token ids ``[batch, tokens]`` to logits ``[batch, tokens, vocab]``."""

    def __init__(self, plan: Plan) -> None:
        super().__init__()
        self.plan, self.head = plan, plan.model.hidden // plan.model.heads
        self.embed_tokens = nn.Embedding(plan.model.vocab, plan.model.hidden)
        self.layers = nn.ModuleList(Block(plan) for _ in range(plan.model.layers))
        self.norm = nn.RMSNorm(plan.model.hidden, eps=1e-5)
        self.lm_head = nn.Linear(plan.model.hidden, plan.model.vocab, bias=False)

    def forward(self, ids: Tensor) -> Tensor | list[Tensor]:
        x = self.embed_tokens(ids)
        cos, sin = rotary_tables(ids.shape[1], self.head, x)
        for block in self.layers:
            x = block(x, cos, sin)
        return head(self.lm_head, self.norm(x), self.plan)
