"""How a model's operations are carried out: compiled together or one by one, products in 8 bit or as they are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from memcalc.errors import PlanError
from memcalc.groups import Group, knob

if TYPE_CHECKING:
    from memcalc.plan import Plan

__all__ = ["FLOAT8", "Compute"]

FLOAT8 = ("none", "tensorwise", "rowwise", "mxfp8")


@dataclass(frozen=True, kw_only=True, slots=True)
class Compute(Group):
    """How a model's operations are carried out.

    ``compile`` is counted as eager, which keeps most: inductor may compute pointwise operations again in backward,
    but never matrix products or attention (torch/_functorch/partitioners.py, ban_recomputation), so that it keeps
    no less than a run that checkpoints every block.

    ``float8`` is torchao's training: factors of products inside blocks are cast when they are needed, in forward and
    again in backward, and what is kept is their 16-bit form (torchao/float8/float8_linear.py,
    matmul_with_hp_or_float8_args; torchao/prototype/mx_formats/mx_linear.py).

    ``offload_activations``: saved tensors of 1 KiB and more are copied to pinned host memory in forward, the last five
    stay until their copies are surely done, and each is back for its node in backward and until the next one has run
    (torchtune/training/_activation_offloading.py). What the loss saves is left where it is.
    """

    compile: bool = knob(False, "--compile", "torch.compile of the model: a range, of which eager is the upper end.")
    offload_activations: bool = knob(
        False,
        "--offload-activations",
        "What is kept for backward waits in host memory (torchtune, saved_tensors_hooks).",
    )
    float8: str = knob("none", "--float8", "Matrix products inside blocks in 8 bit, by torchao.", choices=FLOAT8)

    def check(self, plan: Plan) -> None:
        if self.offload_activations and (plan.reentrant or plan.family.unplayed):
            raise PlanError("offload activations: of layers that are known, and not in reentrant checkpoints")
        if self.compile and plan.reentrant:
            # torch._dynamo does not trace the autograd.Function of torch.utils.checkpoint, CheckpointFunction.
            raise PlanError("compile: reentrant checkpoints are not compiled; leave out --reentrant or --compile")
        if self.float8 == "none":
            return
        if plan.family.reads != "tokens" or plan.family.unplayed:
            raise PlanError(f"float8 {self.float8}: {plan.model.name} reads no tokens; it is for transformer blocks")
        if plan.precision_row.compute != "bfloat16":
            raise PlanError(f"float8 {self.float8} casts from bfloat16, not {plan.precision}; take bf16 or amp-bf16")

    def untrained(self, plan: Plan) -> str:
        if self.compile:
            return "what is compiled"
        if self.offload_activations:
            return "with activations in host memory"
        return f"with products in float8 ({self.float8})" if self.float8 != "none" else ""
