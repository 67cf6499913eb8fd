"""How FullyShardedDataParallel is set up where that changes what it holds."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from math import gcd
from typing import TYPE_CHECKING

from memcalc.errors import PlanError
from memcalc.groups import Group, knob
from memcalc.units import undivided

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
    adapter_units: bool = knob(
        True, "--no-adapter-units", "FSDP 1: adapters share the units of their blocks (without peft's policy)."
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
        shared = plan.model.tied or plan.family.encodes
        if self.separate_root and plan.strategy_row.gathers and (self.version == "1" or shared):
            raise PlanError("separate root: only of FSDP 2, and where embeddings are used once; leave it out")
        ranks, groups = plan.data_parallel * plan.layout.context, self.groups(plan)
        if ranks % groups:
            raise PlanError(f"{undivided(ranks, 'rank')} over {groups} replicas")
        if self.mixes(plan):
            self._check_mixed(plan)

    def mixes(self, plan: Plan) -> bool:
        """FSDP 1 has frozen and trained weights in one flat parameter."""
        flat = self.version == "1" and plan.strategy_row.gathers and plan.adapter.freezes
        return flat and not (self.adapter_units and plan.shards > 1)

    def _check_mixed(self, plan: Plan) -> None:
        """What torch/distributed/fsdp/_flat_param.py, _init_flat_param_and_metadata, refuses."""
        cure = "take more ranks" if self.adapter_units else "leave out --no-adapter-units"
        if not self.original_parameters:
            raise PlanError(f"a unit of FSDP 1 with frozen and trained weights cannot have --no-orig-params; {cure}")
        if plan.adapter.dtype == "float32" and plan.strategy_row.gathers and plan.precision_row.weights != "float32":
            raise PlanError(f"a unit of FSDP 1 has one dtype, not float32 adapters beside others; {cure}")
        if plan.adapter.quantize != "none":
            raise PlanError(f"a unit of FSDP 1 wants gradients for all or none, and not for quantised weights; {cure}")

    def groups(self, plan: Plan) -> int:
        """Groups of ranks that each hold all shards: as many as nodes unless said otherwise."""
        if not plan.strategy_row.replicates:
            return 1
        return self.replicas or gcd(plan.nodes, plan.data_parallel * plan.layout.context)

    def idle(self, plan: Plan) -> dict[str, str]:
        row = plan.strategy_row
        if not row.gathers:
            names = (field.name for field in dataclasses.fields(self))
            return dict.fromkeys(names, f"is for FSDP, not for strategy {row.name}; take --strategy fsdp-full-shard")
        found = {} if row.replicates else {"replicas": "is for hybrid shards; take --strategy fsdp-hybrid-shard"}
        if self.version == "2":
            old = ("forward_prefetch", "backward_prefetch", "limit_all_gathers", "original_parameters")
            found |= dict.fromkeys(old, "is for FSDP 1; add --fsdp-version 1")
        return found
