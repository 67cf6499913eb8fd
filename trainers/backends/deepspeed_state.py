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

__all__ = ["Masters", "Saved", "held"]


def held(engine: Any, plan: Plan) -> dict[str, list[Tensor]]:
    """Where DeepSpeed keeps what a meter counts: by category, the tensors that take the place of the model's own.

    Float32 masters count as states of the optimizer, and on the CPU so does what is offloaded, as in an estimate.
    """
    wrapper, stage, offload = engine.optimizer, plan.strategy_row.zero_stage, plan.offload
    states: Any = getattr(wrapper, "optimizer", wrapper)
    optimizer = [value for state in states.state.values() for value in state.values() if isinstance(value, Tensor)]
    if stage == 0 and not plan.precision_row.master:
        return {}
    # Stage 3 puts a group into the optimizer for the moment of its update only.
    masters = (
        wrapper.fp32_partitioned_groups_flat
        if stage == 3
        else [master for group in states.param_groups for master in group["params"]]
    )
    optimizer += masters
    if stage == 0:
        return {"optimizer": optimizer}
    away = offload.optimizer != "none"
    if away:
        optimizer += [master.grad for master in masters if master.grad is not None]
    if stage == 3:
        parts = [parameter.ds_tensor for parameter in engine.module.parameters()]
        gradients = [wrapper.grad_partitions_flat_buffer]
        moved = [*(gradients if away else []), *(parts if offload.parameters != "none" else [])]
        return {
            "parameters": [] if offload.parameters != "none" else parts,
            "gradients": [] if away else gradients,
            "optimizer": optimizer + moved,
        }
    if away:
        optimizer += [*wrapper.param_buffer_of_bit16_for_cpu_offload_groups, *wrapper.accumulated_grads_in_cpu.values()]
        optimizer.append(wrapper.temp_grad_buffer_for_cpu_offload)
        return {"gradients": [], "optimizer": optimizer}
    kept = getattr(wrapper, "averaged_gradients", {}).values()
    gradients = [*getattr(wrapper, "fp32_groups_gradients_flat", ())]
    for found in kept:
        gradients += [found] if isinstance(found, Tensor) else [*(found or ())]
    gradients += [parameter.grad for parameter in engine.module.parameters() if parameter.grad is not None]
    return {"gradients": gradients, "optimizer": optimizer}


class Masters:
    """An engine of stage 0 with 16-bit weights, whose masters are whole tensors (runtime/fp16/unfused_optimizer.py).

    DeepSpeed makes the states by a step along gradients of 0 before the first one, so that Adam's first step would be
    its second, and decays the weights in it: by how much, the learning rate of that moment says. It is taken back.
    """

    def __init__(self, engine: Any, plan: Plan) -> None:
        self.wrapper: Any = engine.optimizer
        self.states: Any = self.wrapper.optimizer
        self.states.state.clear()
        pairs = [
            pair
            for halves, masters in zip(self.wrapper.fp16_groups, self.wrapper.fp32_groups, strict=True)
            for pair in zip(halves, masters, strict=True)
        ]
        of = {id(half): master for half, master in pairs}
        self.halves = [half for half, _ in pairs]
        names = [weight.name for weight in plan.weights]
        self.named = {
            name: of.get(id(parameter), parameter)
            for name, parameter in zip(names, engine.module.parameters(), strict=True)
        }
        self.pairs = pairs

    def whole(self, name: str) -> Tensor:
        """A weight in float32."""
        found: Tensor = self.named[name].detach()
        return found

    def state(self) -> dict[str, Any]:
        """The masters and states themselves, which a checkpoint is read into."""
        found = self.states.state
        return {
            "model": {name: master.detach() for name, master in self.named.items()},
            "optimizer": {name: dict(found[master]) for name, master in self.named.items() if found.get(master)},
        }

    def restore(self, state: dict[str, Any]) -> None:
        """The masters are filled; the weights are theirs in 16 bit."""
        with torch.no_grad():
            for half, master in self.pairs:
                half.copy_(master)

    def wake(self) -> None:
        """A step of length 0 along gradients of 0."""
        for group in self.states.param_groups:
            group["lr"] = 0.0
        for _, master in self.pairs:
            master.grad = torch.zeros_like(master)
        self.states.step()
        for _, master in self.pairs:
            master.grad = None


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

        large, numbers = self.keys()
        for name, parameter in self.named.items():
            value = state["model"][name].to(self.engine.device)
            with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0), torch.no_grad():
                parameter.copy_(value)
            self.put(parameter, value)
            for key in large:
                self.put(parameter, state["optimizer"][name][key].to(self.engine.device), key)
        saved: dict[str, Tensor] = next(iter(state["optimizer"].values()), {})
        for held in self.states.state.values():
            for key in numbers:
                held[key].copy_(saved[key])

    def put(self, parameter: nn.Parameter, value: Tensor, key: str | None = None) -> None:
        """Put a master, or a state, back from one whole tensor.

        In stage 3 the last rank's part is padded, which ``safe_set_full_fp32_param`` fails on: each rank takes its own.
        """
        from deepspeed.utils import (
            safe_set_full_fp32_param,
            safe_set_full_optimizer_state,
            safe_set_local_fp32_param,
            safe_set_local_optimizer_state,
        )  # fmt: skip

        if self.plan.strategy_row.zero_stage == 3:
            size, rank = parameter.ds_tensor.numel(), torch.distributed.get_rank()  # type: ignore[attr-defined]
            mine = torch.zeros(size, dtype=value.dtype, device=value.device)
            part = value.flatten()[size * rank : size * (rank + 1)]
            mine[: part.numel()] = part
            value = mine
            if key is None:
                safe_set_local_fp32_param(parameter, value)
            else:
                safe_set_local_optimizer_state(parameter, value, key)
        elif key is None:
            safe_set_full_fp32_param(parameter, value)
        else:
            safe_set_full_optimizer_state(parameter, value, key)

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
