"""Consecutive layers of a model: what one stage of a pipeline runs."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor, nn

from memcalc.plan import Plan
from memcalc.spec import Weight
from memcalc.stages import Stage, Stretch, stage_weights
from trainers.checkpointing import checkpoint_blocks
from trainers.models import units

__all__ = ["Layers", "cut"]


class Layers(nn.Module):
    """A stretch of a model; the first one takes a batch, the last one gives the model's output."""

    def __init__(
        self, model: Any, stretch: Stretch, plan: Plan, autocast: Callable[[], AbstractContextManager[object]]
    ) -> None:
        super().__init__()
        self.model, self.stretch, self.autocast = model, stretch, autocast
        self.wide = plan.loss.float32_output

    def forward(self, x: Tensor) -> Any:
        """The stream ``[batch, tokens, hidden]``, or at the ends of the model what it reads and says."""
        with self.autocast():
            if self.stretch.first:
                x = self.model.enter(x)
            x = self.model.through(x)
            if not self.stretch.last:
                return x
            output = self.model.leave(x)
            return output.float() if self.wide else output


def cut(model: nn.Module, plan: Plan, stretch: Stretch) -> tuple[nn.Module, list[Weight]]:
    """A copy of a model on meta without what lies outside of the stretch, and the weights that are left, in order."""
    part = copy.deepcopy(model)
    blocks = units(part, plan)
    kept = list(blocks[stretch.start : stretch.stop])
    del blocks[:]
    blocks.extend(kept)
    alone = Stage(index=0, of=plan.layout.pipeline, chunks=(stretch,))
    weights = stage_weights(plan.weights, alone, plan.model.tied)
    ends = {weight.name.split(".")[0] for weight in weights}
    for name, child in list(part.named_children()):
        if child is not blocks and name not in ends:
            setattr(part, name, None)
    checkpoint_blocks(part, plan, stretch.start)
    return part, weights
