"""Files of Hugging Face's Trainer and of LLaMA-Factory, which are not launch files: what of them memcalc reads, in a line."""

from __future__ import annotations

from typing import Any

from memcalc.configs.accelerate_table import TABLE as ACCELERATES
from memcalc.errors import FileError, shorten

__all__ = ["refuse_trainers", "with_prefix"]

_FACTORYS = {"finetuning_type", "cutoff_len", "template", "dataset_dir"}
"""Keys of LLaMA-Factory's (src/llamafactory/hparams)."""
_ARGUMENTS = {"output_dir", "per_device_train_batch_size", "num_train_epochs", "model_name_or_path", "deepspeed", "fsdp", "lr_scheduler_type", *_FACTORYS}  # fmt: skip
"""Keys of TrainingArguments (transformers/training_args.py) and of what scripts put beside them; no launch file has one."""


def with_prefix(key: str) -> str:
    """Accelerate's name of a key of the Trainer's ``fsdp_config``, which leaves the prefix out; blank for what is none."""
    longer = f"fsdp_{key}"
    return longer if f"fsdp_config.{longer}" in ACCELERATES else ""


def refuse_trainers(tree: Any, name: str) -> None:
    """Raises FileError for a file of the Trainer's, in whole or only its ``fsdp_config``."""
    keys = {key for key in tree if isinstance(key, str)} if isinstance(tree, dict) else set()
    if keys & _ARGUMENTS:
        whose = "of LLaMA-Factory's arguments" if keys & _FACTORYS else "of arguments for Hugging Face's Trainer"
        raise FileError(f"{name} is a file {whose}, no launch file: {_instead(tree)}")
    mine = [key for key in tree if key in keys and with_prefix(key)] if keys else []
    if mine and keys.isdisjoint({"fsdp_config", "distributed_type", "compute_environment", "zero_optimization"}):
        raise FileError(
            f"{name} is the fsdp_config of Hugging Face's Trainer ({mine[0]}): memcalc reads accelerate's YAML: "
            f"distributed_type: FSDP, and a block fsdp_config in which each key has its prefix ({with_prefix(mine[0])})"
        )


def _instead(tree: dict[Any, Any]) -> str:
    beside = "its batch and the rest as options beside it (--batch-size, --accumulation, --precision)"
    deepspeed = tree.get("deepspeed")
    if isinstance(deepspeed, str) and deepspeed:
        return f"give the DeepSpeed file it names, --config {shorten(deepspeed)}, and {beside}"
    if deepspeed:
        return f"write its block deepspeed into a file of its own, give that to --config, and {beside}"
    if tree.get("fsdp") or tree.get("fsdp_config"):
        return (
            "give accelerate's YAML (distributed_type: FSDP, the keys of its fsdp_config each with the prefix fsdp_), or "
            "--strategy fsdp-full-shard; and its batch and the rest as options"
        )
    return "it says no strategy; give what it says as options (--batch-size, --accumulation, --precision, --strategy)"
