"""accelerate's YAML, written from a plan."""

from __future__ import annotations

from typing import Any

from memcalc.configs.accelerate_layout import SAYS, written_layout
from memcalc.configs.accelerate_yaml import PREFETCH, SHARDING
from memcalc.configs.deepspeed_write import LOCAL_NVME
from memcalc.configs.text import dump_yaml
from memcalc.errors import PlanError
from memcalc.plan import Plan
from memcalc.training import Training

__all__ = ["render", "says"]

_ALWAYS = ("strategy", "ranks", "nodes", "device", "precision", "compute.compile")
_FSDP = (
    "fsdp.version", "fsdp.reduce_dtype", "fsdp.backward_prefetch", "fsdp.forward_prefetch", "fsdp.original_parameters",
    "checkpoint_every", "offload.parameters", "offload.optimizer",
)  # fmt: skip
_DEEPSPEED = ("accumulation", "update.clip", "offload.parameters", "offload.optimizer", "startup.build")


def says(plan: Plan) -> frozenset[str]:
    """Fields of the plan that its file says; others are left to the training script."""
    if plan.strategy_row.zero_stage is not None:
        return frozenset((*_ALWAYS, *_DEEPSPEED))
    composed = SAYS if _is_fsdp(plan) and plan.fsdp.version == "2" else ()
    return frozenset((*_ALWAYS, *(_FSDP if _is_fsdp(plan) else ()), *composed))


def _is_fsdp(plan: Plan) -> bool:
    return plan.strategy in SHARDING.values()


def render(plan: Plan, training: Training | None = None) -> str:
    """The file that says a plan. Raises PlanError for what it has no words for."""
    row, zero = plan.strategy_row, plan.strategy_row.zero_stage is not None
    kinds = {"single": "NO", "ddp": "MULTI_CPU" if plan.device == "cpu" else "MULTI_GPU"}
    kind = "DEEPSPEED" if zero else "FSDP" if _is_fsdp(plan) else kinds.get(plan.strategy)
    if kind is None:
        raise PlanError(
            f"accelerate cannot say strategy {plan.strategy}; it has single, ddp, those of FSDP and of DeepSpeed"
        )
    if kind == "FSDP" and plan.device == "cpu":
        raise PlanError(f"accelerate takes DDP in the place of {row.name} on the CPU; take --strategy ddp")
    named = {
        "fp32": "no",
        **({"bf16-master": "bf16", "fp16-master": "fp16"} if zero else {"amp-bf16": "bf16", "amp-fp16": "fp16"}),
    }
    if plan.precision not in named:
        raise PlanError(f"accelerate cannot say precision {plan.precision} with {row.name}; it has: {', '.join(named)}")
    if plan.checkpoint_every > 1:
        raise PlanError(f"accelerate cannot say a checkpoint every {plan.checkpoint_every} blocks; it has: none, full")
    tree: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": kind,
        "mixed_precision": named[plan.precision],
        "num_machines": plan.nodes,
        "num_processes": plan.ranks,
        "use_cpu": plan.device == "cpu",
    }
    if plan.compute.compile:
        tree["dynamo_config"] = {"dynamo_backend": "INDUCTOR"}
    if kind == "FSDP":
        tree["fsdp_config"] = _fsdp(plan)
        if plan.fsdp.version == "2" and (degrees := written_layout(plan)):
            tree["parallelism_config"] = degrees
    if kind == "DEEPSPEED":
        tree["deepspeed_config"] = _deepspeed(plan, training or Training())
    return dump_yaml(tree)


def _fsdp(plan: Plan) -> dict[str, Any]:
    words = {name: word.upper() for word, name in SHARDING.items()}
    block: dict[str, Any] = {"fsdp_version": int(plan.fsdp.version)}
    if plan.fsdp.version == "2":
        if plan.strategy == "fsdp-no-shard":
            raise PlanError("accelerate cannot say fsdp-no-shard with FSDP 2; take ddp")
        block["fsdp_reshard_after_forward"] = plan.strategy_row.reshards
    else:
        block["fsdp_sharding_strategy"] = words[plan.strategy]
        block["fsdp_backward_prefetch"] = {value: word for word, value in PREFETCH.items() if not word.isdigit()}[
            plan.fsdp.backward_prefetch
        ].upper()
        block |= {
            "fsdp_forward_prefetch": plan.fsdp.forward_prefetch,
            "fsdp_use_orig_params": plan.fsdp.original_parameters,
        }
    return block | {
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_activation_checkpointing": plan.checkpoint_every == 1,
        "fsdp_offload_params": plan.offload.parameters == "cpu",
    }


def _deepspeed(plan: Plan, training: Training) -> dict[str, Any]:
    block: dict[str, Any] = {
        "zero_stage": plan.strategy_row.zero_stage,
        "gradient_accumulation_steps": plan.accumulation,
        "gradient_clipping": (training.clip or 1.0) if plan.update.clip else 0.0,
        "offload_optimizer_device": plan.offload.optimizer,
        "offload_param_device": plan.offload.parameters,
    }
    for part, place in (("optimizer", plan.offload.optimizer), ("param", plan.offload.parameters)):
        if place == "nvme":
            block[f"offload_{part}_nvme_path"] = str(training.nvme_path or LOCAL_NVME)
    return block | ({"zero3_init_flag": plan.startup.build == "shards"} if plan.strategy_row.zero_stage == 3 else {})
