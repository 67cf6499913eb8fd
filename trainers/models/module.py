"""A module of the user's own, as the trainers use it: built, called, and its output made a loss of."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from memcalc.errors import PlanError
from memcalc.plan import Plan
from trainers.blocks import module_of
from trainers.factories import build_for_real, build_on_meta, retie, shared

__all__ = ["build", "call", "checkpoint_units", "loss_of", "materialise", "module_units", "scores"]


def build(plan: Plan) -> nn.Module:
    """The module on meta; its float32 weights in the dtype of the plan's. Raises PlanError where it is another by now."""
    module = build_on_meta(plan.model.module.factory)
    found = {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}
    planned = {weight.name: weight.shape for weight in plan.model.module.weights}
    if found != planned:
        other = next(name for name in [*planned, *found] if found.get(name) != planned.get(name))
        raise PlanError(
            f"{plan.model.module.factory} is not the module of the plan any more: {other} is {_said(found.get(other))}, "
            f"in the plan {_said(planned.get(other))}; make the plan anew"
        )
    _cast(module, plan)
    return module


def _said(shape: tuple[int, ...] | None) -> str:
    return "missing" if shape is None else "x".join(map(str, shape)) or "one number"


def _cast(module: nn.Module, plan: Plan) -> None:
    dtype = getattr(torch, plan.precision_row.weights)
    if dtype == torch.float32:
        return
    ties = shared(module)
    module._apply(lambda tensor: tensor.to(dtype) if tensor.dtype == torch.float32 else tensor)
    retie(module, ties)


def module_units(model: nn.Module, plan: Plan) -> list[nn.Module]:
    """The units in the plan's groups, innermost first where they lie in each other, as ``fully_shard`` needs them."""
    groups = dict.fromkeys(weight.group for weight in plan.model.module.weights)
    names = sorted((group for group in groups if "." in group), key=lambda name: -name.count("."))
    return [module_of(model, name) for name in names]


def checkpoint_units(model: nn.Module, plan: Plan) -> None:
    """Let each unit keep only what it is called with, and run again in backward.

    A cache of keys and values would be filled twice so; transformers leaves it out, too (modeling_layers.py,
    GradientCheckpointingLayer).
    """
    for part in model.modules():
        config = getattr(part, "config", None)
        if config is not None and getattr(config, "use_cache", False) is True:
            config.use_cache = False
    for index, unit in enumerate(module_units(model, plan)):
        if plan.checkpointing.covers(index):
            unit.forward = partial(checkpoint, unit.forward, use_reentrant=False)


def materialise(
    model: nn.Module, plan: Plan, device: torch.device, seed: int, shard: Callable[[Tensor, Tensor], Tensor]
) -> None:
    """Give a model on meta its memory on ``device`` and the values that its own code gives it.

    ``shard`` cuts this rank's part out of a full tensor for a parameter. Tensors without values get none.
    """
    ties = shared(model)
    model.to_empty(device=device)
    retie(model, ties)
    from trainers.rehearsal import private  # which itself builds models

    if private.is_fake(private.local(next(model.parameters()))):
        return
    real = build_for_real(plan.model.module.factory, seed)
    ours, kept = list(model.parameters()), dict(model.named_buffers())
    with torch.no_grad():
        for (_, theirs), mine in zip(real.named_parameters(), ours, strict=True):
            local = mine.to_local() if hasattr(mine, "to_local") else mine
            local.copy_(shard(theirs.detach(), mine))
        for name, buffer in real.named_buffers():
            if name in kept:
                kept[name].copy_(buffer)


def call(model: nn.Module, inputs: Any) -> Any:
    """A batch through a model: keyword arguments from a mapping, several inputs from a tuple, one from a tensor."""
    if isinstance(inputs, Mapping):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, tuple | list) else model(inputs)


def own_loss(output: Any) -> Tensor | None:
    """The loss that a module has taken itself: a single number, or what it calls ``loss``."""
    found = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if found is None and isinstance(output, Tensor) and not output.ndim:
        return output
    return found if isinstance(found, Tensor) else None


def scores(output: Any) -> Tensor:
    """The tensor that a loss is taken of: the output, what it calls ``logits``, ``out`` or ``last_hidden_state``, or its first."""
    if isinstance(output, Tensor):
        return output
    for name in ("logits", "out", "last_hidden_state"):
        found = output.get(name) if isinstance(output, Mapping) else getattr(output, name, None)
        if isinstance(found, Tensor):
            return found
    parts = list(output.values()) if isinstance(output, Mapping) else output
    if isinstance(parts, tuple | list) and parts:
        return scores(parts[0])
    raise PlanError(f"the module returns {type(output).__name__}, in which there is no tensor to take a loss of")


def loss_of(output: Any, targets: Any, *, upcast: bool = True) -> Tensor:
    """The module's own loss; else the cross-entropy of scores and whole-numbered targets, else a mean square.

    Classes are in the last dimension, or in the second where targets have no such place. Without targets of its shape
    the mean square is of the output itself: that trains nothing of use, but takes the memory of training.
    """
    found = own_loss(output)
    if found is not None:
        return found
    made = scores(output)
    kind = loss_kind(made, targets)
    if kind == "cross-entropy":
        classes = made.shape[-1] if made.shape[:-1] == targets.shape else 0
        flat, wanted = (made.reshape(-1, classes), targets.reshape(-1)) if classes else (made, targets)
        return F.cross_entropy(flat.float() if upcast else flat, wanted)
    if kind == "mean-square":
        return F.mse_loss(made.float(), targets.float())
    return made.float().square().mean()


def loss_kind(made: Tensor, targets: Any) -> str:
    """``cross-entropy``, ``mean-square`` against targets, or ``mean-square of the output``."""
    if isinstance(targets, Tensor) and not targets.is_floating_point():
        last = made.shape[:-1] == targets.shape
        if last or (made.ndim == targets.ndim + 1 and (made.shape[0], *made.shape[2:]) == tuple(targets.shape)):
            return "cross-entropy"
    elif isinstance(targets, Tensor) and targets.shape == made.shape:
        return "mean-square"
    return "mean-square of the output"
