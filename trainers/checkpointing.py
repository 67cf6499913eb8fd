"""Activation checkpointing, put around a model's blocks from outside."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from memcalc.checkpointing import matrix_products
from memcalc.plan import Plan
from trainers.models import units
from trainers.models.module import checkpoint_units

__all__ = ["Consecutive", "Segment", "checkpoint_blocks", "want_input_gradients"]

_OPERATIONS = {
    torch.ops.aten.mm.default: "mm",
    torch.ops.aten.addmm.default: "addmm",
    torch.ops.aten._scaled_dot_product_flash_attention.default: "attention",
    torch.ops.aten._scaled_dot_product_efficient_attention.default: "attention",
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default: "attention",
}


class Consecutive(nn.Sequential):
    """Blocks one after the other."""

    def forward(self, x: Tensor, *shared: Tensor) -> Any:
        """``x`` through all blocks; ``shared`` are tensors that every block takes."""
        for block in self:
            x = block(x, *shared)
        return x


class Segment(Consecutive):
    """Consecutive blocks that keep only their common input and run again in backward."""

    def __init__(self, blocks: list[nn.Module], plan: Plan) -> None:
        super().__init__(*blocks)
        # Without dropout nothing random happens inside, and the saved generator state would only cost memory.
        self.reentrant, random = plan.reentrant, plan.dropout > 0 or plan.adapter.dropout > 0
        self.checkpoint = partial(checkpoint, use_reentrant=plan.reentrant, preserve_rng_state=random)
        if plan.checkpointing.policy == "matrix-products":
            self.checkpoint = partial(self.checkpoint, context_fn=_keep_matrix_products)

    def forward(self, x: Tensor, *shared: Tensor) -> Any:
        """``x`` through all blocks; ``shared`` are tensors that every block takes."""
        if self.reentrant and self.training and not x.requires_grad:
            # The reentrant form gives no gradients to weights unless an input wants one.
            x = x.detach().requires_grad_()
        return self.checkpoint(super().forward, x, *shared)


def checkpoint_blocks(model: nn.Module, plan: Plan, start: int = 0) -> None:
    """Replace each ``plan.checkpoint_every`` blocks by a Segment; 0 leaves the model as it is.

    ``start`` is the place in the whole model of the first block here.
    """
    if not plan.checkpoint_every:
        return
    blocks = units(model, plan)
    if not isinstance(blocks, nn.ModuleList):
        checkpoint_units(model, plan)
        return
    every = plan.checkpoint_every
    segments = [blocks[first : first + every] for first in range(0, len(blocks), every)]
    wrapped = [
        Segment(list(part), plan)
        if plan.checkpointing.covers(start // every + index)
        else part[0]
        if every == 1
        else Consecutive(*part)
        for index, part in enumerate(segments)
    ]
    del blocks[:]
    blocks.extend(wrapped)


def want_input_gradients(model: nn.Module, plan: Plan) -> None:
    """Make the input of the first block want a gradient, as enable_input_require_grads of transformers does."""
    if plan.adapter.input_gradients:
        units(model, plan)[0].register_forward_pre_hook(_require_gradient)


def _require_gradient(module: nn.Module, inputs: tuple[Any, ...]) -> None:
    if not inputs[0].requires_grad:
        inputs[0].requires_grad_()


def _keep_matrix_products() -> Any:
    """The contexts of one selective checkpoint: memcalc's policy, asked about torch's operations."""
    keeps = matrix_products()

    def policy(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        name = _OPERATIONS.get(operation, "")
        return CheckpointPolicy.MUST_SAVE if name and keeps(name) else CheckpointPolicy.PREFER_RECOMPUTE

    # torch before 2.13 asks again while it recomputes.
    return create_selective_checkpoint_contexts(policy)
