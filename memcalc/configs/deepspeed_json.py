"""DeepSpeed's JSON, read into a plan's fields and written from a plan."""

from __future__ import annotations

import json
from typing import Any

from memcalc.configs.batch import Batch
from memcalc.configs.deepspeed_table import TABLE
from memcalc.configs.keys import AUTO, Checked, check
from memcalc.configs.launch_file import LaunchFile
from memcalc.deepspeed import DeepSpeed
from memcalc.errors import FileError, PlanError, UnknownNameError
from memcalc.offload import Offload
from memcalc.optimizers import OPTIMIZERS
from memcalc.plan import Plan
from memcalc.training import Training

__all__ = ["KNOBS", "PLACES", "SAYS", "offloads", "read", "render"]

_ZERO = "zero_optimization"
KNOBS = {
    key: says.removeprefix("deepspeed.")
    for key, says in ((key, row.says) for key, row in TABLE.items())
    if key.startswith(f"{_ZERO}.") and says.startswith("deepspeed.")
}
"""Keys that are a field of the plan's group ``deepspeed`` as they stand (``overlap_comm`` in words of its own)."""
PLACES = {
    f"{_ZERO}.offload_optimizer.buffer_count": "optimizer_buffers",
    f"{_ZERO}.offload_param.buffer_count": "parameter_buffers",
    f"{_ZERO}.offload_param.buffer_size": "parameter_buffer_size",
    f"{_ZERO}.offload_param.max_in_cpu": "max_in_cpu",
}
SAYS = frozenset(
    ("strategy", "precision", "micro_batch", "accumulation", "optimizer", "optimizer_kind", "update.l2", "update.clip",
     "deepspeed.grad_accum_dtype", "offload.optimizer", "offload.parameters", "offload.pin_memory",
     *(f"deepspeed.{field}" for field in KNOBS.values()), *(f"offload.{field}" for field in PLACES.values()))
)  # fmt: skip
"""Fields of the plan that such a file says; it leaves the others to the training script and its launcher."""

_ADAMS = ("adam", "adamw")
_OTHERS = {
    "adagrad": "Adagrad", "adadelta": "Adadelta", "adamax": "Adamax", "asgd": "ASGD", "lion": "Lion", "nadam": "NAdam",
    "radam": "RAdam", "rmsprop": "RMSprop", "sgd": "SGD",
}  # fmt: skip
"""Other optimizers than Adam by memcalc's names; DeepSpeed takes torch.optim's spelling."""
_SHARED = ("lr", "betas", "eps", "weight_decay")
_PARAMS = {
    "adam": (*_SHARED, "bias_correction", "torch_adam", "adam_w_mode", "foreach"),
    "other": (*_SHARED, "momentum", "nesterov", "foreach", "fused"),
}
_MOMENTUM = 0.9
_DECAY = 0.01
"""A usual weight decay; only that it is not 0 changes memory."""
_DTYPES = {"bf16-master": ("bf16", "bfloat16"), "fp16-master": ("fp16", "float16", "half"), "fp32": ()}


def read(tree: Any, name: str) -> LaunchFile:
    """What a parsed file says. Raises FileError, naming the key."""
    if isinstance(tree, dict) and isinstance(tree.get(_ZERO), bool):
        raise FileError(f'{name}: {_ZERO} is true or false, a form DeepSpeed gave up; write {{"stage": 1}}')
    found = check(tree, TABLE, name)
    stage = found.get(f"{_ZERO}.stage", 0)
    if stage > 3:
        raise FileError(f"{name}: {_ZERO}.stage {stage} does not exist; DeepSpeed has stages 0 to 3")
    precision = _precision(found, name)
    fields: dict[str, Any] = {"strategy": f"deepspeed-{stage}", "precision": precision}
    fields |= {f"deepspeed.{field}": found.values[key] for key, field in KNOBS.items() if key in found.values}
    if "deepspeed.overlap_comm" in fields:
        fields["deepspeed.overlap_comm"] = "on" if fields["deepspeed.overlap_comm"] else "off"
    fields |= _accumulates(found, precision, name) | offloads(found, stage, name) | _optimizer(found, name)
    clip = found.get("gradient_clipping", 1.0)  # GRADIENT_CLIPPING_DEFAULT of deepspeed/runtime/constants.py
    clip = 1.0 if clip == AUTO else clip  # max_grad_norm of transformers' TrainingArguments
    fields["update.clip"] = clip > 0
    rate = found.get("optimizer.params.lr")
    keys = {
        "train": "train_batch_size",
        "micro": "train_micro_batch_size_per_gpu",
        "accumulation": "gradient_accumulation_steps",
    }
    said = {part: found.get(key) for part, key in keys.items()}
    return LaunchFile(
        name=name, format="deepspeed", fields=fields, notes=tuple(found.notes),
        batch=Batch(**{part: None if value == AUTO else value for part, value in said.items()}),
        batch_autos=tuple(keys[part] for part, value in said.items() if value == AUTO),
        training={"clip": float(clip)} | ({"learning_rate": float(rate)} if rate not in (None, AUTO) else {}),
    )  # fmt: skip


