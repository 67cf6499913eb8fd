"""DeepSpeed's JSON, read into a plan's fields."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from memcalc.configs.batch import Batch
from memcalc.configs.deepspeed_table import TABLE
from memcalc.configs.keys import AUTO, Checked, check
from memcalc.configs.launch_file import LaunchFile
from memcalc.errors import FileError, InputError, UnknownNameError
from memcalc.hyperparameters import COEFFICIENTS, SCALING, read_coefficients, read_scaling
from memcalc.optimizers import OPTIMIZERS
from memcalc.rates import SCHEDULES, read_schedule, schedule_text

__all__ = ["ADAMS", "DTYPES", "KNOBS", "OTHERS", "PLACES", "SAYS", "ZERO", "read"]

ZERO = "zero_optimization"
KNOBS = {
    key: says.removeprefix("deepspeed.")
    for key, says in ((key, row.says) for key, row in TABLE.items())
    if key.startswith(f"{ZERO}.") and says.startswith("deepspeed.")
}
"""Keys that are a field of the plan's group ``deepspeed`` as they stand (``overlap_comm`` in words of its own)."""
PLACES = {
    f"{ZERO}.offload_optimizer.buffer_count": "optimizer_buffers",
    f"{ZERO}.offload_param.buffer_count": "parameter_buffers",
    f"{ZERO}.offload_param.buffer_size": "parameter_buffer_size",
    f"{ZERO}.offload_param.max_in_cpu": "max_in_cpu",
}
SAYS = frozenset(
    ("strategy", "precision", "micro_batch", "accumulation", "optimizer", "optimizer_kind", "update.l2", "update.clip",
     "deepspeed.grad_accum_dtype", "offload.optimizer", "offload.parameters", "offload.pin_memory",
     *(f"deepspeed.{field}" for field in KNOBS.values()), *(f"offload.{field}" for field in PLACES.values()))
)  # fmt: skip
"""Fields of the plan that such a file says; it leaves the others to the training script and its launcher."""

ADAMS = ("adam", "adamw")
OTHERS = {
    "adagrad": "Adagrad", "adadelta": "Adadelta", "adamax": "Adamax", "asgd": "ASGD", "lion": "Lion", "nadam": "NAdam",
    "radam": "RAdam", "rmsprop": "RMSprop", "sgd": "SGD",
}  # fmt: skip
"""Other optimizers than Adam by memcalc's names; DeepSpeed takes torch.optim's spelling."""
_SHARED = ("lr", "betas", "eps", "weight_decay")
_PARAMS = {
    "adam": (*_SHARED, "bias_correction", "torch_adam", "adam_w_mode", "foreach"),
    "other": (*_SHARED, "momentum", "nesterov", "foreach", "fused"),
}
_MOMENTA = ("cycle_momentum", "cycle_min_mom", "cycle_max_mom", "decay_mom_rate")
DTYPES = {"bf16-master": ("bf16", "bfloat16"), "fp16-master": ("fp16", "float16", "half"), "fp32": ()}


