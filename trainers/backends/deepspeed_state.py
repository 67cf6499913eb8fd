"""What ZeRO has cut into partitions, put together by name: checkpoints that any strategy and any number of ranks can go on from.

DeepSpeed's own checkpoints are pickles for the same number of ranks. These are made with its public functions for single
tensors (deepspeed/utils/tensor_fragment.py, safe_get_full_fp32_param and those beside it), one tensor at a time on the
device; the copies wait in the host's memory until they are written.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from memcalc.plan import Plan

__all__ = ["Saved"]


class Saved:
    """An engine of ZeRO stage 1, 2 or 3 as names and tensors."""

    def __init__(self, engine: Any, plan: Plan) -> None:
        self.engine, self.plan = engine, plan
        names = [weight.name for weight in plan.weights]
        self.named: dict[str, nn.Parameter] = dict(zip(names, engine.module.parameters(), strict=True))
        self.states: Any = engine.optimizer.optimizer
        """The plan's own optimizer, of flat partitions."""

    def keys(self) -> tuple[list[str], list[str]]:
        """Names of the states that are as large as what they are of, and of those that are one number."""
        nothing: tuple[Tensor, dict[str, Any]] = (torch.empty(0), {})
        partition, states = next(iter(self.states.state.items()), nothing)
        tensors = {key: value for key, value in states.items() if isinstance(value, Tensor)}
        large = [key for key, value in tensors.items() if value.shape == partition.shape]
        return large, [key for key in tensors if key not in large]

    def whole(self, name: str) -> Tensor:
        """A weight in float32."""
        from deepspeed.utils import safe_get_full_fp32_param

        found: Tensor = safe_get_full_fp32_param(self.named[name])
        return found.reshape(self.shape(name))

    def shape(self, name: str) -> tuple[int, ...]:
        """Stage 3 leaves a parameter without elements."""
        parameter = self.named[name]
        return tuple(getattr(parameter, "ds_shape", parameter.shape))

    def state(self) -> dict[str, Any]:
        """Weights and states in full, in the host's memory."""
        from deepspeed.utils import safe_get_full_optimizer_state

        large, numbers = self.keys()
        model, optimizer = {}, {}
        for name, parameter in self.named.items():
            model[name] = self.whole(name).cpu()
            found = {
                key: safe_get_full_optimizer_state(parameter, key).reshape(self.shape(name)).cpu() for key in large
            }
            optimizer[name] = found | {key: self.number(key).clone() for key in numbers}
        return {"model": model, "optimizer": {name: state for name, state in optimizer.items() if state}}

    def number(self, key: str) -> Tensor:
        """A state that is the same for all weights, such as Adam's count of steps."""
        found: Tensor = next(iter(self.states.state.values()))[key]
        return found

    def restore(self, state: dict[str, Any]) -> None:
        """Put weights, masters and states back into the partitions."""
        import deepspeed
        from deepspeed.utils import safe_set_full_fp32_param, safe_set_full_optimizer_state

        large, numbers = self.keys()
        for name, parameter in self.named.items():
            value = state["model"][name].to(self.engine.device)
            with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0), torch.no_grad():
                parameter.copy_(value)
            safe_set_full_fp32_param(parameter, value)
            for key in large:
                safe_set_full_optimizer_state(parameter, state["optimizer"][name][key].to(self.engine.device), key)
        saved: dict[str, Tensor] = next(iter(state["optimizer"].values()), {})
        for held in self.states.state.values():
            for key in numbers:
                held[key].copy_(saved[key])

    def wake(self) -> None:
        """A step of length 0 along gradients of 0: DeepSpeed's optimizers have their states after the first."""
        for group in self.engine.optimizer.param_groups:
            group["lr"] = 0.0
        plan = self.plan
        if plan.tokens:
            inputs = torch.zeros(plan.micro_batch, plan.tokens, dtype=torch.int64, device=self.engine.device)
        else:
            dtype = next(self.engine.module.parameters()).dtype
            inputs = torch.zeros(plan.micro_batch, plan.model.features, dtype=dtype, device=self.engine.device)
        self.engine.backward(0.0 * self.engine(inputs).float().mean(), scale_wrt_gas=False)
        self.engine.step()
