"""Configs of Accelerate, read into plans."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import pytest

from memcalc.configs import read, settle
from memcalc.configs.blocks import block_classes
from memcalc.errors import FileError, PlanError
from memcalc.hf.rows import TYPES
from memcalc.models import MODELS
from tests.configs_settled import file, planned, settled
from tests.launch_files import (
    ACCELERATE_DEEPSPEED,
    ACCELERATE_FSDP_1,
    ACCELERATE_FSDP_2,
    ACCELERATE_LEGACY,
    TUTORIAL,
)  # fmt: skip


def test_accelerate_with_fsdp_1(tmp_path: Path) -> None:
    plan = planned(tmp_path, ACCELERATE_FSDP_1)
    assert (plan.strategy, plan.ranks, plan.precision, plan.fsdp.version) == ("fsdp-full-shard", 2, "amp-bf16", "1")
    assert (plan.fsdp.backward_prefetch, plan.fsdp.original_parameters, plan.reduce_dtype) == ("pre", True, "bfloat16")


@pytest.mark.parametrize(
    ("number", "strategy"),
    list(enumerate(("full-shard", "shard-grad-op", "no-shard", "hybrid-shard", "hybrid-shard-grad-op"), 1)),
)
def test_accelerates_strategies_by_number_and_name(tmp_path: Path, number: int, strategy: str) -> None:
    words = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")
    for word in (str(number), f"'{number}'", words[number - 1]):
        text = ACCELERATE_LEGACY.replace("strategy: 1", f"strategy: {word}")
        assert planned(tmp_path, text).strategy == f"fsdp-{strategy}"


def test_a_class_of_another_model_is_refused(tmp_path: Path) -> None:
    plan = planned(tmp_path, ACCELERATE_LEGACY)
    assert (plan.precision, plan.fsdp.backward_prefetch) == ("fp32", "pre")
    with pytest.raises(PlanError, match="wraps GPT2Block, which bert-base does not have; its blocks are BertLayer"):
        settled(tmp_path, ACCELERATE_LEGACY, "bert-base")


def test_a_class_is_judged_for_named_models_only(tmp_path: Path) -> None:
    assert block_classes(dataclasses.replace(MODELS["gpt2"], name="gpt2 (layers 2)")) == "GPT2Block"
    mine = dataclasses.replace(MODELS["gpt2"], name="gpt2-mine")
    found = settle(read(file(tmp_path, ACCELERATE_LEGACY)), {}, mine)
    assert any("whether gpt2-mine has blocks of class GPT2Block is not known" in note for note in found.notes)
    unnamed = [
        name
        for name, model in MODELS.items()
        if not block_classes(model) and model.family not in ("megatron", "mlp", "resnet")
    ]
    assert unnamed == ["moe-tiny"]  # a mixture that is nobody's


def test_a_config_tells_the_class_of_its_blocks(tmp_path: Path) -> None:
    mine = dataclasses.replace(MODELS["gpt2"], name="gpt2-mine")
    legacy = read(file(tmp_path, ACCELERATE_LEGACY))
    found = settle(legacy, {}, mine, blocks=TYPES["gpt2"].blocks)
    assert not any("is not known" in note for note in found.notes)
    with pytest.raises(PlanError, match="GPT2Block, .* its blocks are BartEncoderLayer and BartDecoderLayer"):
        settle(legacy, {}, mine, blocks=TYPES["bart"].blocks)
    assert [name for name, row in TYPES.items() if not row.blocks] == ["llava"]  # its parts have blocks of their own
    named = {block_classes(model) for model in MODELS.values()} - {""}
    assert named <= {name for row in TYPES.values() for name in row.blocks}


def test_no_without_quotes_is_no(tmp_path: Path) -> None:
    assert planned(tmp_path, ACCELERATE_LEGACY.replace("'no'", "no")).precision == "fp32"


def test_accelerate_with_fsdp_2(tmp_path: Path) -> None:
    assert planned(tmp_path, ACCELERATE_FSDP_2).strategy == "fsdp-full-shard"
    plan = planned(tmp_path, ACCELERATE_FSDP_2.replace("forward: true", "forward: false"))
    assert (plan.strategy, plan.fsdp.version, plan.ranks) == ("fsdp-shard-grad-op", "2", 4)
    with pytest.raises(FileError, match="FULL_SHARD is a word of FSDP 1"):
        settled(tmp_path, ACCELERATE_FSDP_2.replace("forward: true", "forward: FULL_SHARD"))
    with pytest.raises(FileError, match="takes DDP in the place of FSDP"):
        settled(tmp_path, ACCELERATE_FSDP_2 + "use_cpu: true\n")
    with pytest.raises(FileError, match="NO_WRAP does not wrap block by block"):
        settled(tmp_path, ACCELERATE_FSDP_2.replace("TRANSFORMER_BASED_WRAP", "NO_WRAP"))


def test_accelerate_composes_fsdp_2(tmp_path: Path) -> None:
    """accelerate/parallelism_config.py: the product of all sizes is the number of processes; copies of shards are HSDP."""

    def composed(**sizes: int) -> str:
        lines = [f"  parallelism_config_{name}_size: {size}" for name, size in sizes.items()]
        count = math.prod(sizes.values())
        return "\n".join(
            [ACCELERATE_FSDP_2.replace("processes: 4", f"processes: {count}") + "parallelism_config:", *lines]
        )

    plan = planned(tmp_path, composed(dp_replicate=2, dp_shard=4))
    assert (plan.strategy, plan.fsdp.replicas, plan.shards, plan.ranks) == ("fsdp-hybrid-shard", 2, 4, 8)
    plan = planned(tmp_path, composed(dp_shard=2, tp=2))
    assert (plan.strategy, plan.layout.tensor, plan.data_parallel) == ("fsdp-full-shard", 2, 2)
    assert planned(tmp_path, composed(dp_shard=2, cp=2)).layout.context == 2
    scaled = planned(tmp_path, composed(dp_replicate=2, dp_shard=2, tp=2, cp=2), scale=2)
    assert (scaled.ranks, scaled.layout.tensor, scaled.layout.context, scaled.shards) == (2, 1, 1, 2)
    with pytest.raises(FileError, match="parallelism_config is 1 x 3 x 1 x 1 = 3, but num_processes is 4"):
        settled(tmp_path, composed(dp_shard=3).replace("processes: 3", "processes: 4"))
    with pytest.raises(FileError, match="with dp_shard_size 1 is DDP"):
        settled(tmp_path, composed(dp_replicate=2))
    with pytest.raises(FileError, match="goes with fsdp_version 2 only"):
        settled(
            tmp_path,
            composed(dp_shard=2)
            .replace("fsdp_version: 2", "fsdp_version: 1")
            .replace("forward: true", "forward: FULL_SHARD"),
        )


def test_accelerate_with_deepspeed(tmp_path: Path) -> None:
    found = settled(tmp_path, ACCELERATE_DEEPSPEED, micro_batch=2)
    plan = planned(tmp_path, ACCELERATE_DEEPSPEED, micro_batch=2)
    assert (plan.strategy, plan.ranks, plan.precision, plan.accumulation) == ("deepspeed-2", 8, "bf16-master", 8)
    assert (plan.offload.optimizer, plan.offload.parameters, plan.global_batch) == ("cpu", "none", 128)
    assert any("offload_param cpu is ignored" in note for note in found.notes)
    whole = ACCELERATE_DEEPSPEED.replace("zero_stage: 2", "zero_stage: 3")
    assert planned(tmp_path, whole).startup.build == "whole"
    assert planned(tmp_path, whole.replace("flag: false", "flag: true")).startup.build == "shards"


def test_accelerate_reads_deepspeeds_own_file(tmp_path: Path) -> None:
    own = file(tmp_path, TUTORIAL)
    text = f"distributed_type: DEEPSPEED\nnum_processes: 4\ndeepspeed_config:\n  deepspeed_config_file: {own}\n"
    plan = planned(tmp_path, text)
    assert (plan.strategy, plan.ranks, plan.micro_batch, plan.optimizer_kind) == ("deepspeed-2", 4, 8, "fused")
    with pytest.raises(FileError, match="zero_stage and deepspeed_config_file say the same twice"):
        settled(tmp_path, text + "  zero_stage: 2\n")


@pytest.mark.parametrize(("ids", "count"), [("0,1,2,3,4,5,6,7,8", 8), ("0,1", 4)])
def test_as_many_gpus_as_processes(tmp_path: Path, ids: str, count: int) -> None:
    """hiyouga/LLaMA-Factory issue 4133: nine devices for eight processes."""
    text = f"distributed_type: MULTI_GPU\nnum_processes: {count}\ngpu_ids: '{ids}'\n"
    with pytest.raises(FileError, match=f"but num_processes is {count}; they have to be as many"):
        settled(tmp_path, text)
    assert planned(tmp_path, text.replace(ids, "all")).strategy == "ddp"
