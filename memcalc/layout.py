"""How ranks are arranged: tensor, sequence, context, pipeline and expert parallel degrees, and replicas."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from memcalc.errors import PlanError
from memcalc.groups import Group, knob

if TYPE_CHECKING:
    from memcalc.plan import Plan

__all__ = ["SCHEDULES", "Layout"]

SCHEDULES = ("gpipe", "1f1b", "interleaved")


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout(Group):
    """How ranks are arranged: tensor, sequence, context, pipeline and expert parallel degrees, and replicas.

    >>> Layout(tensor=4, context=2).model_parallel
    8
    """

    tensor: int = knob(1, "--tensor-parallel", "Ranks that divide every matrix product.", least=1)
    sequence: bool = knob(
        False, "--sequence-parallel", "Divide tokens between the products that tensor parallel divides."
    )
    context: int = knob(1, "--context-parallel", "Ranks that divide the tokens of a sequence.", least=1)
    expert: int = knob(1, "--expert-parallel", "Ranks that divide the experts.", least=1)
    loss_parallel: bool = knob(False, "--loss-parallel", "Take the loss of logits whose vocabulary stays divided.")
    pipeline: int = knob(1, "--pipeline-parallel", "Ranks that divide the layers.", least=1)
    schedule: str = knob("1f1b", "--pipeline-schedule", "Order of micro batches in a pipeline.", choices=SCHEDULES)
    chunks: int = knob(1, "--pipeline-chunks", "Stretches of layers on each rank of a pipeline.", least=1)
    ends: bool = knob(
        False, "--pipeline-ends", "Count embedding and head as a layer each when a pipeline divides layers."
    )

    @property
    def model_parallel(self) -> int:
        """Ranks that work on the same samples."""
        return self.tensor * self.context * self.pipeline

    def check(self, plan: Plan) -> None:
        if plan.ranks % self.model_parallel:
            raise PlanError(
                f"{plan.ranks} ranks do not divide by tensor {self.tensor} x context {self.context} x pipeline {self.pipeline}"
                f" = {self.model_parallel}"
            )
        if self.sequence and self.tensor == 1:
            raise PlanError("sequence parallel divides tokens over the ranks of tensor parallel, but those are 1")

        self._check_pipeline(plan)

    def _check_pipeline(self, plan: Plan) -> None:
        if (self.schedule == "interleaved") != (self.chunks > 1):
            raise PlanError(
                f"pipeline schedule {self.schedule} with {self.chunks} chunk{'s' * (self.chunks > 1)}: "
                "interleaved, and no other, has 2 or more on each rank"
            )
        if self.pipeline == 1:
            if self.chunks > 1 or self.ends:
                raise PlanError(
                    "pipeline chunks and ends say how a pipeline divides layers, but pipeline parallel is 1"
                )
            return
        if plan.family.reads != "tokens" or plan.family.sequences > 1:
            raise PlanError(
                f"pipeline parallel divides models that read one sequence of tokens, not {plan.family.name}"
            )
        parts, layers = self.pipeline * self.chunks, plan.model.blocks + 2 * self.ends
        if layers < parts:
            raise PlanError(
                f"{plan.model.blocks} layers do not go round pipeline {self.pipeline} x chunks {self.chunks} = {parts}"
            )

    def untrained(self, plan: Plan) -> str:
        return "with tensor, context, pipeline or expert parallel" if self.model_parallel * self.expert > 1 else ""
