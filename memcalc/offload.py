"""What lives in the host's memory or on its disks instead of on the GPU."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING

from memcalc.errors import PlanError
from memcalc.groups import Group, knob

if TYPE_CHECKING:
    from memcalc.plan import Plan

__all__ = ["Offload"]

PLACES = ("none", "cpu", "nvme")


@dataclass(frozen=True, kw_only=True, slots=True)
class Offload(Group):
    """DeepSpeed's ``offload_optimizer`` and ``offload_param`` with the defaults of
    deepspeed/runtime/zero/offload_config.py; with FSDP, CPUOffload or CPUOffloadPolicy."""

    optimizer: str = knob(
        "none", "--offload-optimizer", "Where optimizer states live, and are updated.", choices=PLACES
    )
    parameters: str = knob("none", "--offload-parameters", "Where this rank's parameters live.", choices=PLACES)
    pin_memory: bool = knob(True, "--no-pin-memory", "Offload to pageable host memory.")
    optimizer_buffers: int = knob(4, "--offload-optimizer-buffers", "NVMe: buffers for optimizer states.", least=1)
    parameter_buffers: int = knob(5, "--offload-parameter-buffers", "NVMe: buffers for parameters.", least=1)
    parameter_buffer_size: int = knob(
        100_000_000, "--offload-parameter-buffer-size", "NVMe: elements of each buffer for parameters.", least=1
    )
    max_in_cpu: int = knob(
        1_000_000_000, "--offload-max-in-cpu", "NVMe: elements of parameters that stay in host memory."
    )

    def idle(self, plan: Plan) -> dict[str, str]:
        names = [field.name for field in dataclasses.fields(self) if field.name not in ("optimizer", "parameters")]
        if not self.on:
            return dict.fromkeys(names, "is for offload; add --offload-optimizer cpu or nvme")
        if self.swaps:
            return {}
        return dict.fromkeys(names[1:], "is for NVMe; take --offload-optimizer nvme")

    @property
    def on(self) -> bool:
        """Anything is offloaded."""
        return (self.optimizer, self.parameters) != ("none", "none")

    def check(self, plan: Plan) -> None:
        if not self.on:
            return
        row = plan.strategy_row
        if plan.adapter.freezes:
            raise PlanError(f"offload is not counted with frozen weights ({plan.adapter.kind})")
        if plan.device != "cuda" and (row.gathers and plan.fsdp.version == "1"):
            raise PlanError(
                "FSDP 1 pins what it offloads, which takes a GPU; take --fsdp-version 2, or leave offload out"
            )
        if row.gathers:
            if (self.optimizer, self.parameters) != ("cpu", "cpu"):
                raise PlanError(
                    f"{row.name} offloads parameters, gradients and states together; "
                    "give --offload-parameters cpu and --offload-optimizer cpu"
                )
            return
        if not row.zero_stage:
            raise PlanError(f"strategy {row.name} cannot offload; deepspeed-1 to deepspeed-3 and fsdp-full-shard can")
        if self.parameters != "none" and row.zero_stage < 3:
            raise PlanError(f"{row.name} cannot offload parameters, which are not divided; take deepspeed-3")
        if self.optimizer == "nvme" and row.zero_stage < 3:
            # stage_1_and_2.py asks only whether there is a device, and then keeps states on the host.
            raise PlanError(
                f"{row.name} cannot offload to nvme: DeepSpeed takes cpu in its place without a word; take "
                "--offload-optimizer cpu, or deepspeed-3"
            )
        if self.optimizer != "none" and plan.optimizer not in ("adam", "adamw"):
            raise PlanError(f"DeepSpeed updates offloaded states with its CPU Adam, not {plan.optimizer}; take adamw")

    @property
    def swaps(self) -> bool:
        """Anything is offloaded to NVMe."""
        return "nvme" in (self.optimizer, self.parameters)

    def untrained(self, plan: Plan) -> str:
        if self.parameters != "nvme" or not plan.strategy_row.zero_stage:
            return ""
        if plan.device == "cpu" and plan.precision_row.weights != "bfloat16":
            # partition_parameters.py, _set_dtype: where the device has no fp16, bfloat16 whatever is said.
            return (
                f"with {plan.precision} parameters on NVMe from a CPU, which DeepSpeed makes bfloat16; take bf16-master"
            )
        largest = max(-(-weight.numel // plan.shards) for weight in plan.weights)
        if largest > self.parameter_buffer_size:  # partitioned_param_swapper.py, get_buffer
            return (
                f"with swap buffers of {self.parameter_buffer_size} elements for a partition of {largest}; give "
                f"--offload-parameter-buffer-size {largest}"
            )
        return ""
