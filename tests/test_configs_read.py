"""Launch files that people have posted, read into plans."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from memcalc.configs import read, settle
from memcalc.errors import FileError, InputError, PlanError
from memcalc.hyperparameters import read_coefficients, read_scaling
from memcalc.training import Training
from tests.configs_settled import file, planned, settled
from tests.figures import sized
from tests.launch_files import (
    FSDP,
    MISPLACED,
    TUTORIAL,
    ZERO_2_AUTO,
    ZERO_3_AUTO,
)  # fmt: skip


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
