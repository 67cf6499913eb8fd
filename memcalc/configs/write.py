"""Launch files written from a plan: each is read back before it is given out, and has to say the same plan."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

from memcalc.configs import accelerate_write, accelerate_yaml, deepspeed_json, deepspeed_write, fsdp_yaml
from memcalc.configs.launch_file import LaunchFile
from memcalc.configs.settle import apply, settle
from memcalc.configs.text import parse_text
from memcalc.errors import PlanError
from memcalc.groups import Group
from memcalc.plan import Plan
from memcalc.strategies import Strategy
from memcalc.training import Training

__all__ = ["FORMATS", "Format", "Written", "leaves", "suited", "write"]

_SPREAD = ("layout", "deepspeed", "offload", "nodes")
"""What says how a run is spread: no training script makes up for a file that leaves it out."""
_DECIDED_LATER = ("deepspeed.flatten", "deepspeed.pipeline_engine")
"""The first by DeepSpeed when it sees how much room there is, the second by the script that makes the model."""

_BESIDE = ("model", "gpu", "torch")
"""What no launch file is about."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Format:
    """One format that a plan can be written in."""

    file: str
    """The name of the file."""
    render: Callable[[Plan, Training | None], str]
    read: Callable[[Any, str], LaunchFile]
    says: Callable[[Plan], frozenset[str]]
    takes: Callable[[Strategy], bool]
    """Whether there are words for a strategy of more than one rank."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Written:
    """The text of a launch file, and fields of the plan that are left to the training script, with their values."""

    text: str
    left: tuple[str, ...]


FORMATS = {
    "fsdp": Format(
        file="fsdp_config.yaml",
        render=fsdp_yaml.render,
        read=fsdp_yaml.read,
        says=lambda plan: fsdp_yaml.SAYS,
        takes=lambda row: row.name in fsdp_yaml.STRATEGIES,
    ),
    "deepspeed": Format(
        file="ds_config.json",
        render=deepspeed_write.render,
        read=deepspeed_json.read,
        says=lambda plan: deepspeed_json.SAYS,
        takes=lambda row: row.zero_stage is not None,
    ),
    "accelerate": Format(
        file="accelerate.yaml",
        render=accelerate_write.render,
        read=accelerate_yaml.read,
        says=accelerate_write.says,
        takes=lambda row: row.name == "ddp" or row.gathers or row.zero_stage is not None,
    ),
}


def leaves(plan: Plan) -> dict[str, Any]:
    """Every field of a plan by name, those of a group with a dot; the model is one field."""
    found: dict[str, Any] = {}
    for field in dataclasses.fields(plan):
        value = getattr(plan, field.name)
        if isinstance(value, Group):
            found |= {f"{field.name}.{each.name}": getattr(value, each.name) for each in dataclasses.fields(value)}  # type: ignore[arg-type]
        else:
            found[field.name] = value
    return found


@cache
def _usual() -> dict[str, Any]:
    """The defaults of a plan's fields, as ``leaves`` names them."""
    found: dict[str, Any] = {}
    for field in dataclasses.fields(Plan):
        if isinstance(field.default, Group):
            found |= {f"{field.name}.{each.name}": each.default for each in dataclasses.fields(field.default)}  # type: ignore[arg-type]
        else:
            found[field.name] = field.default
    return found


def suited(plan: Plan, format: str) -> tuple[Plan, tuple[str, ...]]:
    """The plan as the framework behind a format runs it, and what that changes, a line each."""
    dtype = plan.fsdp.reduce_dtype
    if format == "accelerate" and plan.strategy_row.gathers and plan.precision_row.autocast and dtype != "compute":
        changed = dataclasses.replace(plan, fsdp=dataclasses.replace(plan.fsdp, reduce_dtype="compute"))
        return changed, (f"accelerate reduces gradients in {plan.precision_row.compute}, not in {plan.reduce_dtype}",)
    return plan, ()


def write(plan: Plan, format: str, training: Training | None = None) -> Written:
    """The file of a format that says the plan. Raises PlanError, naming the field, for what the format cannot say."""
    row = FORMATS[format]
    said, values = row.says(plan), leaves(plan)
    usual = _usual()
    text = row.render(plan, training)
    other = [name for name, value in values.items() if name not in said and value != usual[name]]
    for name in other:
        if _spreads(name, said):
            raise PlanError(f"{_article(format)} file cannot say {_spelled(name)} {values[name]}; only {usual[name]}")
    file = row.read(parse_text(text, row.file), row.file)
    beside = {
        name: values[name]
        for name in ("ranks", "layout.tensor", "layout.context", "layout.pipeline", "device")
        if name not in said
    }
    fields = {name: usual[name] for name in said} | settle(file, beside, plan.model).fields
    if file.batch_autos or not said & {"micro_batch"}:
        fields["micro_batch"] = plan.micro_batch
    again = leaves(apply(plan, fields))
    for name, value in values.items():
        if again[name] != value:
            raise PlanError(
                f"{_article(format)} file cannot say {_spelled(name)} {value}; it would be read as {again[name]}"
            )
    return Written(
        text=text, left=tuple(f"{_spelled(name)} {_shown(values[name])}" for name in other if name not in _BESIDE)
    )


def _spreads(name: str, said: frozenset[str]) -> bool:
    group = name.partition(".")[0]
    if group == "nodes" and "ranks" not in said:
        return False  # DeepSpeed's launcher knows its machines
    if group == "checkpointing" and "checkpoint_every" in said:
        return True
    return group in _SPREAD and name not in _DECIDED_LATER


def _article(format: str) -> str:
    return {"fsdp": "an fsdp", "deepspeed": "a DeepSpeed", "accelerate": "an accelerate"}[format]


def _spelled(name: str) -> str:
    return name.replace(".", " ").replace("_", " ")


def _shown(value: Any) -> str:
    return json.dumps(value) if isinstance(value, bool) else str(value)
