"""accelerate's YAML (``accelerate config``): FSDP 1 and 2, DeepSpeed, DDP or one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from memcalc.configs import deepspeed_json
from memcalc.configs.accelerate_layout import read_layout
from memcalc.configs.accelerate_table import TABLE
from memcalc.configs.batch import Batch
from memcalc.configs.keys import AUTO, SAVES, Checked, check
from memcalc.configs.launch_file import LaunchFile
from memcalc.configs.text import parse
from memcalc.errors import FileError, UnknownNameError

__all__ = ["PREFETCH", "SHARDING", "read"]

_TYPES = ("NO", "MULTI_CPU", "MULTI_GPU", "FSDP", "DEEPSPEED")
SHARDING = {
    "full_shard": "fsdp-full-shard", "shard_grad_op": "fsdp-shard-grad-op", "no_shard": "fsdp-no-shard",
    "hybrid_shard": "fsdp-hybrid-shard", "hybrid_shard_zero2": "fsdp-hybrid-shard-grad-op",
}  # fmt: skip
_NUMBERED = {str(number): name for number, name in enumerate(SHARDING.values(), 1)}
"""ShardingStrategy counts from 1 (torch/distributed/fsdp/api.py)."""
PREFETCH = {"backward_pre": "pre", "1": "pre", "backward_post": "post", "2": "post", "no_prefetch": "none"}


def read(tree: Any, name: str) -> LaunchFile:
    """What a parsed file says. Raises FileError, naming the key."""
    found = check(_prefixed(tree), TABLE, name)
    kind = str(found.get("distributed_type", "")).upper()
    if kind not in _TYPES:
        raise FileError(f"{name}: {UnknownNameError('distributed_type', found.get('distributed_type', ''), _TYPES)}")
    world, nodes = found.get("num_processes"), found.get("num_machines", 1)
    world = 1 if world is None and kind == "NO" else world
    fields: dict[str, Any] = {"device": "cpu" if found.get("use_cpu") or kind == "MULTI_CPU" else "cuda"}
    if nodes > 1:
        fields["nodes"] = nodes
    if found.get("dynamo_config.dynamo_backend", "NO") != "NO":
        fields["compute.compile"] = True
    _check_ids(found, name, world, nodes)
    for other, block in (
        ("FSDP", "fsdp_config"), ("FSDP", "parallelism_config"), ("DEEPSPEED", "deepspeed_config"),
    ):  # fmt: skip
        if kind != other and any(key.startswith(f"{block}.") for key in found.values):
            found.notes.append(f"{name}: {block} is ignored: distributed_type is {kind}")
    if kind == "DEEPSPEED":
        return _deepspeed(found, name, fields, world)
    precision = found.get("mixed_precision", "no")
    fields["precision"] = {"bf16": "amp-bf16", "fp16": "amp-fp16"}.get(precision, "fp32")
    if kind == "FSDP":
        if fields["device"] == "cpu":
            raise FileError(
                f"{name}: with use_cpu accelerate takes DDP in the place of FSDP; write MULTI_CPU, or use_cpu: false"
            )
        fields |= _fsdp(found, name, precision != "no")
        fields |= read_layout(found, name, fields["strategy"], fields["fsdp.version"], world)
    else:
        fields["strategy"] = "single" if kind == "NO" and world == 1 else "ddp"
    return LaunchFile(
        name=name, format="accelerate", fields=fields, world=world, batch=Batch(), notes=tuple(found.notes),
        block_class=found.get("fsdp_config.fsdp_transformer_layer_cls_to_wrap", "") if kind == "FSDP" else "",
    )  # fmt: skip


def _prefixed(tree: Any) -> Any:
    """``fsdp_config`` with ``fsdp_`` before its keys, which accelerate adds where it is missing; ``no`` as a word."""
    if not isinstance(tree, dict):
        return tree
    tree = dict(tree)
    block = tree.get("fsdp_config")
    if isinstance(block, dict):
        block = {key if str(key).startswith("fsdp_") else f"fsdp_{key}": value for key, value in block.items()}
        reshard = block.get("fsdp_reshard_after_forward")
        if isinstance(reshard, bool):
            block["fsdp_reshard_after_forward"] = str(reshard).lower()
        tree["fsdp_config"] = block
    if tree.get("mixed_precision") is False:  # YAML 1.1 reads a bare no as false
        tree["mixed_precision"] = "no"
    for block in ("fsdp_config", "deepspeed_config", "dynamo_config"):
        if tree.get(block) == "":
            del tree[block]
    return tree


def _check_ids(found: Checked, name: str, world: int | None, nodes: int) -> None:
    ids = found.get("gpu_ids", "all")
    named = [word for word in str(ids).split(",") if word.strip()]
    if str(ids).strip().lower() != "all" and world and len(named) * nodes != world:
        raise FileError(
            f"{name}: gpu_ids names {len(named)} GPU{'s' * (len(named) != 1)}, but num_processes is {world}"
            f"{f' on {nodes} machines' if nodes > 1 else ''}; they have to be as many"
        )


def _fsdp(found: Checked, name: str, mixed: bool) -> dict[str, Any]:
    def of(key: str, default: Any = None) -> Any:
        return found.get(f"fsdp_config.fsdp_{key}", default)

    version = of("version", "1")
    policy = str(of("auto_wrap_policy", "NO_WRAP")).upper()
    if policy != "TRANSFORMER_BASED_WRAP":
        raise FileError(
            f"{name}: fsdp_auto_wrap_policy {policy} does not wrap block by block, which is what memcalc counts; write "
            "TRANSFORMER_BASED_WRAP"
        )
    fields: dict[str, Any] = {"fsdp.version": version, "strategy": _strategy(found, name, version)}
    sharded = fields["strategy"] != "fsdp-no-shard"
    if sharded and mixed:
        fields["fsdp.reduce_dtype"] = "compute"  # set_mixed_precision: reduce_dtype is param_dtype
    fields["checkpoint_every"] = int(of("activation_checkpointing", False))
    place = "cpu" if of("offload_params", False) else "none"
    fields |= {"offload.parameters": place, "offload.optimizer": place}
    if version == "2":
        gone = [key for key in ("backward_prefetch", "backward_prefetch_policy", "forward_prefetch", "use_orig_params")
                if of(key) is not None]  # fmt: skip
        if of("forward_prefetch"):
            raise FileError(f"{name}: fsdp_forward_prefetch is not in FSDP 2, and accelerate refuses it; leave it out")
        if gone:
            found.notes.append(
                f"{name}: {', '.join(f'fsdp_{key}' for key in gone)} is ignored: FSDP 2 has no such choice"
            )
        return fields
    if of("backward_prefetch_policy") is not None:
        found.notes.append(
            f"{name}: fsdp_backward_prefetch_policy is an old spelling that accelerate reads no more; taken as fsdp_backward_prefetch"
        )
    if sharded:
        fields |= {
            "fsdp.backward_prefetch": PREFETCH[
                of("backward_prefetch", of("backward_prefetch_policy", "NO_PREFETCH")).lower()
            ],
            "fsdp.forward_prefetch": of("forward_prefetch", False),
            "fsdp.original_parameters": of("use_orig_params", True),  # the default of accelerate launch
        }
    return fields


def _strategy(found: Checked, name: str, version: str) -> str:
    old, new = (found.get(f"fsdp_config.fsdp_{key}") for key in ("sharding_strategy", "reshard_after_forward"))
    if version == "2":
        if new not in ("true", "false", None):
            raise FileError(f"{name}: fsdp_reshard_after_forward {new} is a word of FSDP 1; FSDP 2 has true or false")
        if old is not None:
            found.notes.append(f"{name}: fsdp_sharding_strategy is ignored: FSDP 2 has fsdp_reshard_after_forward")
        return "fsdp-shard-grad-op" if new == "false" else "fsdp-full-shard"
    if new in ("true", "false"):
        raise FileError(
            f"{name}: fsdp_reshard_after_forward {new} is a word of FSDP 2; write fsdp_version: 2, or FULL_SHARD"
        )
    if old is not None and new is not None and _named(old) != _named(new):
        raise FileError(
            f"{name}: fsdp_sharding_strategy {old} and fsdp_reshard_after_forward {new} contradict each other"
        )
    return _named(old or new or "FULL_SHARD")


def _named(word: str) -> str:
    return _NUMBERED.get(word) or SHARDING[word.lower()]


def _deepspeed(found: Checked, name: str, fields: dict[str, Any], world: int | None) -> LaunchFile:
    """DeepSpeed's own file where one is named, else a file of the few keys that stand here."""
    block = {
        key.rpartition(".")[2]: value for key, value in found.values.items() if key.startswith("deepspeed_config.")
    }
    own = block.get("deepspeed_config_file")
    said = [key for key in ("zero_stage", "gradient_accumulation_steps", "gradient_clipping", "offload_optimizer_device", "offload_param_device")
            if key in block]  # fmt: skip
    if own is not None:
        if said or found.get("mixed_precision") not in (None, "no"):
            clash = [*said, *(["mixed_precision"] if found.get("mixed_precision") not in (None, "no") else [])]
            raise FileError(
                f"{name}: {', '.join(clash)} and deepspeed_config_file say the same twice; accelerate takes one of them"
            )
        inner = deepspeed_json.read(parse(Path(own)), own)
    else:
        inner = deepspeed_json.read(_as_json(block, found), name)
    strategy = inner.fields["strategy"]
    if strategy == "deepspeed-3" and block.get("zero3_init_flag") is False:
        fields["startup.build"] = "whole"
    unsaid = ("no matter of memory", SAVES)
    notes = (*found.notes, *(note for note in inner.notes if own or not any(words in note for words in unsaid)))
    return LaunchFile(
        name=name, format="accelerate", fields={**inner.fields, **fields}, world=world, batch=inner.batch,
        batch_autos=inner.batch_autos, training=inner.training, notes=notes,
    )  # fmt: skip


def _as_json(block: dict[str, Any], found: Checked) -> dict[str, Any]:
    """What DeepSpeedPlugin makes of them (accelerate/utils/dataclasses.py), which passes ``"none"`` on as a place."""
    zero: dict[str, Any] = {"stage": block.get("zero_stage", 2)}
    for part in ("optimizer", "param"):
        zero[f"offload_{part}"] = {"device": block.get(f"offload_{part}_device", "none")}
        if path := block.get(f"offload_{part}_nvme_path"):
            zero[f"offload_{part}"]["nvme_path"] = str(path)
    precision = found.get("mixed_precision", "no")
    return {
        "train_batch_size": AUTO,
        "train_micro_batch_size_per_gpu": AUTO,
        "gradient_accumulation_steps": block.get("gradient_accumulation_steps", AUTO),
        "gradient_clipping": block.get("gradient_clipping", AUTO),
        "fp16": {"enabled": precision == "fp16"},
        "bf16": {"enabled": precision == "bf16"},
        "zero_force_ds_cpu_optimizer": False,  # accelerate puts DeepSpeed's CPU Adam in the place of torch's
        "zero_optimization": zero,
    }
