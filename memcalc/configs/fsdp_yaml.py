"""The plain FSDP file: a block ``fsdp_config`` of thirteen keys, as tutorials of FullyShardedDataParallel give it."""

from __future__ import annotations

from typing import Any

from memcalc.configs.accelerate_table import TABLE as ACCELERATES
from memcalc.configs.batch import Batch
from memcalc.configs.keys import Checked, Key, Table, check, neutral, plan, training
from memcalc.configs.launch_file import LaunchFile
from memcalc.configs.text import dump_yaml
from memcalc.configs.trainers_own import with_prefix
from memcalc.errors import FileError, PlanError
from memcalc.plan import Plan
from memcalc.training import Training

__all__ = ["SAYS", "STRATEGIES", "TABLE", "read", "render"]

STRATEGIES = ("fsdp-full-shard", "fsdp-no-shard")
"""What its ``shard_optimizer_state`` tells apart."""

_BLOCK = "fsdp_config"
TABLE: Table = {
    _BLOCK: Key(role="plan", kind="block"),
    f"{_BLOCK}.world_size": plan("ranks", "whole", least=1),
    f"{_BLOCK}.local_rank": neutral("torchrun gives each process its own (LOCAL_RANK)", "whole"),
    f"{_BLOCK}.shard_optimizer_state": plan("strategy: true is fsdp-full-shard, false fsdp-no-shard", "flag"),
    f"{_BLOCK}.mixed_precision": plan("precision: with fp16 amp-fp16, without amp-bf16", "flag"),
    f"{_BLOCK}.fp16": plan("precision: with mixed_precision amp-fp16, without fp16", "flag"),
    f"{_BLOCK}.activation_checkpointing": plan("checkpoint_every: true is 1, each block", "flag"),
    f"{_BLOCK}.device": plan("device", "cuda|cpu"),
    f"{_BLOCK}.offload_params": plan("offload.parameters and offload.optimizer, which FSDP takes along", "flag"),
    f"{_BLOCK}.offload_optimizer_state": plan("offload.optimizer, never without offload_params", "flag"),
    f"{_BLOCK}.use_reentrant": plan("reentrant, where activation_checkpointing is true", "flag"),
    f"{_BLOCK}.model_parallel_size": plan("layout.tensor", "whole", least=1),
    f"{_BLOCK}.checkpoint_interval": training("checkpoint_every", "whole"),
    f"{_BLOCK}.checkpoint_dir": training("the folder of the run, unless --out names another", "text"),
}
SAYS = frozenset(
    ("strategy", "ranks", "precision", "checkpoint_every", "reentrant", "device", "offload.parameters",
     "offload.optimizer", "layout.tensor")
)  # fmt: skip
"""Fields of the plan that such a file says; it leaves the others to the training script."""

_PRECISIONS = {(True, True): "amp-fp16", (True, False): "amp-bf16", (False, True): "fp16", (False, False): "fp32"}
"""By ``mixed_precision`` and ``fp16``."""


def read(tree: Any, name: str) -> LaunchFile:
    """What a parsed file says. Raises FileError, naming the key."""
    _not_accelerates(tree, name)
    found = check(tree, TABLE, name)

    def of(key: str, default: Any = False) -> Any:
        return found.get(f"{_BLOCK}.{key}", default)

    if (of("local_rank", 0)) >= of("world_size", 1):
        raise FileError(f"{name}: local_rank {of('local_rank')} is not below world_size {of('world_size', 1)}")
    fields = {
        "strategy": "fsdp-full-shard" if of("shard_optimizer_state", True) else "fsdp-no-shard",
        "precision": _PRECISIONS[of("mixed_precision"), of("fp16")],
        "checkpoint_every": int(of("activation_checkpointing")),
        "reentrant": of("activation_checkpointing") and of("use_reentrant"),
        "device": of("device", "cuda"),
        "layout.tensor": of("model_parallel_size", 1),
        **_offload(found, name, of("offload_params"), of("offload_optimizer_state")),
    }
    if of("use_reentrant") and not of("activation_checkpointing"):
        found.notes.append(f"{name}: use_reentrant changes nothing without activation_checkpointing")
    trains = {"checkpoint_every": of("checkpoint_interval", 0), "out": of("checkpoint_dir", None)}
    return LaunchFile(
        name=name, format="fsdp", fields=fields, world=of("world_size", None), batch=Batch(), notes=tuple(found.notes),
        training={key: value for key, value in trains.items() if value},
    )  # fmt: skip


