"""GPT-2 (Radford et al. 2019) for one device; names and shapes are those of the published checkpoints."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from memcalc.plan import Plan
from trainers.models.layers import attend, gelu, head

__all__ = ["GPT2"]


class Attention(nn.Module):
    def __init__(self, plan: Plan) -> None:
        super().__init__()
        self.plan, self.heads, self.dropout = plan, plan.model.heads, plan.dropout
        self.width = self.heads * plan.model.head_width
        self.c_attn = nn.Linear(plan.model.hidden, 3 * self.width)
        self.c_proj = nn.Linear(self.width, plan.model.hidden)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, _ = x.shape
        q, k, v = (
            part.view(batch, tokens, self.heads, -1).transpose(1, 2) for part in self.c_attn(x).split(self.width, dim=2)
        )
        x = attend(q, k, v, plan=self.plan, dropout=self.dropout if self.training else 0.0)
        x = x.transpose(1, 2).reshape(batch, tokens, self.width)
        return F.dropout(self.c_proj(x), self.dropout, self.training)


class MLP(nn.Module):
    def __init__(self, plan: Plan) -> None:
        super().__init__()
        self.plan, self.dropout = plan, plan.dropout
        self.c_fc = nn.Linear(plan.model.hidden, plan.model.ffn)
        self.c_proj = nn.Linear(plan.model.ffn, plan.model.hidden)

    def forward(self, x: Tensor) -> Tensor:
        x = gelu(self.c_fc(x), self.plan)
        return F.dropout(self.c_proj(x), self.dropout, self.training)


class Block(nn.Module):
    def __init__(self, plan: Plan) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(plan.model.hidden)
        self.attn = Attention(plan)
        self.ln_2 = nn.LayerNorm(plan.model.hidden)
        self.mlp = MLP(plan)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT2(nn.Module):
    """Token ids ``[batch, tokens]`` to logits ``[batch, tokens, vocab]``."""

    def __init__(self, plan: Plan) -> None:
        super().__init__()
        self.plan = plan
        self.wte = nn.Embedding(plan.model.vocab, plan.model.hidden)
        self.wpe = nn.Embedding(plan.model.context, plan.model.hidden)
        self.dropout = plan.dropout
        self.h = nn.ModuleList(Block(plan) for _ in range(plan.model.layers))
        self.ln_f = nn.LayerNorm(plan.model.hidden)

    def enter(self, ids: Tensor) -> Tensor:
        """What the first block takes."""
        places = torch.arange(ids.shape[1], device=ids.device)
        return F.dropout(self.wte(ids) + self.wpe(places), self.dropout, self.training)

    def through(self, x: Tensor) -> Tensor:
        """The blocks that are here."""
        for block in self.h:
            x = block(x)
        return x

    def leave(self, x: Tensor) -> Tensor | list[Tensor]:
        """Logits of what the last block gives."""
        return head(lambda x: F.linear(x, self.wte.weight), self.ln_f(x), self.plan)

    def forward(self, ids: Tensor) -> Tensor | list[Tensor]:
        return self.leave(self.through(self.enter(ids)))
