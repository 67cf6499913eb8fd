"""What happens to gradients and weights around the optimizer's step: decay, clipping, averages, and when it is taken."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from memcalc.adapters import Adapter
from memcalc.errors import PlanError
from memcalc.groups import Group, knob

if TYPE_CHECKING:
    from memcalc.plan import Plan

__all__ = ["Update"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Update(Group):
    """What happens to gradients and weights around the optimizer's step."""

    l2: bool = knob(False, "--l2", "Weight decay that is added to gradients (weight_decay of SGD, Adam).")
    clip: bool = knob(False, "--clip-norm", "Gradients are clipped by their norm (clip_grad_norm_).")
    ema: str = knob(
        "none",
        "--ema",
        "A running average of all weights, in their own dtype (AveragedModel) or in float32.",
        choices=("none", "weights", "float32"),
    )
    in_backward: bool = knob(
        False, "--step-in-backward", "Each weight is updated, and its gradient freed, while backward runs."
    )

    def check(self, plan: Plan) -> None:
        if self.l2 and plan.optimizer_row.decoupled:
            raise PlanError(f"l2: {plan.optimizer} adds no decay to gradients; take adam or sgd, or leave out --l2")
        if self.ema != "none" and plan.adapter != Adapter():
            raise PlanError("an average is of a whole model; with adapters leave out --ema")
        if not self.in_backward:
            return
        row, wrapped = plan.strategy_row, plan.strategy_row.gathers and (plan.offload.on or plan.fsdp.version == "1")
        if wrapped or row.buckets or row.flat_units or row.main_grads or row.one_process or row.zero_stage is not None:
            raise PlanError(f"step in backward: {plan.strategy} hands gradients over in buckets; take single or fsdp")
        if plan.accumulation > 1 or plan.layout.pipeline > 1:
            raise PlanError(f"step in backward cannot accumulate over {plan.accumulation} micro batches")
        if self.clip:
            raise PlanError("step in backward never has all gradients together, whose norm --clip-norm needs")
        if plan.precision_row.master or plan.family.opaque or plan.optimizer_row.rest or not plan.set_to_none:
            raise PlanError(
                "step in backward is for weights that are known one by one, without master copies or kept gradients"
            )
        if plan.optimizer == "lbfgs":
            raise PlanError("step in backward: lbfgs needs all gradients together; take adamw")

    def untrained(self, plan: Plan) -> str:
        if self.in_backward:
            return "with a step in backward"
        return "with an average of all weights" if self.ema != "none" else ""
