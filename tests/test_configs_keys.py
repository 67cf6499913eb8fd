"""No key of any launch file's format changes nothing unsaid."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from memcalc.configs import accelerate_yaml, deepspeed_json, fsdp_yaml
from memcalc.configs.accelerate_table import TABLE as ACCELERATE
from memcalc.configs.deepspeed_table import TABLE as DEEPSPEED
from memcalc.configs.fsdp_yaml import TABLE as FSDP_TABLE
from memcalc.configs.keys import Key
from memcalc.configs.launch_file import LaunchFile
from memcalc.errors import MemcalcError

BASES: dict[str, dict[str, Any]] = {
    "fsdp": {"fsdp_config": {"world_size": 4, "mixed_precision": False}},
    "deepspeed": {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": "/d"}, "offload_param": {"device": "nvme", "nvme_path": "/d"}},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    },
    "accelerate": {
        "distributed_type": "FSDP", "num_processes": 4, "fsdp_config": {"fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP"},
    },
}  # fmt: skip
READERS = {"fsdp": (fsdp_yaml.read, FSDP_TABLE), "deepspeed": (deepspeed_json.read, DEEPSPEED), "accelerate": (accelerate_yaml.read, ACCELERATE)}  # fmt: skip
# These need another base to be heard; the tests above and below hold them.
ELSEWHERE = {
    "zero_optimization.offload_optimizer.nvme_path", "zero_optimization.offload_param.nvme_path", "distributed_type", "compute_environment",
}  # fmt: skip


def samples(key: Key) -> Iterator[Any]:
    if key.kind == "flag":
        yield from (True, False)
    elif key.kind in ("whole", "number"):
        yield from (7, 3, 2, 1)
    elif key.kind == "numbers":
        yield [0.9, 0.95]
    elif key.kind in ("text", "any"):
        yield "GPT2Block"
    else:
        yield from key.kind.split("|")


def heard(read: Any, base: dict[str, Any], path: str, value: Any) -> bool:
    """Whether a value under a key changes anything that comes back, or is refused."""
    tree = json.loads(json.dumps(base))
    node = tree
    *blocks, last = path.split(".")
    for block in blocks:
        node = node.setdefault(block, {})
    node[last] = value
    plain: LaunchFile = read(base, "f")
    try:
        return bool(read(tree, "f") != plain)
    except MemcalcError as error:
        return last in str(error) or any(word in str(error) for word in ("stage", "gpu_ids", "parallelism_config "))


@pytest.mark.parametrize("format", READERS)
def test_no_key_changes_nothing_unsaid(format: str) -> None:
    reader, table = READERS[format]
    silent = [
        path for path, key in table.items()
        if key.kind != "block" and path not in ELSEWHERE
        and not any(heard(reader, BASES[format], path, value) for value in samples(key))
    ]  # fmt: skip
    deepspeeds = [path for path in silent if path.startswith("deepspeed_config.")]
    other = {"distributed_type": "DEEPSPEED", "num_processes": 4, "deepspeed_config": {"zero_stage": 3}}
    silent = [path for path in silent if path not in deepspeeds]
    silent += [
        path for path in deepspeeds if not any(heard(reader, other, path, value) for value in samples(table[path]))
    ]
    assert not silent, silent
