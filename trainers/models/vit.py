"""Vision Transformer (Dosovitskiy et al. 2021) for one device; names and shapes are close to timm's."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from memcalc.plan import Plan
from trainers.models.layers import attend

__all__ = ["ViT"]

_EPS = 1e-6


class Attention(nn.Module):
    def __init__(self, plan: Plan) -> None:
        super().__init__()
        self.plan, self.heads, self.dropout = plan, plan.model.heads, plan.dropout
        self.qkv = nn.Linear(plan.model.hidden, 3 * plan.model.hidden)
        self.proj = nn.Linear(plan.model.hidden, plan.model.hidden)

    def forward(self, x: Tensor) -> Tensor:
        batch, places, width = x.shape
        q, k, v = (
            part.view(batch, places, self.heads, width // self.heads).transpose(1, 2)
            for part in self.qkv(x).split(width, dim=2)
        )
        x = attend(q, k, v, plan=self.plan, dropout=self.dropout if self.training else 0.0, causal=False)
        x = x.transpose(1, 2).reshape(batch, places, width)
        return F.dropout(self.proj(x), self.dropout, self.training)


class MLP(nn.Module):
    def __init__(self, plan: Plan) -> None:
        super().__init__()
        self.dropout = plan.dropout
        self.fc1 = nn.Linear(plan.model.hidden, plan.model.ffn)
        self.fc2 = nn.Linear(plan.model.ffn, plan.model.hidden)

    def forward(self, x: Tensor) -> Tensor:
        x = F.gelu(self.fc1(x))
        return F.dropout(self.fc2(x), self.dropout, self.training)


class Block(nn.Module):
    def __init__(self, plan: Plan) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(plan.model.hidden, eps=_EPS)
        self.attn = Attention(plan)
        self.norm2 = nn.LayerNorm(plan.model.hidden, eps=_EPS)
        self.mlp = MLP(plan)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class ViT(nn.Module):
    """Images as rows ``[batch, channels * height * width]`` to class scores ``[batch, classes]``."""

    def __init__(self, plan: Plan) -> None:
        super().__init__()
        model = plan.model
        self.pixels, self.dropout = (model.channels, model.image, model.image), plan.dropout
        self.cls_token = nn.Parameter(torch.zeros(1, 1, model.hidden))
        self.pos_embed = nn.Parameter(torch.zeros(1, (model.image // model.patch) ** 2 + 1, model.hidden))
        self.patch_embed = nn.Conv2d(model.channels, model.hidden, model.patch, stride=model.patch)
        self.blocks = nn.ModuleList(Block(plan) for _ in range(model.layers))
        self.norm = nn.LayerNorm(model.hidden, eps=_EPS)
        self.head = nn.Linear(model.hidden, model.classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch_embed(x.view(-1, *self.pixels)).flatten(2).transpose(1, 2)
        x = torch.cat((self.cls_token.expand(len(x), -1, -1), x), dim=1)
        x = F.dropout(x + self.pos_embed, self.dropout, self.training)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)[:, 0])
