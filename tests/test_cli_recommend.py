"""``memcalc recommend`` as people use it: what is kept and searched, on which machine, and what becomes of the first plan."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from memcalc.machine import FoundGpu, Machine
from memcalc.plan import Plan
from tests.recommending import Run, asked, recommender

TWO_A100 = Machine(
    gpus=(FoundGpu(name="a100-40gb", usable_bytes=42 * 10**9, free_bytes=41 * 10**9),) * 2,
    cores=8,
    ram_bytes=2**36,
)
UNKNOWN = Machine(
    gpus=(FoundGpu(name="NVIDIA Z9", usable_bytes=30 * 10**9, free_bytes=30 * 10**9),),
    cores=8,
    ram_bytes=2**36,
)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    return recommender(tmp_path, monkeypatch)


def test_what_is_given_is_kept(run: Run) -> None:
    words = [
        "--strategy",
        "zero-1",
        "--checkpointing",
        "full",
        "--batch-size",
        "3",
        "--precision",
        "fp32",
        "--seq-len",
        "64",
        "--without",
        "selective,fused,chunked-loss,tensor-parallel,pipeline-parallel",
    ]
    found = asked(run("gpt2", "--gpus", "2", "--gpu", "a100-80gb", *words, "--format", "json"))
    assert found["tried"] == 1
    plan = found["plans"][0]["plan"]
    said = [
        plan[key]
        for key in (
            "strategy",
            "checkpoint_every",
            "micro_batch",
            "precision",
            "tokens",
        )
    ]
    assert said == ["zero-1", 1, 3, "fp32", 64]


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ("--only deepspeed --adapter lora --quantize nf4", "deepspeed-0 with quantised weights (nf4) is not counted; take ddp or FSDP"),
        ("--only megatron --launch --out run", "memcalc cannot train with megatron-ddp"),
    ],
)  # fmt: skip
def test_what_stands_in_the_way_of_every_plan_is_said(run: Run, words: str, reason: str) -> None:
    done = run("gpt2", "--gpus", "8", "--gpu", "a100-80gb", *words.split())
    assert done.exit_code == 2
    assert done.stderr.rstrip().endswith(f"over 8 ranks: {reason}")


def test_a_global_batch_is_made_of_micro_batches(run: Run) -> None:
    found = asked(
        run(
            "gpt2",
            "--gpus",
            "2",
            "--gpu",
            "t4",
            "--global-batch",
            "96",
            "--format",
            "json",
        )
    )
    for row in found["plans"]:
        assert row["plan"]["micro_batch"] * row["plan"]["accumulation"] * 2 == 96


def test_pure_16_bit_only_when_asked(run: Run) -> None:
    words = [
        "gpt2",
        "--gpus",
        "2",
        "--gpu",
        "a100-80gb",
        "--format",
        "json",
        "--top",
        "50",
        "--without",
    ]
    words += ["tensor-parallel,pipeline-parallel,fused,chunked-loss,selective,every-n"]
    assert {row["plan"]["precision"] for row in asked(run(*words))["plans"]} == {"amp-bf16"}
    both = asked(run(*words, "--allow-pure-16bit"))["plans"]
    assert {row["plan"]["precision"] for row in both} == {"amp-bf16", "bf16"}


# -- where -----------------------------------------------------------------------------------------


def test_this_machines_gpus_are_the_default(run: Run) -> None:
    found = asked(run("gpt2", "--format", "json", machine=TWO_A100))
    assert found["capacity_bytes"] == 42 * 10**9
    assert {(row["plan"]["gpu"], row["plan"]["ranks"]) for row in found["plans"]} == {("a100-40gb", 2)}
    assert (
        asked(run("gpt2", "--gpus", "1", "--format", "json", machine=TWO_A100))["plans"][0]["plan"]["strategy"]
        == "single"
    )


def test_a_card_that_is_not_in_the_catalog_counts_with_its_memory(run: Run) -> None:
    found = asked(run("gpt2", "--format", "json", machine=UNKNOWN))
    assert found["capacity_bytes"] == 30 * 10**9
    assert found["plans"][0]["plan"]["gpu"] is None


def test_without_gpus_the_cores_are_used(run: Run) -> None:
    found = asked(run("gpt2-tiny", "--format", "json", "--top", "50", "--without", "checkpointing"))
    assert {row["plan"]["ranks"] for row in found["plans"]} == {1, 2, 4}
    assert {row["plan"]["device"] for row in found["plans"]} == {"cpu"}
    assert found["plans"][0]["plan"]["ranks"] == 4
    assert (
        asked(run("gpt2-tiny", "--device", "cpu", "--gpus", "2", "--format", "json"))["plans"][0]["plan"]["ranks"] == 2
    )
    assert asked(run("gpt2-tiny", "--strategy", "single", "--format", "json"))["plans"][0]["plan"]["ranks"] == 1


# -- saving and launching --------------------------------------------------------------------------


def test_the_first_plan_is_saved(run: Run) -> None:
    result = run("gpt2", "--gpu", "t4", "--save-plan", "mine.json")
    assert result.exit_code == 0, result.output
    assert "memcalc launch mine.json" in result.output
    assert Plan.load(Path("mine.json")).gpu == "t4"


def test_launch_trains_the_first_plan(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(
        "memcalc.cli.launch.run_and_show",
        lambda plan, **rest: calls.append((plan, rest)),
    )
    result = run("gpt2-tiny", "--launch", "--steps", "5", "--out", "run")
    assert result.exit_code == 0, result.output
    ((plan, rest),) = calls
    assert (plan.ranks, plan.device) == (4, "cpu")
    assert (rest["out"], rest["training"].steps, rest["training"].data) == (
        Path("run"),
        5,
        None,
    )


def test_lora_is_searched_over_a_16_bit_base_as_peft_trains_it(run: Run) -> None:
    result = run(
        "llama-3-8b", "--gpu", "rtx-4090", "--adapter", "lora", "--seq-len", "2048", "--top", "1", "--format", "json"
    )
    plan = Plan.from_dict(asked(result)["plans"][0]["plan"])
    assert (plan.precision, plan.adapter.dtype) == ("bf16", "float32")
    only = (
        "gpt2",
        "--gpus",
        "2",
        "--gpu",
        "a10",
        "--adapter",
        "lora",
        "--only",
        "deepspeed",
        "--format",
        "json",
        "--top",
        "1",
    )
    plan = Plan.from_dict(asked(run(*only))["plans"][0]["plan"])
    assert (plan.precision, plan.adapter.dtype) == ("bf16-master", "weights")
    said = run("gpt2", "--gpu", "a10", "--adapter", "lora").output
    assert "frozen weights are held in bfloat16 and adapters in float32, as PEFT does; --precision amp-bf16" in said
    kept = asked(run("gpt2", "--gpu", "a10", "--adapter", "lora", "--adapter-dtype", "weights", "--format", "json"))
    assert Plan.from_dict(kept["plans"][0]["plan"]).precision == "amp-bf16"