def read(tree: Any, name: str) -> LaunchFile:
    """What a parsed file says. Raises FileError, naming the key."""
    if isinstance(tree, dict) and isinstance(tree.get(ZERO), bool):
        raise FileError(f'{name}: {ZERO} is true or false, a form DeepSpeed gave up; write {{"stage": 1}}')
    tree, unknown = _without_unknown_schedule(tree)
    found = check(tree, TABLE, name)
    if unknown:
        found.notes.append(f"{name}: scheduler {unknown} is none that memcalc's own runs know; they keep theirs")
    stage = found.get(f"{ZERO}.stage", 0)
    if stage > 3:
        raise FileError(f"{name}: {ZERO}.stage {stage} does not exist; DeepSpeed has stages 0 to 3")
    precision = _precision(found, name)
    fields: dict[str, Any] = {"strategy": f"deepspeed-{stage}", "precision": precision}
    fields |= {f"deepspeed.{field}": found.values[key] for key, field in KNOBS.items() if key in found.values}
    if "deepspeed.overlap_comm" in fields:
        fields["deepspeed.overlap_comm"] = "on" if fields["deepspeed.overlap_comm"] else "off"
    fields |= _accumulates(found, precision, name) | _offloads(found, stage, name) | _optimizer(found, name)
    forced = found.get("zero_force_ds_cpu_optimizer", True) and "optimizer.type" not in found.values
    if forced and fields["offload.optimizer"] != "none":
        found.notes.append(
            f"{name}: without an optimizer here DeepSpeed takes none from the script but its own CPU Adam, because of "
            "offload_optimizer; name one, or write zero_force_ds_cpu_optimizer: false"
        )
    clip = found.get("gradient_clipping", 1.0)  # GRADIENT_CLIPPING_DEFAULT of deepspeed/runtime/constants.py
    clip = 1.0 if clip == AUTO else clip  # max_grad_norm of transformers' TrainingArguments
    fields["update.clip"] = clip > 0
    rate = found.get("optimizer.params.lr")
    trains = _schedule(found, name) | ({"learning_rate": float(rate)} if rate not in (None, AUTO) else {})
    trains |= _coefficients(found, name) | _scaling(found, precision, name) | _disk(found, fields, name)
    keys = {
        "train": "train_batch_size",
        "micro": "train_micro_batch_size_per_gpu",
        "accumulation": "gradient_accumulation_steps",
    }
    said = {part: found.get(key) for part, key in keys.items()}
    return LaunchFile(
        name=name, format="deepspeed", fields=fields, notes=tuple(found.notes),
        batch=Batch(**{part: None if value == AUTO else value for part, value in said.items()}),
        batch_autos={keys[part]: part for part, value in said.items() if value == AUTO},
        training={"clip": float(clip)} | trains,
    )  # fmt: skip


def _without_unknown_schedule(tree: Any) -> tuple[Any, str]:
    """DeepSpeed takes any schedule of torch.optim.lr_scheduler, whose parameters are not in the table."""
    block = tree.get("scheduler") if isinstance(tree, dict) else None
    kind = block.get("type") if isinstance(block, dict) else None
    if isinstance(kind, str) and kind not in SCHEDULES:
        return {key: value for key, value in tree.items() if key != "scheduler"}, kind
    return tree, ""


def _schedule(found: Checked, name: str) -> dict[str, str]:
    kind, prefix = found.get("scheduler.type"), "scheduler.params."
    params = {key.removeprefix(prefix): value for key, value in found.values.items() if key.startswith(prefix)}
    if kind is None:
        if params:
            found.notes.append(f"{name}: scheduler.params change nothing without a type")
        return {}
    text = schedule_text(kind, {key: value for key, value in params.items() if key not in _MOMENTA})
    try:
        read_schedule(text, 1.0, 1)
    except InputError as error:
        raise FileError(f"{name}: {error}") from None
    return {"schedule": text}


def _disk(found: Checked, fields: dict[str, Any], name: str) -> dict[str, str]:
    """The folder for what is offloaded to NVMe; memcalc's runs have one for both."""
    places = {"optimizer": "offload.optimizer", "param": "offload.parameters"}
    paths = [
        found.values[f"{ZERO}.offload_{part}.nvme_path"] for part, field in places.items() if fields[field] == "nvme"
    ]
    if len(set(paths)) > 1:
        found.notes.append(f"{name}: nvme_path differs for optimizer and parameters; {paths[0]} is taken for both")
    return {"nvme_path": paths[0]} if paths else {}


def _coefficients(found: Checked, name: str) -> dict[str, str]:
    """What the optimizer is given. DeepSpeed's own Adam does not decay weights unless it is told to
    (deepspeed/ops/adam/fused_adam.py), torch's AdamW does."""
    kind = found.get("optimizer.type")
    if kind is None:
        return {}
    params = {key: found.get(f"optimizer.params.{key}") for key in COEFFICIENTS}
    said = {key: value for key, value in params.items() if value not in (None, AUTO)}
    if not said.get("momentum"):
        said.pop("momentum", None)
    own_adam = kind.lower() in ADAMS and not found.get("optimizer.params.torch_adam")
    if own_adam or params["weight_decay"] == AUTO:  # 0 in transformers' TrainingArguments, too
        said.setdefault("weight_decay", 0.0)
    return {"coefficients": _json(said, read_coefficients, name)} if said else {}


def _scaling(found: Checked, precision: str, name: str) -> dict[str, str]:
    """How losses are scaled in float16; the same block may stand in a file that is for bfloat16."""
    said = {key: found.get(f"fp16.{key}") for key in SCALING if found.get(f"fp16.{key}") is not None}
    if precision not in ("fp16-master", AUTO):
        if said:
            found.notes.append(f"{name}: fp16.{', fp16.'.join(said)} change nothing: fp16 is not enabled")
        return {}
    return {"scaling": _json(said, read_scaling, name)} if said else {}


def _json(said: dict[str, Any], judge: Callable[[str], object], name: str) -> str:
    text = json.dumps(said)
    try:
        judge(text)
    except InputError as error:
        raise FileError(f"{name}: {error}") from None
    return text


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
    if precision != AUTO and said.removeprefix("torch.") not in DTYPES[precision]:
        raise FileError(f"{name}: data_types.grad_accum_dtype {said} is neither float32 nor what {precision} trains in")
    return {"deepspeed.grad_accum_dtype": "weights"}


def _offloads(found: Checked, stage: int, name: str) -> dict[str, Any]:
    """Where optimizer and parameters go, and what DeepSpeed ignores of it, in notes."""
    places = {part: found.get(f"{ZERO}.offload_{part}.device", "none") for part in ("optimizer", "param")}
    for old, part in (("cpu_offload", "optimizer"), ("cpu_offload_param", "param"), ("cpu_offload_params", "param")):
        if found.get(f"{ZERO}.{old}"):
            found.notes.append(
                f"{name}: {ZERO}.{old} is the old spelling of offload_{part}: {{device: cpu}}, taken as that"
            )
            places[part] = "cpu"
    for part, least in (("optimizer", 1), ("param", 3)):
        if places[part] != "none" and stage < least:
            found.notes.append(
                f"{name}: offload_{part} {places[part]} is ignored: DeepSpeed offloads it from stage {least} on, not in "
                f"stage {stage}"
            )
            places[part] = "none"
        if places[part] == "nvme" and not found.get(f"{ZERO}.offload_{part}.nvme_path"):
            raise FileError(f"{name}: {ZERO}.offload_{part} to nvme needs nvme_path, a folder on the disk")
        idle = [key for key in found.values if key.startswith(f"{ZERO}.offload_{part}.")]
        if idle and places[part] == "none" and f"{ZERO}.offload_{part}.device" not in idle:
            found.notes.append(f"{name}: {', '.join(idle)} changes nothing without a device")
    fields: dict[str, Any] = {"offload.optimizer": places["optimizer"], "offload.parameters": places["param"]}
    pins = [found.get(f"{ZERO}.offload_{part}.pin_memory", found.get(f"{ZERO}.cpu_offload_use_pin_memory", True))
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
    if strange := sorted(set(params) - set(_PARAMS["adam" if kind in ADAMS else "other"])):
        raise FileError(f"{name}: optimizer.params.{strange[0]} is no parameter of {typed}; leave it out")
    decays = params.get("weight_decay", 0.0) not in (0, AUTO)
    if kind in ADAMS:
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
    if kind not in OTHERS:
        raise FileError(f"{name}: {UnknownNameError('optimizer.type', typed, ['Adam', 'AdamW', *OTHERS.values()])}")
    chosen = kind
    if kind in ("sgd", "rmsprop") and params.get("momentum"):
        chosen = "sgd-nesterov" if params.get("nesterov") and kind == "sgd" else f"{kind}-momentum"
    walked = "fused" if params.get("fused") else "for-loop" if params.get("foreach") is False else "foreach"
    if walked not in OPTIMIZERS[chosen].kinds:
        walked = OPTIMIZERS[chosen].kinds[0]
    return {"optimizer": chosen, "optimizer_kind": walked, "update.l2": decays and not OPTIMIZERS[chosen].decoupled}
