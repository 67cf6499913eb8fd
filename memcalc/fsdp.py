"""How FullyShardedDataParallel is set up where that changes what it holds."""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd
from typing import TYPE_CHECKING

from memcalc.errors import PlanError
from memcalc.groups import Group, knob

if TYPE_CHECKING:
    from memcalc.plan import Plan

__all__ = ["Fsdp"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Fsdp(Group):
    """How FullyShardedDataParallel is set up where that changes what it holds."""

    version: str = knob(
        "2", "--fsdp-version", "FSDP: 2 is fully_shard, 1 the wrapper with flat parameters.", choices=("1", "2")
    )
    replicas: int = knob(0, "--replicas", "FSDP hybrid: groups of ranks that each hold all shards; 0 for one a node.")
    reduce_dtype: str = knob(
        "weights",
        "--reduce-dtype",
        "FSDP: dtype gradients are reduced in, that of the weights or of the compute.",
        choices=("weights", "compute", "float32"),
    )
    forward_prefetch: bool = knob(
        False, "--forward-prefetch", "FSDP 1: gather the next unit before this one's forward."
    )
    backward_prefetch: str = knob(
        "pre",
        "--backward-prefetch",
        "FSDP 1: gather the next unit before this one's backward (pre), after it (post), or when it is used.",
        choices=("pre", "post", "none"),
    )
    limit_all_gathers: bool = knob(
        True, "--no-limit-all-gathers", "FSDP 1: let the CPU run ahead with gathers; they pile up in reserved memory."
    )
    original_parameters: bool = knob(
        True, "--no-orig-params", "FSDP 1: the optimizer sees flat parameters (use_orig_params=False)."
    )
    sync_every_micro_batch: bool = knob(
        False, "--sync-every-micro-batch", "FSDP: reduce gradients of every micro batch (no no_sync)."
    )
    separate_root: bool = knob(
        False,
        "--separate-root",
        "FSDP 2: embeddings, and the last norm with the head, are units of their own and not the root's.",
    )
    """As torchtitan since 28 July 2025 (models/llama3/infra/parallelize.py, apply_fsdp); the head stays gathered."""

    def check(self, plan: Plan) -> None:
        shared = plan.model.tied or plan.family.sequences > 1
        if self.separate_root and plan.strategy_row.gathers and (self.version == "1" or shared):
            raise PlanError("separate root: only of FSDP 2, and where embeddings are used once; leave it out")
        ranks, groups = plan.data_parallel * plan.layout.context, self.groups(plan)
        if ranks % groups:
            raise PlanError(f"{ranks} ranks do not divide over {groups} replicas")

        if self.version == "1" and plan.strategy_row.gathers and plan.adapter.freezes:
            raise PlanError(f"FSDP 1 is not counted with frozen weights ({plan.adapter.kind}); take --fsdp-version 2")

    def groups(self, plan: Plan) -> int:
        """Groups of ranks that each hold all shards: as many as nodes unless said otherwise."""
        if not plan.strategy_row.replicates:
            return 1
        return self.replicas or gcd(plan.nodes, plan.data_parallel * plan.layout.context)

    def untrained(self, plan: Plan) -> str:
        if not plan.strategy_row.gathers:
            return ""
        return "with FSDP 1, whose flat shards it does not save; take --fsdp-version 2" if self.version == "1" else ""
