"""The torch modules of the families memcalc can train, written for one device."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from memcalc.errors import PlanError
from memcalc.plan import Plan
from memcalc.spec import Weight
from trainers.models import module as own
from trainers.models.bert import BERT
from trainers.models.gpt2 import GPT2
from trainers.models.layers import cross_entropy
from trainers.models.llama import Llama
from trainers.models.mlp import MLP
from trainers.models.moe import MoE
from trainers.models.resnet import ResNet
from trainers.models.t5 import T5
from trainers.models.vit import ViT

__all__ = ["build", "criterion", "dtype_of", "initialise", "materialise", "units"]

_MODULES: dict[str, Callable[[Plan], nn.Module]] = {
    "bert": BERT, "gpt2": GPT2, "llama": Llama, "mlp": MLP, "moe": MoE, "resnet": ResNet, "t5": T5,
    "vit": ViT,
}  # fmt: skip
_BLOCKS = {
    "bert": "layer", "gpt2": "h", "llama": "layers", "mlp": "layers", "moe": "layers", "resnet": "blocks", "t5": "blocks",
    "vit": "blocks",
}  # fmt: skip
_RESIDUAL = (
    "c_proj.weight",
    "o_proj.weight",
    "down_proj.weight",
    "attn.proj.weight",
    "fc2.weight",
    ".o.weight",
    ".wo.weight",
)


def build(plan: Plan) -> nn.Module:
    """The plan's model on the meta device, in the dtype of its weights. Raises PlanError for a family without one."""
    if plan.model.module.factory:
        return own.build(plan)
    if plan.model.family not in _MODULES:
        raise PlanError(
            f"{plan.model.name} is known by its size only; a model to train needs a family: {', '.join(_MODULES)}"
        )
    with torch.device("meta"):
        return _MODULES[plan.model.family](plan).to(dtype_of(plan.precision_row.weights))


def units(model: nn.Module, plan: Plan) -> nn.ModuleList | list[nn.Module]:
    """The repeated parts of the model, which are checkpointed and sharded one by one."""
    if plan.model.module.factory:
        return own.module_units(model, plan)
    found = getattr(model, _BLOCKS[plan.model.family])
    assert isinstance(found, nn.ModuleList)
    return found


def materialise(
    model: nn.Module, plan: Plan, device: torch.device, seed: int, weights: Sequence[Weight] | None = None
) -> None:
    """Give a model on meta its memory on ``device`` and its first values; one that has memory keeps what is in it."""
    if not any(parameter.is_meta for parameter in model.parameters()):
        return
    if plan.model.module.factory:
        own.materialise(model, plan, device, seed, _shard)
        return
    model.to_empty(device=device)
    initialise(model, plan, seed, weights)


@torch.no_grad()
def initialise(model: nn.Module, plan: Plan, seed: int, weights: Sequence[Weight] | None = None) -> None:
    """Fill the parameters with values that depend on seed and name only, not on the strategy or the world.

    Each full tensor is made alone and only this rank's shard of it is kept, so that no rank ever holds the
    whole model. ``weights`` are those of a part of the model, in its order; None are all.
    """
    for weight, parameter in zip(plan.weights if weights is None else weights, model.parameters(), strict=True):
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        full = torch.empty(weight.shape, device=local.device, dtype=torch.float32)
        _fill(full, weight.name, plan, seed)
        local.copy_(_shard(full, parameter))
        del full
    for module in model.modules():
        if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d):
            module.reset_running_stats()


def _fill(full: Tensor, name: str, plan: Plan, seed: int) -> None:
    if name.endswith("lora_B.weight"):  # so that an adapter changes nothing at first
        full.fill_(0.0)
        return
    if full.ndim == 1:
        full.fill_(0.0 if name.endswith("bias") else 1.0)
        return
    # GPT-2 (Radford et al. 2019, section 2.3) scales what is added to the residual stream by depth; ReLU layers
    # keep the variance of their input with He et al. 2015, equation 10.
    std = math.sqrt(2 / full[0].numel()) if plan.model.family in ("mlp", "resnet") else 0.02
    if name.endswith(_RESIDUAL):
        std /= math.sqrt(2 * plan.model.layers)
    digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest()
    generator = torch.Generator(full.device).manual_seed(int.from_bytes(digest, "little") >> 1)
    full.normal_(0.0, std, generator=generator)


def _shard(full: Tensor, parameter: Tensor) -> Tensor:
    if not isinstance(parameter, DTensor):
        return full
    mesh = parameter.device_mesh
    sharded = [(place, at) for at, place in enumerate(parameter.placements) if hasattr(place, "dim")]
    # What both tensor parallel and FSDP divide by rows, FSDP, which comes first in the mesh, divides last: _StridedShard.
    for placement, dimension in sorted(sharded, key=lambda found: hasattr(found[0], "split_factor")):
        parts, rank = full.chunk(mesh.size(dimension), placement.dim), mesh.get_local_rank(dimension)
        full = parts[rank] if rank < len(parts) else full.narrow(placement.dim, 0, 0)
    return full


def criterion(plan: Plan) -> Callable[[Any, Any], Tensor]:
    """The loss of the plan's family: mean cross-entropy over tokens or samples; of a module, its own if it has one."""
    if plan.model.module.factory:
        return partial(own.loss_of, upcast=plan.loss_dtype == "float32")
    return partial(cross_entropy, upcast=plan.loss_dtype == "float32", chunks=plan.loss.chunks)


def dtype_of(name: str) -> torch.dtype:
    """``torch.float32`` from ``"float32"``."""
    dtype: Any = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype
