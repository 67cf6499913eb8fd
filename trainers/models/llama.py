"""Llama (Touvron et al. 2023; grouped queries as in Llama 2 70B and Llama 3) for one device."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from memcalc.plan import Plan
from trainers.models.layers import attend, head, rms_norm

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
        model, self.plan, self.head = plan.model, plan, plan.model.head_width
        self.widths = [heads * self.head for heads in (model.heads, model.kv_heads, model.kv_heads)]
        bias = "qkv" in model.biases
        if model.fused_qkv:
            self.qkv_proj = nn.Linear(model.hidden, sum(self.widths), bias=bias)
        else:
            self.q_proj, self.k_proj, self.v_proj = (nn.Linear(model.hidden, width, bias=bias) for width in self.widths)
        self.o_proj = nn.Linear(self.widths[0], model.hidden, bias=False)
        if model.qk_norm:
            self.q_norm, self.k_norm = (rms_norm(plan, self.head, 1e-6) for _ in range(2))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, tokens, _ = x.shape
        if self.plan.model.fused_qkv:
            q, k, v = self.qkv_proj(x).split(self.widths, dim=-1)
            q, k = self.place(q, "q_norm", cos, sin), self.place(k, "k_norm", cos, sin)
        else:
            q = self.place(self.q_proj(x), "q_norm", cos, sin)
            k = self.place(self.k_proj(x), "k_norm", cos, sin)
            v = self.v_proj(x)
        v = v.view(batch, tokens, -1, self.head).transpose(1, 2)
        x = attend(q, k, v, plan=self.plan, dropout=0.0)
        return self.o_proj(x.transpose(1, 2).reshape(batch, tokens, -1))

    def place(self, x: Tensor, norm: str, cos: Tensor, sin: Tensor) -> Tensor:
        """Queries or keys ``[batch, tokens, width]`` by head, with their norm and positions."""
        x = x.view(*x.shape[:2], -1, self.head)
        if self.plan.model.qk_norm:
            x = getattr(self, norm)(x)
        return rotate(x.transpose(1, 2), cos, sin)


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
        self.input_layernorm = rms_norm(plan, plan.model.hidden, 1e-5)
        self.self_attn = Attention(plan)
        self.post_attention_layernorm = rms_norm(plan, plan.model.hidden, 1e-5)
        self.mlp = MLP(plan)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class Llama(nn.Module):
    """Token ids ``[batch, tokens]`` to logits ``[batch, tokens, vocab]``."""

    def __init__(self, plan: Plan) -> None:
        super().__init__()
        self.plan, self.head = plan, plan.model.head_width
        self.embed_tokens = nn.Embedding(plan.model.vocab, plan.model.hidden)
        self.layers = nn.ModuleList(Block(plan) for _ in range(plan.model.layers))
        self.norm = rms_norm(plan, plan.model.hidden, 1e-5)
        self.lm_head = None if plan.model.tied else nn.Linear(plan.model.hidden, plan.model.vocab, bias=False)

    def enter(self, ids: Tensor) -> Tensor:
        """What the first block takes."""
        return self.embed_tokens(ids)

    def through(self, x: Tensor) -> Tensor:
        """The blocks that are here. Sequence parallel leaves a rank fewer tokens in the stream than it rotates."""
        cos, sin = rotary_tables(self.plan.tokens, self.head, x)
        for block in self.layers:
            x = block(x, cos, sin)
        return x

    def leave(self, x: Tensor) -> Tensor | list[Tensor]:
        """Logits of what the last block gives."""
        product = self.lm_head or partial(F.linear, weight=self.embed_tokens.weight)
        return head(product, self.norm(x), self.plan)

    def forward(self, ids: Tensor) -> Tensor | list[Tensor]:
        return self.leave(self.through(self.enter(ids)))