def _precision(found: Checked, name: str) -> str:
    if found.on("fp16") and found.on("bf16"):
        raise FileError(f"{name}: fp16 and bf16 are both enabled; DeepSpeed takes one of them")
    if found.on("fp16") or found.on("bf16"):
        return "fp16-master" if found.on("fp16") else "bf16-master"
    return AUTO if AUTO in (found.get("fp16.enabled"), found.get("bf16.enabled")) else "fp32"


def _accumulates(found: Checked, precision: str, name: str) -> dict[str, Any]:
    said = found.get("data_types.grad_accum_dtype")
    if said is None:
        return {}
    if "float" in said.split(".") or said in ("fp32", "float32", "torch.float32"):
        return {"deepspeed.grad_accum_dtype": "float32"}
    if precision != AUTO and said.removeprefix("torch.") not in _DTYPES[precision]:
        raise FileError(f"{name}: data_types.grad_accum_dtype {said} is neither float32 nor what {precision} trains in")
    return {"deepspeed.grad_accum_dtype": "weights"}


def offloads(found: Checked, stage: int, name: str) -> dict[str, Any]:
    """Where optimizer and parameters go, and what DeepSpeed ignores of it, in notes."""
    places = {part: found.get(f"{_ZERO}.offload_{part}.device", "none") for part in ("optimizer", "param")}
    for old, part in (("cpu_offload", "optimizer"), ("cpu_offload_param", "param"), ("cpu_offload_params", "param")):
        if found.get(f"{_ZERO}.{old}"):
            found.notes.append(
                f"{name}: {_ZERO}.{old} is the old spelling of offload_{part}: {{device: cpu}}, taken as that"
            )
            places[part] = "cpu"
    for part, least in (("optimizer", 1), ("param", 3)):
        if places[part] != "none" and stage < least:
            found.notes.append(
                f"{name}: offload_{part} {places[part]} is ignored: DeepSpeed offloads it from stage {least} on, not in "
                f"stage {stage}"
            )
            places[part] = "none"
        if places[part] == "nvme" and not found.get(f"{_ZERO}.offload_{part}.nvme_path"):
            raise FileError(f"{name}: {_ZERO}.offload_{part} to nvme needs nvme_path, a folder on the disk")
        idle = [key for key in found.values if key.startswith(f"{_ZERO}.offload_{part}.")]
        if idle and places[part] == "none" and f"{_ZERO}.offload_{part}.device" not in idle:
            found.notes.append(f"{name}: {', '.join(idle)} changes nothing without a device")
    fields: dict[str, Any] = {"offload.optimizer": places["optimizer"], "offload.parameters": places["param"]}
    pins = [found.get(f"{_ZERO}.offload_{part}.pin_memory", found.get(f"{_ZERO}.cpu_offload_use_pin_memory", True))
            for part, place in places.items() if place != "none"]  # fmt: skip
    if pins:
        fields["offload.pin_memory"] = any(pins)
        if len(set(pins)) > 1:
            found.notes.append(f"{name}: pin_memory differs for optimizer and parameters; counted as true for both")
        fields |= {f"offload.{field}": found.values[key] for key, field in PLACES.items() if key in found.values}
    return fields


