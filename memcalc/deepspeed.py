"""How DeepSpeed's ZeRO is set up where that changes what it holds."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING

from memcalc.errors import PlanError
from memcalc.groups import Group, knob

if TYPE_CHECKING:
    from memcalc.plan import Plan

__all__ = ["DeepSpeed"]


@dataclass(frozen=True, kw_only=True, slots=True)
class DeepSpeed(Group):
    """The keys of ``zero_optimization`` that change memory, with the defaults of deepspeed/runtime/zero/config.py.

    Buckets, thresholds and distances are numbers of elements, not bytes.
    """

    reduce_bucket_size: int = knob(
        500_000_000, "--reduce-bucket-size", "DeepSpeed: elements reduced at a time.", least=1
    )
    allgather_bucket_size: int = knob(
        500_000_000,
        "--allgather-bucket-size",
        "DeepSpeed: elements gathered at a time, with torch before 1.13.",
        least=2,
    )
    overlap_comm: str = knob(
        "auto", "--overlap-comm", "DeepSpeed: reduce while backward runs.", choices=("auto", "on", "off")
    )
    """``auto`` is on in stage 3 only (``overlap_comm_valid``). In stages 1 and 2 it takes a second bucket."""
    contiguous_gradients: bool = knob(
        True, "--no-contiguous-gradients", "DeepSpeed: leave gradients where autograd made them."
    )
    reduce_scatter: bool = knob(True, "--no-reduce-scatter", "DeepSpeed: reduce buckets in place, to all ranks.")
    round_robin_gradients: bool = knob(
        False, "--round-robin-gradients", "DeepSpeed: give weights to ranks in turn (stages 1 and 2)."
    )
    grad_accum_dtype: str = knob(
        "weights", "--grad-accum-dtype", "DeepSpeed: dtype gradients are summed in.", choices=("weights", "float32")
    )
    flatten: str = knob(
        "device",
        "--zero-flatten",
        "DeepSpeed: where stages 1 and 2 make the flat copy of the weights when they start.",
        choices=("device", "host"),
    )
    """Newer releases flatten on the device if it has room, and else on the host, as older ones always did."""
    persistence_threshold: int = knob(
        100_000, "--param-persistence-threshold", "DeepSpeed stage 3: weights up to this size stay gathered."
    )
    model_persistence_threshold: int = knob(
        10**18, "--model-persistence-threshold", "DeepSpeed stage 3: elements that stay gathered at most."
    )
    prefetch_bucket_size: int = knob(
        50_000_000, "--prefetch-bucket-size", "DeepSpeed stage 3: elements gathered ahead at a time."
    )
    max_live_parameters: int = knob(
        1_000_000_000,
        "--max-live-parameters",
        "DeepSpeed stage 3: gathered elements above which none is fetched ahead.",
    )
    max_reuse_distance: int = knob(
        1_000_000_000, "--max-reuse-distance", "DeepSpeed stage 3: weights used again so soon are kept gathered."
    )
    sub_group_size: int = knob(
        1_000_000_000, "--sub-group-size", "DeepSpeed stage 3: elements of a rank updated at a time.", least=1
    )

    pipeline_engine: bool = knob(
        False,
        "--pipeline-engine",
        "DeepSpeed: the model is a PipelineModule even where it has one stage only; its last two outputs stay.",
    )

    def overlaps(self, stage: int) -> bool:
        """Whether gradients are reduced while backward runs.

        >>> DeepSpeed().overlaps(2), DeepSpeed().overlaps(3), DeepSpeed(overlap_comm="on").overlaps(2)
        (False, True, True)
        """
        return stage == 3 if self.overlap_comm == "auto" else self.overlap_comm == "on"

    def idle(self, plan: Plan) -> dict[str, str]:
        row, every = plan.strategy_row, [field.name for field in dataclasses.fields(self)]
        if row.zero_stage is None:
            return dict.fromkeys(every, f"is for DeepSpeed, not for strategy {row.name}; take --strategy deepspeed-2")
        of_stage_3 = (
            "persistence_threshold", "model_persistence_threshold", "prefetch_bucket_size", "max_live_parameters",
            "max_reuse_distance", "sub_group_size",
        )  # fmt: skip
        return {} if row.zero_stage == 3 else dict.fromkeys(of_stage_3, f"is for deepspeed-3, not for {row.name}")

    def check(self, plan: Plan) -> None:
        row = plan.strategy_row
        if row.zero_stage is None:
            return
        precision, adapter = plan.precision_row, plan.adapter
        if adapter.freezes and adapter.quantize != "none":
            raise PlanError(f"{row.name} with quantised weights ({adapter.quantize}) is not counted; take ddp or FSDP")
        if adapter.freezes and adapter.dtype != "weights":
            raise PlanError(
                f"{row.name} is counted with adapters in the dtype of the weights; leave out --adapter-dtype {adapter.dtype}"
            )
        if row.zero_stage > 1 and plan.layout.pipeline > 1:
            raise PlanError(f"{row.name} divides gradients, which DeepSpeed's pipeline needs whole; take deepspeed-1")
        if not precision.master and (precision.weights, precision.compute) != ("float32", "float32"):
            raise PlanError(
                f"{row.name} with {plan.precision}: DeepSpeed keeps float32 masters of 16-bit weights; "
                "take bf16-master, fp16-master or fp32"
            )

    def untrained(self, plan: Plan) -> str:
        if plan.strategy_row.zero_stage is None:
            return ""
        if self.pipeline_engine:
            return "with DeepSpeed's PipelineEngine"
        if plan.strategy_row.zero_stage == 0 and plan.precision_row.master and plan.optimizer == "adagrad":
            # Made before the masters take the weights' place (runtime/fp16/unfused_optimizer.py), its states are of the others.
            return f"with deepspeed-0 in {plan.precision} by adagrad, whose states DeepSpeed loses; take deepspeed-1"
        return ""
