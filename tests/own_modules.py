"""Modules that somebody wrote without a thought of memcalc, for the tests: small ones, and ones that misbehave."""

from __future__ import annotations

import os
import sys
import time
from typing import Any

import torch
from torch import Tensor, nn


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.narrow(torch.relu(self.wide(self.norm(x))))


class Stack(nn.Module):
    """Twelve numbers a sample to ten scores."""

    def __init__(self, width: int = 32, blocks: int = 3) -> None:
        super().__init__()
        self.enter = nn.Linear(12, width)
        self.layers = nn.ModuleList(Block(width) for _ in range(blocks))
        self.leave = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for layer in self.layers:
            x = layer(x)
        return self.leave(x)


class Comparing(torch.autograd.Function):
    """A backward pass that depends on values."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient if gradient.sum() > 0 else gradient * gradient.new_zeros(10**9).sum()


class BranchingBack(Stack):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(Comparing.apply(self.enter(x)) @ self.enter.weight)


class Keeping(Stack):
    """Keeps a tensor of every call."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.kept.append(x.new_zeros(1000))
        return super().forward(x)


class Hosting(Stack):
    """Makes tensors on the host in each forward pass, and moves some."""

    def forward(self, x: Tensor) -> Tensor:
        left = torch.zeros(10**6) + 1
        said = torch.ones(10**6, device="cpu").exp()
        moved = torch.zeros(1000).to(x.device).sum()
        used, listed = torch.arange(len(x)), torch.tensor([0.5] * 3000).to(x.device)
        kept = torch.zeros(500, device=x.device)
        return super().forward(x[used]) + moved + kept.sum() + listed.mean() + 0 * float(len(left) + len(said))


class Tied(nn.Module):
    """Tokens to scores: the head is the embedding, one layer is used four times, and the middle one is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(300, 16)
        self.layers = nn.ModuleList([nn.Linear(16, 16)] * 4)
        self.frozen = nn.Linear(16, 16).requires_grad_(False)
        self.head = nn.Linear(16, 300, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x).tanh()
        return self.head(self.frozen(x))


class Convolutions(nn.Module):
    """Pictures to scores, with running statistics, and no list of blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU())
        self.second = nn.Sequential(nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8), nn.ReLU())
        self.scores = nn.Linear(8, 5)

    def forward(self, pictures: Tensor) -> Tensor:
        return self.scores(self.second(self.first(pictures)).mean((2, 3)))


class Recurrent(nn.Module):
    """One small layer used a hundred times, as in https://github.com/TylerYep/torchinfo/issues/144."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.Linear(24, 16)

    def forward(self, x: Tensor) -> Tensor:
        state = x.new_zeros(len(x), 16)
        for _ in range(100):
            state = torch.tanh(self.cell(torch.cat([x, state], 1)))
        return state


class Losing(nn.Module):
    """Takes its own loss, and says it by name."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(48, 48)

    def forward(self, x: Tensor, scale: float = 1.0) -> dict[str, Tensor]:
        made = self.layer(x) * scale
        return {"logits": made, "loss": made.square().mean()}


class Branching(Stack):
    """Goes another way by what its numbers are."""

    def forward(self, x: Tensor) -> Tensor:
        made = super().forward(x)
        return made.relu() if made.sum() > 0 else made


class Picking(Stack):
    """Makes a tensor whose size depends on numbers."""

    def forward(self, x: Tensor) -> Tensor:
        made = super().forward(x)
        return made[made > 0].sum()


class Net(nn.Module):
    """``Net(Layer(Linear(3, 5)), Linear(5, 5))`` of https://github.com/TylerYep/torchinfo/issues/366."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.ModuleDict({"inner": nn.Linear(3, 5)})
        self.own = nn.ParameterList([nn.Parameter(torch.zeros(5, 5)), nn.Parameter(torch.zeros(5))])

    def forward(self, x: Tensor) -> Tensor:
        return self.layer["inner"](x) @ self.own[0] + self.own[1]


def large() -> nn.Module:
    """Linear(10000, 50000), 2 GB, which no test builds for real."""
    return nn.Linear(10000, 50000)


def lazy() -> nn.Module:
    return nn.LazyLinear(3)


def half() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4).to(torch.bfloat16).requires_grad_(False), nn.Linear(4, 4))


def frozen() -> nn.Module:
    return nn.Linear(2, 2).requires_grad_(False)


def not_on_meta() -> nn.Module:
    """Looks at numbers while it is built, as drop-path rates often are."""
    return Stack(blocks=len([rate.item() for rate in torch.linspace(0, 1, 2)]))


def samples(count: int) -> tuple[dict[str, Tensor], Tensor]:
    return {"x": torch.randn(count, 12)}, torch.zeros(count, dtype=torch.int64)


def losing_samples(count: int) -> dict[str, object]:
    return {"x": torch.randn(count, 48), "scale": 2.0}


def noisy() -> nn.Module:
    print("{not json}")
    os.system("echo from a child of the child")
    return Stack()


def raises() -> nn.Module:
    raise ValueError("what the author said\nand a second line")


def exits() -> nn.Module:
    sys.exit(3)


def exits_at_once() -> nn.Module:
    os._exit(7)


def sleeps() -> nn.Module:
    time.sleep(600)
    return Stack()


def nothing() -> None:
    """Forgets to return the module."""


def a_dict() -> dict[str, object]:
    return {}


made_already = nn.Linear(2, 2)
number = 3


class Sequences(nn.Module):
    """Sequences of 16 numbers to scores, by two layers of an LSTM."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(16, 64, 2, batch_first=True)
        self.leave = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.leave(self.lstm(x)[0][:, -1])


def detaches() -> nn.Module:
    """Leaves a process out of reach of signals to its group."""
    if os.fork() == 0:
        os.setsid()
        time.sleep(600)
        os._exit(0)
    return Stack()