def _not_accelerates(tree: Any, name: str) -> None:
    """Raises FileError for a block of accelerate's without the rest of its file: its keys are other ones."""
    block = tree.get(_BLOCK) if isinstance(tree, dict) else None
    keys = [key for key in block if isinstance(key, str)] if isinstance(block, dict) else []
    for key in keys:
        full = f"{_BLOCK}.{key}"
        if full not in TABLE and with_prefix(key):
            raise FileError(
                f"{name}: {full} is a key of accelerate's or of Hugging Face's Trainer without its prefix: memcalc reads "
                f"accelerate's YAML, which begins with distributed_type: FSDP and says it {with_prefix(key)}"
            )
        if full not in TABLE and full in ACCELERATES:
            raise FileError(
                f"{name}: {_BLOCK}.{key} is a key of accelerate's YAML, which begins with distributed_type: FSDP; add that "
                f"line, or write this block's own {len(TABLE) - 1} keys (memcalc estimate --help, --config)"
            )


def _offload(found: Checked, name: str, parameters: bool, states: bool) -> dict[str, str]:
    """FSDP's CPUOffload moves parameters, gradients and states together (torch, fully_sharded_data_parallel.py)."""
    if states and not parameters:
        raise FileError(
            f"{name}: offload_optimizer_state true without offload_params: FSDP offloads parameters, gradients and "
            "states together; set offload_params true as well, or both to false"
        )
    said = f"{_BLOCK}.offload_optimizer_state" in found.values
    if parameters and said and not states:
        found.notes.append(
            f"{name}: offload_optimizer_state false changes nothing: with offload_params FSDP keeps the states, too, "
            "on the CPU"
        )
    place = "cpu" if parameters else "none"
    return {"offload.parameters": place, "offload.optimizer": place}


def render(plan: Plan, training: Training | None = None) -> str:
    """The file that says a plan. Raises PlanError for a precision or strategy that it has no words for."""
    words = {name: flags for flags, name in _PRECISIONS.items()}
    if plan.strategy not in STRATEGIES:
        raise PlanError(f"the fsdp file cannot say strategy {plan.strategy}; it has: {', '.join(STRATEGIES)}")
    if plan.precision not in words:
        raise PlanError(f"the fsdp file cannot say precision {plan.precision}; it has: {', '.join(words)}")
    if plan.checkpoint_every > 1:
        raise PlanError(
            f"the fsdp file cannot say a checkpoint every {plan.checkpoint_every} blocks; it has: none, full"
        )
    mixed, fp16 = words[plan.precision]
    training = training or Training()
    return dump_yaml({
        _BLOCK: {
            "world_size": plan.ranks,
            "local_rank": 0,
            "shard_optimizer_state": plan.strategy_row.shards_optimizer,
            "mixed_precision": mixed,
            "fp16": fp16,
            "activation_checkpointing": plan.checkpoint_every == 1,
            "device": plan.device,
            "offload_params": plan.offload.parameters == "cpu",
            "offload_optimizer_state": plan.offload.optimizer == "cpu",
            "use_reentrant": plan.reentrant,
            "model_parallel_size": plan.layout.tensor,
            "checkpoint_interval": training.checkpoint_every,
            "checkpoint_dir": "./checkpoints",
        }
    })  # fmt: skip
