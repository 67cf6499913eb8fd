"""Public reports about launch files: docs/validation/cases.md lists them by number."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from memcalc.cli.app import app
from tests.launch_files import (
    ACCELERATE_DEEPSPEED,
    ACCELERATE_FSDP_1,
    ACCELERATE_FSDP_2,
    ACCELERATE_LEGACY,
    MISPLACED,
    TUTORIAL,
    ZERO_2_AUTO,
)


def said(folder: Path, text: str, *words: str) -> tuple[int, str]:
    """Exit code and last line, or all lines of stderr where there is no error, of an estimate with a file."""
    path = folder / ("ds.json" if text.startswith("{") else "run.yaml")
    path.write_text(text)
    done = CliRunner().invoke(app, ["estimate", "--config", str(path), *words])
    return done.exit_code, done.stderr if not done.exit_code else done.stderr.splitlines()[-1]


@pytest.mark.parametrize(
    ("batch", "words", "refusal"),
    [
        # bigcode-project/starcoder issue 41: one rank was seen where eight were started.
        ((256, 4, 8), ["--gpus", "1"], "256 is not micro batch 4 x accumulation 8 x 1 rank, which is 32; what would do: train batch 32, or accumulation 64, or micro batch 32, or 8 GPUs"),
        # sahil280114/codealpaca issue 14: 4 was given, and 1 stood in the file.
        ((256, 8, 1), ["--gpus", "8"], "what would do: train batch 64, or accumulation 4, or micro batch 32, or 32 GPUs"),
        # OpenRLHF/OpenRLHF issue 346.
        ((256, 2, None), ["--gpus", "7"], "does not divide over micro batch 2 x 7 ranks; what would do: train batch 252 or 266, or 8 GPUs"),
    ],
)  # fmt: skip
def test_c44_a_batch_that_is_no_product(tmp_path: Path, batch: tuple[int, ...], words: list[str], refusal: str) -> None:
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    tree = {name: number for name, number in zip(names, batch, strict=True) if number is not None}
    code, line = said(tmp_path, json.dumps(tree), "gpt2-tiny", *words)
    assert code == 2
    assert refusal in line


def test_c44_which_of_file_and_option_wins_is_said(tmp_path: Path) -> None:
    tree = {"train_batch_size": 256, "train_micro_batch_size_per_gpu": 8, "gradient_accumulation_steps": 1}
    code, lines = said(tmp_path, json.dumps(tree), "gpt2-tiny", "--gpus", "8", "--accumulation", "4")
    assert code == 0
    assert "accumulation 4 given beside it wins over 1" in lines


def test_c47_a_class_of_another_model(tmp_path: Path) -> None:
    code, line = said(tmp_path, ACCELERATE_LEGACY, "bert-base")
    assert code == 2
    assert "wraps GPT2Block, which bert-base does not have; its blocks are BertLayer" in line
    alone = ACCELERATE_LEGACY.replace("num_processes: 2", "num_processes: 1")
    assert said(tmp_path, alone, "bert-base")[0] == 2
    assert said(tmp_path, ACCELERATE_LEGACY, "gpt2")[0] == 0


@pytest.mark.parametrize(
    ("text", "refusal"),
    [
        (ACCELERATE_FSDP_1.replace("FULL_SHARD", "FULLSHARD"), "'FULLSHARD' is none of: FULL_SHARD, SHARD_GRAD_OP"),
        (ACCELERATE_FSDP_1.replace("type: FSDP", "type: ZERO"), "unknown distributed_type 'ZERO'"),
        (ACCELERATE_FSDP_2 + "use_cpu: true\n", "accelerate takes DDP in the place of FSDP"),
    ],
)
def test_c48_nothing_falls_back_silently(tmp_path: Path, text: str, refusal: str) -> None:
    code, line = said(tmp_path, text, "gpt2-tiny")
    assert code == 2
    assert refusal in line


def test_c49_mistakes_in_deepspeeds_files_are_named(tmp_path: Path) -> None:
    code, lines = said(tmp_path, MISPLACED, "gpt2-tiny")
    assert code == 0
    for mistake in (
        "offload_optimizer is ignored where it stands",
        "offload_param is ignored where it stands",
        "cpu_offload is the old spelling",
    ):
        assert mistake in lines
    assert (
        "offload_param cpu is ignored: DeepSpeed offloads it from stage 3 on"
        in said(tmp_path, TUTORIAL, "gpt2-tiny")[1]
    )
    # OpenMOSS/MOSS issue 272: offload and an optimizer of the script's own.
    client = json.dumps(
        {"train_batch_size": 2, "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}
    )
    assert "DeepSpeed takes none from the script but its own CPU Adam" in said(tmp_path, client, "gpt2-tiny")[1]
    assert "CPU Adam" not in said(tmp_path, TUTORIAL, "gpt2-tiny")[1]
    assert "CPU Adam" not in said(tmp_path, ACCELERATE_DEEPSPEED, "gpt2-tiny")[1]
    code, lines = said(tmp_path, ZERO_2_AUTO, "gpt2-tiny", "--gpus", "2", "--batch-size", "3")
    assert code == 0
    for auto, value in (
        ("train_batch_size", 6),
        ("train_micro_batch_size_per_gpu", 3),
        ("gradient_accumulation_steps", 1),
    ):
        assert f'{auto} "auto" is taken as {value}' in lines
    assert "(a step of 6 samples = 3 x 1 x 2 ranks)" in lines
