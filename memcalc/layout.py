"""How ranks are arranged: tensor, sequence, context, pipeline and expert parallel degrees, and replicas."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from memcalc.errors import PlanError
from memcalc.groups import Group, knob
from memcalc.units import things, undivided

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
    first_layers: int = knob(0, "--pipeline-first-layers", "Layers of the first stretch; 0 for as many as the others.")
    last_layers: int = knob(0, "--pipeline-last-layers", "Layers of the last stretch; 0 for as many as the others.")
    optimizer_instances: int = knob(
        1,
        "--optimizer-instances",
        "Megatron's distributed optimizer: groups of ranks that each hold all states.",
        least=1,
    )
    """Megatron's ``--num-distributed-optimizer-instances`` (megatron/training/arguments.py): gradients are summed over the
    ranks of a group, then over the groups, and updated weights are gathered within a group."""

    @property
    def model_parallel(self) -> int:
        """Ranks that work on the same samples."""
        return self.tensor * self.context * self.pipeline

    def stage_of(self, rank: int) -> int:
        """The stage of a pipeline on a rank: ranks of one pipeline lie together, and of one tensor parallel next to each other.

        >>> [Layout(tensor=2, pipeline=2).stage_of(rank) for rank in range(8)]
        [0, 0, 1, 1, 0, 0, 1, 1]
        """
        return rank // self.tensor % self.pipeline

    def check(self, plan: Plan) -> None:
        if plan.ranks % self.model_parallel:
            raise PlanError(
                f"{undivided(plan.ranks, 'rank')} by tensor {self.tensor} x context {self.context} x pipeline {self.pipeline}"
                f" = {self.model_parallel}; {self._ranks_that_divide(plan)}"
            )
        if plan.strategy_row.one_process and self != type(self)():
            raise PlanError(f"{plan.strategy} has a whole replica on every GPU; leave the other ways to divide it out")
        self._check_tensor(plan)
        self._check_tokens(plan)
        self._check_pipeline(plan)
        if self.expert > 1:
            self._check_experts(plan)
        self._check_instances(plan)
        megatron = plan.family.divides == "megatron"
        if self.loss_parallel and (megatron or self.tensor == 1):
            why = "Megatron's loss always is" if megatron else "there is one rank of tensor parallel"
            raise PlanError(f"loss parallel: {why}; leave --loss-parallel out")

    def _check_instances(self, plan: Plan) -> None:
        ranks, groups = plan.data_parallel * self.context, self.optimizer_instances
        if groups > 1 and plan.strategy not in ("zero-1", "megatron-distributed"):
            raise PlanError(
                f"optimizer instances {groups}: {plan.strategy} has one; take zero-1 or megatron-distributed"
            )
        if ranks % groups:
            raise PlanError(f"optimizer instances {groups} do not divide {things(ranks, 'rank')} of data parallel")

    def _ranks_that_divide(self, plan: Plan) -> str:
        """What would do where ranks do not divide."""
        each, ranks = self.model_parallel, plan.ranks
        counts = " or ".join(str(count) for count in (ranks // each * each, ranks // each * each + each) if count)
        degrees = [degree for degree in range(1, ranks + 1) if ranks % degree == 0]
        alone = next((name for name in ("tensor", "context", "pipeline") if getattr(self, name) == each), "")
        if not alone or len(degrees) > 12:
            return f"{counts} ranks would do"
        *others, last = map(str, degrees)
        return f"{counts} ranks would do, or {alone} {' or '.join([', '.join(others), last] if others else [last])}"

    def _check_tensor(self, plan: Plan) -> None:
        model = plan.model
        if self.tensor > 1 and not plan.family.divides:
            raise PlanError(f"tensor parallel {self.tensor}: memcalc cannot divide the products of {model.family}")
        for name, count in (("heads", model.heads), ("key/value heads", model.kv_heads), ("ffn", model.ffn)):
            if count % self.tensor:
                raise PlanError(f"tensor parallel {self.tensor} does not divide {count} {name} of {model.name}")
        if self.model_parallel > 1 and plan.adapter.freezes:
            raise PlanError(f"adapters are not played on a model divided over {self.model_parallel} ranks")
        if self.sequence and self.tensor == 1:
            raise PlanError("sequence parallel divides tokens over the ranks of tensor parallel, but those are 1")
        if self.tensor > 1 and not plan.loss.whole_logits:
            raise PlanError(f"tensor parallel {self.tensor}: the loss cannot take along a head that is divided")

    def _check_tokens(self, plan: Plan) -> None:
        if self.context > 1 and not plan.tokens:
            raise PlanError(f"context parallel {self.context}: {plan.model.name} reads no tokens")
        if self.context > 1 and (plan.kernel not in ("flash", "efficient") or not plan.family.divides):
            raise PlanError(
                f"context parallel {self.context}: only fused attention of gpt2, llama, decoder and megatron goes share "
                f"by share, not {plan.kernel} of {plan.model.family}"
            )
        parts = self.context * (self.tensor if self.sequence else 1)
        if plan.tokens % parts:
            raise PlanError(f"{undivided(plan.tokens, 'token')} over {parts} ranks of context and sequence parallel")

    def _check_experts(self, plan: Plan) -> None:
        experts, ranks = plan.model.experts, plan.ranks // self.pipeline
        if experts % self.expert or not experts:
            raise PlanError(
                f"expert parallel {self.expert} does not divide {things(experts, 'expert')} of {plan.model.name}"
            )
        if ranks % self.expert or plan.ranks == 1:
            raise PlanError(f"expert parallel {self.expert} does not divide {things(ranks, 'rank')}")
        row = plan.strategy_row
        if row.shards_parameters or row.shards_optimizer:
            raise PlanError(
                f"expert parallel with {row.name}: experts would be divided over fewer ranks than the rest; take ddp"
            )

    def _check_pipeline(self, plan: Plan) -> None:
        if (self.schedule == "interleaved") != (self.chunks > 1):
            raise PlanError(
                f"pipeline schedule {self.schedule} with {self.chunks} chunk{'s' * (self.chunks > 1)}: "
                "interleaved, and no other, has 2 or more on each rank"
            )
        if self.pipeline == 1:
            if self.chunks > 1 or self.ends or self.first_layers or self.last_layers:
                raise PlanError(
                    "pipeline chunks, ends, first and last layers say how a pipeline divides, but pipeline parallel is 1"
                )
            return
        stacked = plan.family.name == "mlp" or plan.family.reads == "tokens"
        if not stacked or plan.family.encodes or plan.family.unplayed:
            raise PlanError(
                f"pipeline parallel divides mlp and models that read one sequence of tokens, not {plan.family.name}"
            )
        if (plan.strategy_row.zero_stage or 0) > 1:  # an assertion of deepspeed/runtime/pipe/engine.py
            raise PlanError(f"{plan.strategy} does not work with pipeline parallel; take deepspeed-1")
        if plan.offload.on:
            raise PlanError("pipeline parallel with offloaded tensors is not known to memcalc; leave one of them out")
        parts, layers = self.pipeline * self.chunks, plan.model.blocks + 2 * self.ends
        stated = [count for count in (self.first_layers, self.last_layers) if count]
        if layers - sum(stated) < parts - len(stated) or (len(stated) == parts and sum(stated) != plan.model.blocks):
            raise PlanError(
                f"{things(plan.model.blocks, 'layer')} do not go round pipeline {self.pipeline} x chunks {self.chunks} = {parts}"
                + f", {' and '.join(map(str, stated))} of them given" * bool(stated)
                + f"; at most {layers} would do" * (not stated)
            )
        if stated and self.ends:
            raise PlanError("pipeline ends count in an equal division, not where first or last layers are given")

    def idle(self, plan: Plan) -> dict[str, str]:
        return {} if self.pipeline > 1 else {"schedule": "orders micro batches in a pipeline; add --pipeline-parallel"}

    def untrained(self, plan: Plan) -> str:
        others = {"context": self.context, "expert": self.expert}
        if more := next((name for name, degree in others.items() if degree > 1), ""):
            return f"with {more} parallel"
        if self.pipeline > 1 and (said := self._unpiped(plan)):
            return said
        if self.tensor == 1:
            return ""
        if plan.model.family != "llama" or plan.model.tied:
            return "with tensor parallel other models than Llama with a head of its own"
        if plan.strategy not in ("single", "ddp") and not (plan.strategy_row.gathers and plan.fsdp.version == "2"):
            return f"with tensor parallel by {plan.strategy}; take single, ddp or FSDP 2"
        if plan.model.fused_qkv or plan.model.biases or plan.model.qk_norm:
            return "with tensor parallel a Llama whose products are fused or have biases"
        return "with loss parallel" if self.loss_parallel else ""

    def _unpiped(self, plan: Plan) -> str:
        if plan.model.family not in ("gpt2", "llama", "mlp"):
            return "with pipeline parallel other models than GPT-2, Llama and mlp"
        if plan.model.batch_norm:
            return "with pipeline parallel and batch norm, whose statistics each micro batch would move"
        if plan.strategy not in ("single", "ddp") and not (plan.strategy_row.gathers and plan.fsdp.version == "2"):
            return f"with pipeline parallel by {plan.strategy}; take single, ddp or FSDP 2"
        if plan.strategy_row.gathers and self.schedule == "interleaved":
            # _PipelineScheduleRuntime gathers whole stretches ahead (schedules.py, _add_unshard_reshard).
            return f"with an interleaved pipeline by {plan.strategy}; take 1f1b or gpipe"
        if plan.static_graph:
            return "with pipeline parallel and a static graph, which a schedule's passes are not"
        if plan.loss.chunk_head:
            return "with pipeline parallel and a head that is computed chunk by chunk"
        if plan.precision_row.loss_scaling:
            return "with pipeline parallel and scaled losses; take bf16"
        if self.schedule == "1f1b" and plan.accumulation < self.pipeline:
            # torch/distributed/pipelining/schedules.py, Schedule1F1B.__init__
            return (
                f"with {plan.accumulation} micro batch{'es' * (plan.accumulation > 1)} a step for {self.pipeline} stages of "
                f"1f1b; give --accumulation {self.pipeline} or more"
            )
        return ""
