"""BERT with its masked-language-model head (Devlin et al. 2019) for one device; shapes are those of the published checkpoints."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from memcalc.plan import Plan
from trainers.models.layers import attend, head

__all__ = ["BERT"]

_EPS = 1e-12


class Embeddings(nn.Module):
    def __init__(self, plan: Plan) -> None:
        super().__init__()
        model, self.dropout = plan.model, plan.dropout
        self.word_embeddings = nn.Embedding(model.vocab, model.hidden)
        self.position_embeddings = nn.Embedding(model.context, model.hidden)
        self.token_type_embeddings = nn.Embedding(model.types, model.hidden)
        self.LayerNorm = nn.LayerNorm(model.hidden, eps=_EPS)

    def forward(self, ids: Tensor) -> Tensor:
        """One segment: every token is of type 0."""
        x = self.word_embeddings(ids) + self.token_type_embeddings(torch.zeros_like(ids))
        x = x + self.position_embeddings(torch.arange(ids.shape[1], device=ids.device))
        return F.dropout(self.LayerNorm(x), self.dropout, self.training)


class Attention(nn.Module):
    def __init__(self, plan: Plan) -> None:
        super().__init__()
        hidden = plan.model.hidden
        self.plan, self.heads, self.dropout = plan, plan.model.heads, plan.dropout
        self.query, self.key, self.value = (nn.Linear(hidden, hidden) for _ in range(3))
        self.dense = nn.Linear(hidden, hidden)
        self.LayerNorm = nn.LayerNorm(hidden, eps=_EPS)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        q, k, v = (
            part(x).view(batch, tokens, self.heads, width // self.heads).transpose(1, 2)
            for part in (self.query, self.key, self.value)
        )
        y = attend(q, k, v, plan=self.plan, dropout=self.dropout if self.training else 0.0, causal=False)
        del q, k, v
        y = self.dense(y.transpose(1, 2).reshape(batch, tokens, width))
        return self.LayerNorm(x + F.dropout(y, self.dropout, self.training))


class Block(nn.Module):
    def __init__(self, plan: Plan) -> None:
        super().__init__()
        model, self.dropout = plan.model, plan.dropout
        self.attention = Attention(plan)
        self.intermediate = nn.Linear(model.hidden, model.ffn)
        self.output = nn.Linear(model.ffn, model.hidden)
        self.LayerNorm = nn.LayerNorm(model.hidden, eps=_EPS)

    def forward(self, x: Tensor) -> Tensor:
        x = self.attention(x)
        y = self.output(F.gelu(self.intermediate(x)))
        return self.LayerNorm(x + F.dropout(y, self.dropout, self.training))


class Predictions(nn.Module):
    """``[..., hidden]`` to scores over the vocabulary, by the word table and a bias of its own."""

    def __init__(self, plan: Plan) -> None:
        super().__init__()
        self.plan = plan
        self.dense = nn.Linear(plan.model.hidden, plan.model.hidden)
        self.LayerNorm = nn.LayerNorm(plan.model.hidden, eps=_EPS)
        self.bias = nn.Parameter(torch.zeros(plan.model.vocab))

    def forward(self, x: Tensor, table: Tensor) -> Tensor | list[Tensor]:
        x = self.LayerNorm(F.gelu(self.dense(x)))
        return head(lambda x: F.linear(x, table, self.bias), x, self.plan)


class BERT(nn.Module):
    """Token ids ``[batch, tokens]`` to logits ``[batch, tokens, vocab]``."""

    def __init__(self, plan: Plan) -> None:
        super().__init__()
        self.embeddings = Embeddings(plan)
        self.layer = nn.ModuleList(Block(plan) for _ in range(plan.model.layers))
        self.predictions = Predictions(plan)

    def forward(self, ids: Tensor) -> Tensor | list[Tensor]:
        x = self.embeddings(ids)
        for block in self.layer:
            x = block(x)
        return self.predictions(x, self.embeddings.word_embeddings.weight)
