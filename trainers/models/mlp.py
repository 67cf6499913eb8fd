"""A stack of layers of equal width, with a classifier on top."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from memcalc.plan import Plan

__all__ = ["MLP"]


class Layer(nn.Module):
    def __init__(self, inputs: int, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, width)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.linear(x))


class MLP(nn.Module):
    """Samples ``[batch, features]`` to class scores ``[batch, classes]``."""

    def __init__(self, plan: Plan) -> None:
        super().__init__()
        model = plan.model
        widths = [model.features, *[model.hidden] * model.layers]
        self.layers = nn.ModuleList(Layer(*pair) for pair in zip(widths, widths[1:], strict=False))
        self.head = nn.Linear(model.hidden, model.classes)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)
