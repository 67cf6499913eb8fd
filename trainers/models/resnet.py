"""ResNet (He et al. 2016; stride in the 3x3 convolution, as torchvision has it) for one device."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from memcalc.plan import Plan

__all__ = ["ResNet"]

_EXPANSION = 4


class Block(nn.Module):
    """``relu(f(x) + shortcut(x))`` with two 3x3 convolutions in f, or a 3x3 one between two of 1x1."""

    def __init__(self, inputs: int, inside: int, outputs: int, stride: int, bottleneck: bool) -> None:
        super().__init__()
        shapes = [(inputs, inside, 3, stride), (inside, outputs, 3, 1)]
        if bottleneck:
            shapes = [(inputs, inside, 1, 1), (inside, inside, 3, stride), (inside, outputs, 1, 1)]
        self.depth, self.projects = len(shapes), stride > 1 or inputs != outputs
        for index, (i, o, kernel, step) in enumerate(shapes, 1):
            self.add_module(f"conv{index}", nn.Conv2d(i, o, kernel, step, kernel // 2, bias=False))
            self.add_module(f"bn{index}", nn.BatchNorm2d(o))
        if self.projects:
            self.conv_shortcut = nn.Conv2d(inputs, outputs, 1, stride, bias=False)
            self.bn_shortcut = nn.BatchNorm2d(outputs)

    def forward(self, x: Tensor) -> Tensor:
        y = x
        for index in range(1, self.depth + 1):
            y = getattr(self, f"bn{index}")(getattr(self, f"conv{index}")(y))
            if index < self.depth:
                y = F.relu(y, inplace=True)
        if self.projects:
            x = self.bn_shortcut(self.conv_shortcut(x))
        y += x
        return F.relu(y, inplace=True)


class ResNet(nn.Module):
    """Images as rows ``[batch, channels * height * width]`` to class scores ``[batch, classes]``."""

    def __init__(self, plan: Plan) -> None:
        super().__init__()
        model = plan.model
        self.pixels = (model.channels, model.image, model.image)
        self.conv1 = nn.Conv2d(model.channels, model.hidden, 7, 2, 3, bias=False)
        self.bn1 = nn.BatchNorm2d(model.hidden)
        self.blocks = nn.ModuleList()
        inputs = model.hidden
        for stage, count in enumerate(model.stages):
            inside = model.hidden * 2**stage
            outputs = inside * (_EXPANSION if model.bottleneck else 1)
            for number in range(count):
                stride = 2 if stage and not number else 1
                self.blocks.append(Block(inputs, inside, outputs, stride, model.bottleneck))
                inputs = outputs
        self.fc = nn.Linear(inputs, model.classes)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn1(self.conv1(x.view(-1, *self.pixels))), inplace=True)
        x = F.max_pool2d(x, 3, 2, 1)
        for block in self.blocks:
            x = block(x)
        return self.fc(F.adaptive_avg_pool2d(x, 1).flatten(1))
