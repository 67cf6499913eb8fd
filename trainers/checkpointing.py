"""Activation checkpointing, put around a model's blocks from outside."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from memcalc.plan import Plan
from trainers.models import units

__all__ = ["Segment", "checkpoint_blocks"]


class Segment(nn.Sequential):
    """Consecutive blocks that keep only their common input and run again in backward."""

    def __init__(self, blocks: list[nn.Module], plan: Plan) -> None:
        super().__init__(*blocks)
        # Without dropout nothing random happens inside, and the saved generator state would only cost memory.
        self.reentrant, random = plan.reentrant, plan.dropout > 0
        self.checkpoint = partial(checkpoint, use_reentrant=plan.reentrant, preserve_rng_state=random)

    def forward(self, x: Tensor, *shared: Tensor) -> Any:
        """``x`` through all blocks; ``shared`` are tensors that every block takes."""
        if self.reentrant and self.training and not x.requires_grad:
            # The reentrant form gives no gradients to weights unless an input wants one.
            x = x.detach().requires_grad_()
        return self.checkpoint(self.run, x, *shared)

    def run(self, x: Tensor, *shared: Tensor) -> Tensor:
        """The blocks one after the other."""
        for block in self:
            x = block(x, *shared)
        return x


def checkpoint_blocks(model: nn.Module, plan: Plan) -> None:
    """Replace each ``plan.checkpoint_every`` blocks by a Segment; 0 leaves the model as it is."""
    if not plan.checkpoint_every:
        return
    blocks = units(model, plan)
    every = plan.checkpoint_every
    segments = [Segment(list(blocks[first : first + every]), plan) for first in range(0, len(blocks), every)]
    del blocks[:]
    blocks.extend(segments)
