"""What nobody says is the same in every command, and where it is not, the command says so."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from memcalc.adapters import Adapter
from memcalc.assumptions import in_one_machine
from memcalc.cli.app import app
from memcalc.cli.options import build_plan
from memcalc.cli.unsaid import unsaid
from memcalc.models import MODELS
from memcalc.open_choices import default_precisions
from memcalc.plan import Plan
from memcalc.ui.words import asked, plan_of, query_of

LORA = ("gpt2-tiny", "--adapter", "lora", "--gpu", "a100-80gb", "--checkpointing", "full")
SENTENCE = "fp32 is what torch takes unasked; memcalc recommend and strategies take bf16 here: --precision bf16"

Run = Callable[..., Result]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.chdir(tmp_path)
    return lambda *words: CliRunner().invoke(app, list(words))


def read(result: Result) -> Any:
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


@pytest.mark.parametrize("precision", [(), ("--precision", "bf16")], ids=["unsaid", "bf16"])
def test_one_command_s_plan_is_another_s_to_the_byte(run: Run, precision: tuple[str, ...]) -> None:
    words, form = (*LORA, *precision), ("--format", "json")
    estimated = read(run("estimate", *words, "--save-plan", "plan.json", *form))
    checked = read(run("check", *words, *form))
    solved = read(run("solve", *words, "--for", "micro-batch", *form))
    assert estimated["plan"]["adapter"]["dtype"] == solved["plan"]["adapter"]["dtype"] == "float32"
    assert checked["needed_high_bytes"] == estimated["device"]["high_bytes"]
    two = ("--gpus", "2")
    table = read(run("strategies", *words, *two, *form))["strategies"]
    by_name = {row["strategy"]: row for row in table}
    for strategy in ("ddp", "fsdp-full-shard", *["deepspeed-2"] * (not precision)):  # whose bf16 has masters
        said = ("--precision", by_name[strategy]["precision"], "--strategy", strategy)
        alone = read(run("estimate", *LORA, *two, *said, *form))
        assert alone["allocated"]["peak_bytes"] == by_name[strategy]["allocated_bytes"]
    taken = read(run("recommend", *words, *two, "--strategy", "ddp", "--batch-size", "1", *form))["plans"][0]["plan"]
    assert (taken["precision"], taken["adapter"]["dtype"]) == (by_name["ddp"]["precision"], "float32")
    assert taken["precision"] == "bf16"
    assert [row["precision"] for row in table if row["strategy"] == "deepspeed-2"] == ["bf16-master"] * (not precision)


@pytest.mark.parametrize("command", [("estimate",), ("check",), ("solve", "--for", "micro-batch")], ids=" ".join)
def test_where_commands_differ_they_say_so_once(run: Run, command: tuple[str, ...]) -> None:
    assert run(*command, *LORA).stdout.count(SENTENCE) == 1
    for said in (("--precision", "fp32"), ("--precision", "bf16")):
        assert "unasked" not in run(*command, *LORA, *said).stdout
    run("estimate", *LORA, "--save-plan", "plan.json")
    assert "unasked" not in run("check", "plan.json").stdout  # a saved plan says it all


def test_what_a_page_shows_of_it_is_that_sentence(run: Run) -> None:
    from memcalc.ui.answers import picture

    query = "model=gpt2&adapter=lora&gpu=a100-80gb"
    assert json.loads(picture(query))["unsaid"] == SENTENCE
    assert json.loads(picture(f"{query}&precision=bf16"))["unsaid"] == ""


@pytest.mark.parametrize(
    ("words", "dtype"),
    [
        ({}, "weights"),
        ({"adapter__kind": "lora"}, "float32"),
        ({"adapter__kind": "lora", "adapter__dtype": "weights"}, "weights"),
        ({"adapter__kind": "adapter-v2"}, "weights"),
        ({"adapter__kind": "lora", "ranks": 2, "strategy": "deepspeed-2", "precision": "bf16-master"}, "weights"),
        ({"adapter__kind": "lora", "ranks": 2, "strategy": "fsdp-full-shard", "precision": "bf16"}, "float32"),
    ],
)
def test_adapters_are_kept_as_their_library_keeps_them(words: dict[str, Any], dtype: str) -> None:
    plan = build_plan({"model": "llama-3-8b", **words})
    assert plan.adapter.dtype == dtype
    said = query_of(plan, [("model", "llama-3-8b")])
    assert plan_of(asked("&".join(f"{name}={value}" for name, value in said))) == plan


@pytest.mark.parametrize(
    ("words", "nodes", "said"),
    [
        ({"ranks": 8}, 1, ""),
        ({"ranks": 64}, 8, "64 GPUs are taken to be in 8 machines; --nodes says otherwise"),
        ({"ranks": 64, "nodes": 1}, 1, "all 64 GPUs are taken to be in 1 machine; where they are in more, say so"),
        ({"ranks": 64, "nodes": 4}, 4, ""),
        ({"ranks": 16, "gpu": "v100-32gb"}, 1, ""),  # as many are in a DGX-2
        ({"ranks": 11}, 1, "all 11 GPUs are taken to be in 1 machine; where they are in more, say so: --nodes N"),
        ({"ranks": 16, "strategy": "data-parallel"}, 1, "all 16 GPUs are taken to be in 1 machine"),
        ({"ranks": 16, "device": "cpu"}, 1, ""),
        ({"ranks": 16, "device": "cpu", "nodes": 2}, 2, ""),
    ],
)
def test_more_gpus_than_a_machine_has_are_in_several(words: dict[str, Any], nodes: int, said: str) -> None:
    words = {"model": "gpt2-tiny", "precision": "fp32", **words}
    plan = build_plan(words)
    assert plan.nodes == nodes
    sentences = " ".join([*unsaid(words, plan), *in_one_machine(plan)])
    assert said in sentences and bool(said) == ("taken to be" in sentences)
    again = query_of(plan, [("model", "gpt2-tiny")])
    assert plan_of(asked("&".join(f"{name}={value}" for name, value in again))) == plan
    assert ("nodes" in dict(again)) == ("nodes" in words)


def test_a_plan_that_is_stated_stays_as_it_is() -> None:
    """The default is the command line's alone: in Python, and in files, a plan is what its fields say."""
    assert Adapter(kind="lora").dtype == "weights"
    nf4 = Plan(
        model=MODELS["gpt2"], tokens=64, micro_batch=1, gpu="t4",
        adapter=Adapter(kind="lora", dtype="float32", quantize="nf4"),
    )  # fmt: skip
    assert default_precisions(nf4) == ("amp-fp16",)
