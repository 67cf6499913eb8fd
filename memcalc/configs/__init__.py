"""Other people's launch files: the plain FSDP YAML, DeepSpeed's JSON and accelerate's YAML, read and written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from memcalc.configs import accelerate_yaml, deepspeed_json, fsdp_yaml
from memcalc.configs.launch_file import LaunchFile
from memcalc.configs.settle import Settled, apply, settle
from memcalc.configs.text import parse
from memcalc.configs.trainers_own import refuse_trainers
from memcalc.errors import FileError

__all__ = ["LaunchFile", "Settled", "apply", "read", "settle"]

_DEEPSPEED = {"zero_optimization", "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "fp16", "bf16", "optimizer"}  # fmt: skip


def read(path: Path) -> LaunchFile:
    """A launch file of any of the formats, told by its keys. Raises FileError in one line.

    Whatever stands in it is data: nothing is run, imported or fetched.
    """
    tree, name = parse(path), str(path)
    keys = set(tree) if isinstance(tree, dict) else set()
    if keys & {"distributed_type", "compute_environment"}:
        return accelerate_yaml.read(tree, name)
    refuse_trainers(tree, name)
    if "fsdp_config" in keys:
        return fsdp_yaml.read(tree, name)
    if keys & _DEEPSPEED:
        return deepspeed_json.read(tree, name)
    raise FileError(f"{name} is no launch file that memcalc reads{_instead(tree, keys)}")


def _instead(tree: Any, keys: set[Any]) -> str:
    if "memcalc_plan" in keys:
        return ": it is a plan of memcalc; give it to --plan, or to memcalc launch"
    if "model_type" in keys:
        return ": it is the config of a model, not of a launch"
    known = "an fsdp_config block, DeepSpeed's JSON (zero_optimization, train_batch_size, ...) or accelerate's YAML (distributed_type)"
    return f"; it reads {known}"