def _optimizer(found: Checked, name: str) -> dict[str, Any]:
    """The optimizer and how its step runs; nothing where the training script makes its own."""
    typed = found.get("optimizer.type")
    if typed is None:
        return {}
    kind, prefix = typed.lower(), "optimizer.params."
    params = {key.removeprefix(prefix): value for key, value in found.values.items() if key.startswith(prefix)}
    if strange := sorted(set(params) - set(_PARAMS["adam" if kind in _ADAMS else "other"])):
        raise FileError(f"{name}: optimizer.params.{strange[0]} is no parameter of {typed}; leave it out")
    decays = params.get("weight_decay", 0.0) not in (0, AUTO)
    if decays:
        found.notes.append(
            f"{name}: optimizer.params.weight_decay {params['weight_decay']} is not used by memcalc's own runs"
        )
    if kind in _ADAMS:
        # "optimizer name of Adam forces AdamW logic unless adam_w_mode is explicitly set" (runtime/engine.py)
        decoupled = kind == "adamw" or params.get("adam_w_mode", True)
        if kind == "adam" and decoupled:
            found.notes.append(f"{name}: optimizer Adam without adam_w_mode false is AdamW to DeepSpeed, and so here")
        if "foreach" in params and not params.get("torch_adam"):
            raise FileError(
                f"{name}: optimizer.params.foreach is for torch's Adam; add torch_adam: true, or leave it out"
            )
        if kind == "adamw" and params.get("adam_w_mode") is False:
            found.notes.append(f"{name}: optimizer.params.adam_w_mode false changes nothing: the type AdamW decides")
        walked = (
            "fused" if not params.get("torch_adam") else "for-loop" if params.get("foreach") is False else "foreach"
        )
        return {
            "optimizer": "adamw" if decoupled else "adam",
            "optimizer_kind": walked,
            "update.l2": decays and not decoupled,
        }
    if kind not in _OTHERS:
        raise FileError(f"{name}: {UnknownNameError('optimizer.type', typed, ['Adam', 'AdamW', *_OTHERS.values()])}")
    chosen = kind
    if kind in ("sgd", "rmsprop") and params.get("momentum"):
        chosen = "sgd-nesterov" if params.get("nesterov") and kind == "sgd" else f"{kind}-momentum"
    walked = "fused" if params.get("fused") else "for-loop" if params.get("foreach") is False else "foreach"
    if walked not in OPTIMIZERS[chosen].kinds:
        walked = OPTIMIZERS[chosen].kinds[0]
    return {"optimizer": chosen, "optimizer_kind": walked, "update.l2": decays and not OPTIMIZERS[chosen].decoupled}


def render(plan: Plan, training: Training | None = None) -> str:
    """The file that says a plan. Raises PlanError for what it has no words for."""
    stage = plan.strategy_row.zero_stage
    if stage is None:
        raise PlanError(f"a DeepSpeed file cannot say strategy {plan.strategy}; it has: deepspeed-0 to deepspeed-3")
    if plan.precision not in _DTYPES:
        raise PlanError(f"a DeepSpeed file cannot say precision {plan.precision}; it has: {', '.join(_DTYPES)}")
    training = training or Training()
    tree: dict[str, Any] = {
        "train_batch_size": plan.global_batch or AUTO,
        "train_micro_batch_size_per_gpu": plan.micro_batch or AUTO,
        "gradient_accumulation_steps": plan.accumulation,
        "gradient_clipping": (training.clip or 1.0) if plan.update.clip else 0.0,
        "fp16": {"enabled": plan.precision == "fp16-master"},
        "bf16": {"enabled": plan.precision == "bf16-master"},
        _ZERO: _zero(plan, stage),
        "optimizer": _written(plan, training),
    }
    if plan.deepspeed.grad_accum_dtype == "float32":
        tree["data_types"] = {"grad_accum_dtype": "fp32"}
    return json.dumps(tree, indent=2) + "\n"


def _zero(plan: Plan, stage: int) -> dict[str, Any]:
    zero: dict[str, Any] = {"stage": stage}
    usual = DeepSpeed()
    for key, field in KNOBS.items():
        value = getattr(plan.deepspeed, field)
        if value != getattr(usual, field):
            zero[key.removeprefix(f"{_ZERO}.")] = value == "on" if field == "overlap_comm" else value
    for part, place in (("optimizer", plan.offload.optimizer), ("param", plan.offload.parameters)):
        if place == "none":
            continue
        block: dict[str, Any] = {"device": place, "pin_memory": plan.offload.pin_memory}
        if place == "nvme":
            block["nvme_path"] = "/local_nvme"
        for key, field in PLACES.items():
            if f"offload_{part}." in key and getattr(plan.offload, field) != getattr(Offload(), field):
                block[key.rpartition(".")[2]] = getattr(plan.offload, field)
        zero[f"offload_{part}"] = block
    return zero


def _written(plan: Plan, training: Training) -> dict[str, Any]:
    params: dict[str, Any] = {"lr": training.learning_rate, "weight_decay": _DECAY if plan.update.l2 else 0.0}
    base, _, variant = plan.optimizer.partition("-")
    if plan.optimizer in _ADAMS:
        if plan.optimizer_kind != "fused":
            params |= {"torch_adam": True} | ({"foreach": False} if plan.optimizer_kind == "for-loop" else {})
        if plan.optimizer == "adam":
            params["adam_w_mode"] = False
        return {"type": "Adam" if plan.optimizer == "adam" else "AdamW", "params": params}
    if base not in _OTHERS or variant not in ("", "momentum", "nesterov"):
        known = ", ".join([*_ADAMS, *_OTHERS])
        raise PlanError(f"a DeepSpeed file cannot say optimizer {plan.optimizer}; it has: {known}")
    if variant:
        params |= {"momentum": _MOMENTUM} | ({"nesterov": True} if variant == "nesterov" else {})
    walked = {"fused": {"fused": True}, "for-loop": {"foreach": False}}.get(plan.optimizer_kind, {})
    return {"type": _OTHERS[base], "params": params | walked}
