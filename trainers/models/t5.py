"""T5 (Raffel et al. 2020; gated GELU as in version 1.1) for one device."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from memcalc.plan import Plan
from trainers.models.layers import head, rms_norm

__all__ = ["T5"]

_FAR = 128
"""Distances from here on share the last bucket."""
_EPS = 1e-6


def buckets(tokens: int, count: int, causal: bool, device: torch.device) -> Tensor:
    """``[tokens, tokens]`` bucket of each query's distance to each key: one each when near, wider and wider when far."""
    place = torch.arange(tokens, device=device)
    distance = place[None, :] - place[:, None]
    offset = torch.zeros_like(distance)
    if causal:
        distance = (-distance).clamp(min=0)
    else:
        count //= 2
        offset, distance = (distance > 0).long() * count, distance.abs()
    near = max(count // 2, 1)
    far = near + (torch.log(distance.clamp(min=1) / near) / math.log(_FAR / near) * (count - near)).long()
    return offset + torch.where(distance < near, distance, far.clamp(max=count - 1))


class Attention(nn.Module):
    def __init__(self, plan: Plan) -> None:
        super().__init__()
        self.heads, self.dropout = plan.model.heads, plan.dropout
        hidden, inner = plan.model.hidden, plan.model.heads * plan.model.head_width
        self.q, self.k, self.v = (nn.Linear(hidden, inner, bias=False) for _ in range(3))
        self.o = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: Tensor, memory: Tensor, bias: Tensor | None) -> Tensor:
        """``bias`` is ``[1, heads, tokens, tokens]`` and is added to the scores, which are not scaled."""
        q, k, v = (self.split(part) for part in (self.q(x), self.k(memory), self.v(memory)))
        scores = q @ k.transpose(-2, -1)
        del q, k
        if bias is not None:
            scores += bias
        shares = scores.float().softmax(dim=-1).type_as(scores)
        del scores
        y = F.dropout(shares, self.dropout, self.training) @ v
        del shares, v
        return F.dropout(self.o(y.transpose(1, 2).reshape(*x.shape[:2], -1)), self.dropout, self.training)

    def split(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        return x.view(batch, tokens, self.heads, width // self.heads).transpose(1, 2)


class MLP(nn.Module):
    def __init__(self, plan: Plan) -> None:
        super().__init__()
        model, self.dropout, self.gated = plan.model, plan.dropout, plan.model.gated
        if self.gated:
            self.wi_0 = nn.Linear(model.hidden, model.ffn, bias=False)
            self.wi_1 = nn.Linear(model.hidden, model.ffn, bias=False)
        else:
            self.wi = nn.Linear(model.hidden, model.ffn, bias=False)
        self.wo = nn.Linear(model.ffn, model.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = F.gelu(self.wi_0(x), approximate="tanh") * self.wi_1(x) if self.gated else F.relu(self.wi(x))
        return F.dropout(self.wo(F.dropout(x, self.dropout, self.training)), self.dropout, self.training)


class Block(nn.Module):
    """A block of the encoder, or with ``cross`` attention one of the decoder."""

    def __init__(self, plan: Plan, cross: bool) -> None:
        super().__init__()
        hidden = plan.model.hidden
        self.attention_norm = rms_norm(plan, hidden, _EPS)
        self.attention = Attention(plan)
        self.cross_norm = rms_norm(plan, hidden, _EPS) if cross else None
        self.cross = Attention(plan) if cross else None
        self.mlp_norm = rms_norm(plan, hidden, _EPS)
        self.mlp = MLP(plan)

    def forward(self, x: Tensor, bias: Tensor, memory: Tensor | None = None) -> Tensor:
        y = self.attention_norm(x)
        x = x + self.attention(y, y, bias)
        del y
        if self.cross is not None and self.cross_norm is not None and memory is not None:
            x = x + self.cross(self.cross_norm(x), memory, None)
        return x + self.mlp(self.mlp_norm(x))


class T5(nn.Module):
    """Token ids ``[batch, 2 * tokens]``, the encoder's and then the decoder's, to logits ``[batch, tokens, vocab]``."""

    def __init__(self, plan: Plan) -> None:
        super().__init__()
        self.plan, model = plan, plan.model
        self.dropout, self.count = plan.dropout, model.buckets
        self.encoding = model.layers // max(plan.checkpoint_every, 1)
        self.scale = model.hidden**-0.5
        self.shared = nn.Embedding(model.vocab, model.hidden)
        self.encoder_bias = nn.Embedding(model.buckets, model.heads)
        self.decoder_bias = nn.Embedding(model.buckets, model.heads)
        self.blocks = nn.ModuleList(
            Block(plan, cross=layer >= model.layers) for layer in range(model.layers + model.decoder_layers)
        )
        self.encoder_norm = rms_norm(plan, model.hidden, _EPS)
        self.decoder_norm = rms_norm(plan, model.hidden, _EPS)
        self.lm_head = None if model.tied else nn.Linear(model.hidden, model.vocab, bias=False)

    def forward(self, ids: Tensor) -> Tensor | list[Tensor]:
        first, second = ids.chunk(2, dim=1)
        memory = self.encode(first)
        bias = self.bias(self.decoder_bias, second, causal=True)
        x = self.drop(self.shared(second))
        for block in self.blocks[self.encoding :]:
            x = block(x, bias, memory)
        del bias, memory
        x = self.drop(self.decoder_norm(x))
        if self.lm_head is not None:
            return head(self.lm_head, x, self.plan)
        return head(lambda x: F.linear(x, self.shared.weight), x * self.scale, self.plan)

    def encode(self, ids: Tensor) -> Tensor:
        """The encoder's output ``[batch, tokens, hidden]``."""
        bias = self.bias(self.encoder_bias, ids, causal=False)
        x = self.drop(self.shared(ids))
        for block in self.blocks[: self.encoding]:
            x = block(x, bias)
        return self.drop(self.encoder_norm(x))

    def bias(self, table: nn.Embedding, ids: Tensor, causal: bool) -> Tensor:
        """``[1, heads, tokens, tokens]``, with minus infinity where a query must not look."""
        tokens = ids.shape[1]
        bias = table(buckets(tokens, self.count, causal, ids.device)).permute(2, 0, 1).unsqueeze(0)
        if causal:
            mask = torch.full((tokens, tokens), float("-inf"), dtype=bias.dtype, device=ids.device).triu(1)
            bias = bias + mask
        return bias

    def drop(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.dropout, self.training)
