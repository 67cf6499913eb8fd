"""``parallelism_config`` of accelerate's YAML: how FSDP 2 is composed with copies, tensor and context parallel."""

from __future__ import annotations

from math import prod
from typing import Any

from memcalc.configs.keys import Checked
from memcalc.errors import FileError, PlanError
from memcalc.plan import Plan

__all__ = ["DEGREES", "SAYS", "read_layout", "written_layout"]

BLOCK = "parallelism_config"
DEGREES = ("dp_replicate_size", "dp_shard_size", "tp_size", "cp_size")
SAYS = ("layout.tensor", "layout.context", "fsdp.replicas")
_HYBRID = {"fsdp-full-shard": "fsdp-hybrid-shard", "fsdp-shard-grad-op": "fsdp-hybrid-shard-grad-op"}


def read_layout(found: Checked, name: str, strategy: str, version: str, world: int | None) -> dict[str, Any]:
    """Degrees, and the strategy where shards have copies (accelerate/parallelism_config.py). Raises FileError."""
    sizes = {key: found.get(f"{BLOCK}.{BLOCK}_{key}", 1) for key in DEGREES}
    if prod(sizes.values()) == 1:
        return {}
    if version != "2":
        raise FileError(f"{name}: {BLOCK} goes with fsdp_version 2 only; accelerate refuses it with FSDP 1")
    if world is not None and prod(sizes.values()) != world:
        product = " x ".join(str(size) for size in sizes.values())
        raise FileError(f"{name}: {BLOCK} is {product} = {prod(sizes.values())}, but num_processes is {world}")
    copies, shards, tensor, context = sizes.values()
    fields: dict[str, Any] = {"layout.tensor": tensor, "layout.context": context}
    if copies == 1:
        return fields
    if shards == 1:
        raise FileError(f"{name}: {BLOCK}_dp_replicate_size {copies} with dp_shard_size 1 is DDP; write MULTI_GPU")
    return fields | {"strategy": _HYBRID[strategy], "fsdp.replicas": copies}


def written_layout(plan: Plan) -> dict[str, int]:
    """The block that says a plan's degrees; empty where FSDP stands alone. Raises PlanError."""
    copies, layout = (plan.fsdp.replicas or 1), plan.layout
    hybrid = plan.strategy in _HYBRID.values()
    if hybrid and copies == 1:
        raise PlanError(
            f"accelerate cannot say {plan.strategy} with FSDP 2 but for a number of copies; give --replicas"
        )
    sizes = dict(zip(DEGREES, (copies, plan.data_parallel // copies, layout.tensor, layout.context), strict=True))
    if hybrid and sizes["dp_shard_size"] == 1:
        raise PlanError(f"accelerate cannot say {plan.strategy} with {copies} copies of whole models; take ddp")
    if (copies, layout.tensor, layout.context) == (1, 1, 1):
        return {}
    return {f"{BLOCK}_{key}": size for key, size in sizes.items()}
