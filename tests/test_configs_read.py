"""Launch files that people have posted, read into plans."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest

from memcalc.configs import Settled, apply, read, settle
from memcalc.configs.blocks import block_classes
from memcalc.errors import FileError, InputError, PlanError
from memcalc.hf.rows import TYPES
from memcalc.hyperparameters import read_coefficients, read_scaling
from memcalc.models import MODELS
from memcalc.plan import Plan
from memcalc.training import Training
from tests.figures import sized
from tests.launch_files import (
    ACCELERATE_DEEPSPEED,
    ACCELERATE_FSDP_1,
    ACCELERATE_FSDP_2,
    ACCELERATE_LEGACY,
    FSDP,
    MISPLACED,
    TUTORIAL,
    ZERO_2_AUTO,
    ZERO_3_AUTO,
)  # fmt: skip


def file(folder: Path, text: str) -> Path:
    path = folder / ("ds.json" if text.startswith("{") else "run.yaml")
    path.write_text(text)
    return path


def settled(folder: Path, text: str, model: str = "gpt2", **options: Any) -> Settled:
    scale = {name: options.pop(name) for name in ("scale", "gpus") if name in options}
    said = {name.replace("__", "."): value for name, value in options.items()}
    return settle(read(file(folder, text)), said, MODELS[model], **scale)


def planned(folder: Path, text: str, model: str = "gpt2", **options: Any) -> Plan:
    found = settled(folder, text, model, **options)
    plan: Plan = apply(Plan(model=MODELS[model], tokens=64, micro_batch=1), found.fields)
    return plan


def test_all_thirteen_keys_of_the_fsdp_block(tmp_path: Path) -> None:
    found = settled(tmp_path, FSDP)
    plan = planned(tmp_path, FSDP)
    assert (plan.strategy, plan.ranks, plan.layout.tensor, plan.data_parallel) == ("fsdp-full-shard", 8, 2, 4)
    assert (plan.precision, plan.checkpoint_every, plan.reentrant, plan.device) == ("amp-fp16", 1, True, "cuda")
    assert (plan.offload.parameters, plan.offload.optimizer) == ("cpu", "cpu")
    assert found.training == {"checkpoint_every": 1000, "out": "./checkpoints"}
    idle, offload = found.notes
    assert idle.endswith("local_rank")
    assert "offload_optimizer_state false changes nothing" in offload


def test_scaled_to_two_ranks_the_fsdp_block_divides_less(tmp_path: Path) -> None:
    plan = planned(tmp_path, FSDP, scale=2, gpus=False)
    assert (plan.ranks, plan.layout.tensor, plan.device, plan.offload.on) == (2, 1, "cpu", False)
    assert planned(tmp_path, FSDP, scale=8).layout.tensor == 2
    assert planned(tmp_path, FSDP, scale=4).layout.tensor == 1
    assert planned(tmp_path, FSDP, scale=2).offload.on
    (note,) = [note for note in settled(tmp_path, FSDP, scale=2, gpus=False).notes if "scaled to this" in note]
    for change in ("8 -> 2 ranks", "layout tensor 2 -> 1", "device cuda -> cpu", "offload parameters cpu -> none"):
        assert change in note


def test_the_tutorials_deepspeed_file(tmp_path: Path) -> None:
    found = settled(tmp_path, TUTORIAL, ranks=8)
    plan = planned(tmp_path, TUTORIAL, ranks=8)
    assert (plan.strategy, plan.precision, plan.optimizer, plan.optimizer_kind) == (
        "deepspeed-2",
        "fp16-master",
        "adamw",
        "fused",
    )
    assert (plan.global_batch, plan.micro_batch, plan.accumulation) == (32, 4, 1)
    assert (plan.offload.optimizer, plan.offload.parameters, plan.offload.pin_memory) == ("cpu", "none", True)
    assert (found.training["learning_rate"], found.training["clip"]) == (3e-5, 1.0)
    rates = Training(**found.training, steps=600)
    assert [rates.rate_at(step) for step in (0, 1, 599)] == [1e-7, 1e-7, 3e-5]
    said = "\n".join(found.notes)
    assert "offload_param cpu is ignored: DeepSpeed offloads it from stage 3 on, not in stage 2" in said
    for key in ("steps_per_print", "wall_clock_breakdown"):
        assert key in said
    # The numbers of the update are used by the run itself.
    assert read_coefficients(found.training["coefficients"]) == {
        "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 3e-7,
    }  # fmt: skip
    assert read_scaling(found.training["scaling"]) == {"loss_scale": 0, "initial_scale_power": 16}


def test_deepspeeds_adam_decays_nothing_unless_told(tmp_path: Path) -> None:
    """deepspeed/ops/adam/fused_adam.py: weight_decay=0.0; torch.optim.AdamW has 0.01."""
    for params, decay in (({}, 0.0), ({"weight_decay": "auto"}, 0.0), ({"torch_adam": True}, None)):
        text = json.dumps({"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": params}})
        found = settled(tmp_path, text, ranks=2).training.get("coefficients", "{}")
        assert read_coefficients(found).get("weight_decay") == decay


def test_coefficients_are_those_of_the_optimizer_that_runs(tmp_path: Path) -> None:
    found = settled(tmp_path, TUTORIAL, ranks=8, optimizer="sgd")
    assert "coefficients" not in found.training
    assert any("coefficients of another optimizer are left out" in note for note in found.notes)


def test_nvme_takes_a_place_on_a_disk(tmp_path: Path) -> None:
    zero = {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": "/disk", "buffer_count": 5}}
    text = json.dumps({"train_batch_size": 8, "bf16": {"enabled": True}, "zero_optimization": zero})
    fields = settled(tmp_path, text, ranks=2).fields
    assert (fields["offload.optimizer"], fields["offload.optimizer_buffers"]) == ("nvme", 5)
    del zero["offload_optimizer"]["nvme_path"]  # type: ignore[attr-defined]
    with pytest.raises(FileError, match="to nvme needs nvme_path, a folder on the disk"):
        settled(tmp_path, json.dumps({"train_batch_size": 8, "zero_optimization": zero}), ranks=2)


def test_scaled_the_batch_of_a_deepspeed_file_stays(tmp_path: Path) -> None:
    text = json.dumps({"train_batch_size": 32, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 1})
    assert planned(tmp_path, text).ranks == 8
    plan = planned(tmp_path, text, scale=2)
    assert (plan.ranks, plan.micro_batch, plan.accumulation, plan.global_batch) == (2, 4, 4, 32)


def test_scaled_to_a_cpu_deepspeed_trains_in_bfloat16(tmp_path: Path) -> None:
    """DeepSpeed refuses float16 on a CPU."""
    found = settled(tmp_path, TUTORIAL, scale=2, gpus=False)
    assert (found.fields["precision"], found.fields["offload.optimizer"]) == ("bf16-master", "none")
    assert any("precision fp16-master -> bf16-master" in note for note in found.notes)
    assert "scaling" not in found.training
    assert any("no losses are scaled in bf16-master" in note for note in found.notes)
    assert settled(tmp_path, TUTORIAL, scale=2).fields["precision"] == "fp16-master"
    assert settled(tmp_path, TUTORIAL, scale=2, gpus=False, precision="fp32").fields["precision"] == "fp32"


def test_auto_is_what_transformers_makes_of_it(tmp_path: Path) -> None:
    """transformers/integrations/deepspeed.py: hidden², 0.9 hidden² and 10 hidden; fp32 without fp16 and bf16."""
    plan = planned(tmp_path, ZERO_3_AUTO)
    assert (plan.deepspeed.reduce_bucket_size, plan.deepspeed.prefetch_bucket_size) == (768 * 768, int(0.9 * 768 * 768))
    assert plan.deepspeed.persistence_threshold == 7680
    assert (plan.offload.optimizer, plan.offload.parameters) == ("cpu", "cpu")
    assert (plan.precision, plan.micro_batch, plan.update.clip) == ("fp32", 1, True)
    said = "\n".join(settled(tmp_path, ZERO_3_AUTO).notes)
    for key in ("precision", "reduce bucket size", "train_batch_size", "gradient_accumulation_steps"):
        assert key in said
    plan = planned(tmp_path, ZERO_3_AUTO, ranks=4, precision="bf16-master", micro_batch=2, accumulation=3)
    assert (plan.precision, plan.global_batch) == ("bf16-master", 24)


def test_buckets_are_elements_and_floats_of_json_are_whole(tmp_path: Path) -> None:
    plan = planned(tmp_path, ZERO_2_AUTO, ranks=2)
    assert plan.deepspeed.reduce_bucket_size == 500_000_000
    assert type(plan.deepspeed.allgather_bucket_size) is int
    assert plan.deepspeed.overlap_comm == "off"
    with pytest.raises(PlanError, match='"auto" follows from a hidden size, which 1,000 parameters lacks'):
        settle(read(file(tmp_path, ZERO_3_AUTO)), {}, sized(1000))


def test_keys_at_the_wrong_level_are_named(tmp_path: Path) -> None:
    found = settled(tmp_path, MISPLACED)
    assert (found.fields["offload.optimizer"], found.fields["offload.parameters"]) == ("cpu", "none")
    said = "\n".join(found.notes)
    assert "offload_optimizer is ignored where it stands; it belongs to zero_optimization.offload_optimizer" in said
    assert "offload_param is ignored where it stands" in said
    assert "zero_optimization.cpu_offload is the old spelling" in said
    assert (found.fields["micro_batch"], found.fields["accumulation"]) == (1, 2)


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


def test_the_world_of_a_file_changes_by_scaling_alone(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="is for 8 processes, not --gpus 4; .*--scale-to-ranks 4"):
        settled(tmp_path, FSDP, ranks=4)
    with pytest.raises(InputError, match="contradict each other"):
        settled(tmp_path, FSDP, ranks=4, scale=2)
    assert settled(tmp_path, FSDP, ranks=8).fields["ranks"] == 8


def test_options_beside_a_file_win_and_are_named(tmp_path: Path) -> None:
    found = settled(tmp_path, TUTORIAL, precision="bf16-master", ranks=4)
    assert found.fields["precision"] == "bf16-master"
    assert any("precision bf16-master given beside it wins over fp16-master" in note for note in found.notes)
