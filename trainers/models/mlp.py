"""A stack of layers with a classifier on top."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from memcalc.plan import Plan

__all__ = ["MLP"]


_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu, "tanh": torch.tanh, "sigmoid": torch.sigmoid, "gelu": F.gelu, "silu": F.silu, "elu": F.elu,
    "selu": F.selu, "leaky_relu": F.leaky_relu, "softplus": F.softplus, "mish": F.mish, "identity": lambda x: x,
}  # fmt: skip


class Layer(nn.Module):
    def __init__(self, inputs: int, width: int, plan: Plan) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, width)
        self.norm = nn.BatchNorm1d(width) if plan.model.batch_norm else None
        self.activation, self.dropout = _ACTIVATIONS[plan.model.activation or "relu"], plan.dropout

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        if self.norm is not None:
            x = self.norm(x)
        return F.dropout(self.activation(x), self.dropout, self.training)


class MLP(nn.Module):
    """Samples ``[batch, features]`` to class scores ``[batch, classes]``."""

    def __init__(self, plan: Plan) -> None:
        super().__init__()
        model = plan.model
        widths = [model.features, *(model.widths or [model.hidden] * model.layers)]
        self.layers = nn.ModuleList(Layer(*pair, plan) for pair in zip(widths, widths[1:], strict=False))
        self.head = nn.Linear(widths[-1], model.classes)

    def enter(self, x: Tensor) -> Tensor:
        """What the first layer takes."""
        return x

    def through(self, x: Tensor) -> Tensor:
        """The layers that are here."""
        for layer in self.layers:
            x = layer(x)
        return x

    def leave(self, x: Tensor) -> Tensor:
        """Scores of what the last layer gives."""
        return self.head(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.leave(self.through(self.enter(x)))
