"""DeepSpeed's JSON, written from a plan."""

from __future__ import annotations

import json
from typing import Any

from memcalc.configs.deepspeed_json import ADAMS, DTYPES, KNOBS, OTHERS, PLACES, ZERO
from memcalc.configs.keys import AUTO
from memcalc.deepspeed import DeepSpeed
from memcalc.errors import PlanError
from memcalc.hyperparameters import read_coefficients, read_scaling
from memcalc.offload import Offload
from memcalc.plan import Plan
from memcalc.training import Training

__all__ = ["LOCAL_NVME", "render"]

_MOMENTUM = 0.9
LOCAL_NVME = "/local_nvme"
"""What is written where no folder is said: that of DeepSpeed's own examples."""
_DECAY = 0.01
"""What memcalc's own runs take where nothing else is said (trainers/optimizers.py); torch's default of AdamW."""


def render(plan: Plan, training: Training | None = None) -> str:
    """The file that says a plan. Raises PlanError for what it has no words for."""
    stage = plan.strategy_row.zero_stage
    if stage is None:
        raise PlanError(f"a DeepSpeed file cannot say strategy {plan.strategy}; it has: deepspeed-0 to deepspeed-3")
    if plan.precision not in DTYPES:
        raise PlanError(f"a DeepSpeed file cannot say precision {plan.precision}; it has: {', '.join(DTYPES)}")
    training = training or Training()
    scaling = read_scaling(training.scaling) if training.scaling else {}
    tree: dict[str, Any] = {
        "train_batch_size": plan.global_batch or AUTO,
        "train_micro_batch_size_per_gpu": plan.micro_batch or AUTO,
        "gradient_accumulation_steps": plan.accumulation,
        "gradient_clipping": (training.clip or 1.0) if plan.update.clip else 0.0,
        "fp16": {"enabled": True} | scaling if plan.precision == "fp16-master" else {"enabled": False},
        "bf16": {"enabled": plan.precision == "bf16-master"},
        ZERO: _zero(plan, stage, training),
        "optimizer": _written(plan, training),
    }
    if training.schedule:
        kind, *params = json.loads(training.schedule).items()
        tree["scheduler"] = {"type": kind[1], "params": dict(params)}
    if plan.deepspeed.grad_accum_dtype == "float32":
        tree["data_types"] = {"grad_accum_dtype": "fp32"}
    return json.dumps(tree, indent=2) + "\n"


def _zero(plan: Plan, stage: int, training: Training) -> dict[str, Any]:
    zero: dict[str, Any] = {"stage": stage}
    usual = DeepSpeed()
    for key, field in KNOBS.items():
        value = getattr(plan.deepspeed, field)
        if value != getattr(usual, field):
            zero[key.removeprefix(f"{ZERO}.")] = value == "on" if field == "overlap_comm" else value
    for part, place in (("optimizer", plan.offload.optimizer), ("param", plan.offload.parameters)):
        if place == "none":
            continue
        block: dict[str, Any] = {"device": place, "pin_memory": plan.offload.pin_memory}
        if place == "nvme":
            block["nvme_path"] = str(training.nvme_path or LOCAL_NVME)
        for key, field in PLACES.items():
            if f"offload_{part}." in key and getattr(plan.offload, field) != getattr(Offload(), field):
                block[key.rpartition(".")[2]] = getattr(plan.offload, field)
        zero[f"offload_{part}"] = block
    return zero


def _written(plan: Plan, training: Training) -> dict[str, Any]:
    said = read_coefficients(training.coefficients) if training.coefficients else {}
    decays = plan.update.l2 or plan.optimizer == "adamw"
    params: dict[str, Any] = {"lr": training.learning_rate, "weight_decay": _DECAY if decays else 0.0} | said
    base, _, variant = plan.optimizer.partition("-")
    if plan.optimizer in ADAMS:
        if plan.optimizer_kind != "fused":
            params |= {"torch_adam": True} | ({"foreach": False} if plan.optimizer_kind == "for-loop" else {})
        if plan.optimizer == "adam":
            params["adam_w_mode"] = False
        return {"type": "Adam" if plan.optimizer == "adam" else "AdamW", "params": params}
    if base not in OTHERS or variant not in ("", "momentum", "nesterov"):
        known = ", ".join([*ADAMS, *OTHERS])
        raise PlanError(f"a DeepSpeed file cannot say optimizer {plan.optimizer}; it has: {known}")
    if variant:
        params = {"momentum": _MOMENTUM} | params | ({"nesterov": True} if variant == "nesterov" else {})
    walked = {"fused": {"fused": True}, "for-loop": {"foreach": False}}.get(plan.optimizer_kind, {})
    return {"type": OTHERS[base], "params": params | walked}
