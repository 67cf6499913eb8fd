"""FSDP's first form: a flat parameter for each block, divided over ranks, gathered when it is used.

torchrun --standalone --nproc-per-node 2 -m trainers PLAN.json OUT   # "fsdp": {"version": "1"}
"""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    BackwardPrefetch,
    CPUOffload,
    FullyShardedDataParallel,
    MixedPrecision,
    ShardingStrategy,
    StateDictType,
)
from torch.distributed.fsdp.wrap import CustomPolicy
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from memcalc.plan import Plan
from trainers import optimizers
from trainers.backends import Prepared, device_of, sharding_mesh
from trainers.models import dtype_of, materialise, units

__all__ = ["Saved", "prepare"]

_PREFETCH = {"pre": BackwardPrefetch.BACKWARD_PRE, "post": BackwardPrefetch.BACKWARD_POST, "none": None}
_SHARDING = {
    "fsdp-full-shard": ShardingStrategy.FULL_SHARD,
    "fsdp-shard-grad-op": ShardingStrategy.SHARD_GRAD_OP,
    "fsdp-hybrid-shard": ShardingStrategy.HYBRID_SHARD,
    "fsdp-hybrid-shard-grad-op": ShardingStrategy._HYBRID_SHARD_ZERO2,
}


def prepare(model: nn.Module, plan: Plan, mesh: DeviceMesh, seed: int) -> Prepared:
    """FullyShardedDataParallel around each block and the rest."""
    device, precision = device_of(mesh), plan.precision_row
    materialise(model, plan, device, seed)
    policy = MixedPrecision(
        param_dtype=dtype_of(precision.compute) if precision.autocast else None,
        reduce_dtype=dtype_of(plan.reduce_dtype),
        # Buffers stay as they are, as fully_shard leaves them.
        buffer_dtype=None,
    )
    named = zip(plan.weights, model.named_parameters(), strict=True)
    names = {found: weight.name for weight, (found, _) in named}
    wrapped = FullyShardedDataParallel(
        model,
        device_mesh=sharding_mesh(mesh, plan),
        sharding_strategy=_SHARDING[plan.strategy],
        auto_wrap_policy=CustomPolicy(set(units(model, plan)).__contains__),
        mixed_precision=policy,
        backward_prefetch=_PREFETCH[plan.fsdp.backward_prefetch],
        forward_prefetch=plan.fsdp.forward_prefetch,
        limit_all_gathers=plan.fsdp.limit_all_gathers,
        use_orig_params=plan.fsdp.original_parameters,
        device_id=device,
        cpu_offload=CPUOffload(offload_params=plan.offload.on),
    )
    optimizer = optimizers.make(wrapped.parameters(), plan)
    saved = Saved(wrapped, optimizer, names)
    return Prepared(
        model=wrapped,
        optimizer=optimizer,
        states=optimizer,
        accumulate=contextlib.nullcontext if plan.fsdp.sync_every_micro_batch else wrapped.no_sync,
        casts_itself=True,
        divides_silently=True,
        clip=wrapped.clip_grad_norm_,
        state=saved.state,
        restore=saved.restore,
        whole=saved.whole,
    )


class Saved:
    """Flat shards as the tensors they are parts of, by the names of the plan's weights."""

    def __init__(self, model: FullyShardedDataParallel, optimizer: Optimizer, names: dict[str, str]) -> None:
        self.model, self.optimizer, self.names = model, optimizer, names
        self.by_name: dict[str, Tensor] | None = None

    def kinds(self) -> AbstractContextManager[Any]:
        """Inside, state dicts are of this rank's parts."""
        return FullyShardedDataParallel.state_dict_type(self.model, StateDictType.SHARDED_STATE_DICT)

    def parameters(self) -> dict[str, Tensor]:
        """This rank's part of each weight."""
        with self.kinds():
            found = self.model.state_dict()
        return {name: found[key] for key, name in self.names.items()}

    def state(self) -> dict[str, Any]:
        """Weights and states."""
        with self.kinds():
            states = FullyShardedDataParallel.optim_state_dict(self.model, self.optimizer)["state"]
        optimizer = {
            self.names[key]: {part: value for part, value in state.items() if isinstance(value, Tensor)}
            for key, state in states.items()
        }
        return {"model": self.parameters(), "optimizer": {name: state for name, state in optimizer.items() if state}}

    def restore(self, state: dict[str, Any]) -> None:
        """Put weights and states back into the flat shards."""
        with self.kinds():
            whole = self.model.state_dict()
            self.model.load_state_dict(whole | {key: state["model"][name] for key, name in self.names.items()})
            states = FullyShardedDataParallel.optim_state_dict(self.model, self.optimizer)
            for key, name in self.names.items():
                if key in states["state"]:
                    states["state"][key] |= state["optimizer"].get(name, {})
            flat = FullyShardedDataParallel.optim_state_dict_to_load(self.model, self.optimizer, states)
            self.optimizer.load_state_dict(flat)

    def whole(self, name: str) -> Tensor:
        """A weight in full; parts are taken out of their flat shards once."""
        self.by_name = self.by_name or self.parameters()
        found: Any = self.by_name[name].detach()
        if isinstance(found, ShardedTensor):  # what there is without a mesh, of which accelerate knows nothing
            device = next(iter(self.model.parameters())).device
            out = torch.empty(found.size(), dtype=found.dtype, device=device)
            found.gather(0, out if torch.distributed.get_rank() == 0 else None)
            return out
        whole: Tensor = found.full_tensor() if isinstance(found, DTensor) else found
        return whole
