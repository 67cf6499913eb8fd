"""A config.json where a model's name may stand: estimates, reshaped ones, saved plans, recommendations."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from memcalc.cli.app import app
from memcalc.hf.reading import of_config, read_config
from memcalc.plan import Plan

CONFIGS = Path(__file__).parent / "configs"

Run = Callable[..., Result]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """``run("estimate", "my-llama")`` in a folder that has one of a model's name."""
    monkeypatch.chdir(tmp_path)
    for folder in ("my-llama", "gpt2"):
        Path(folder).mkdir()
        shutil.copy(CONFIGS / "llama-3-8b.json", Path(folder) / "config.json")
    return lambda *words: CliRunner().invoke(app, list(words))


def asked(run: Run, *words: str) -> dict[str, Any]:
    """The JSON of an estimate at 64 tokens."""
    result = run("estimate", *words, "--seq-len", "64", "--format", "json")
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.output)
    return found


def test_a_folder_and_its_file_are_the_same_model(run: Run) -> None:
    found = asked(run, "my-llama")
    assert found["parameters"] == 8030261248
    assert found["plan"]["model"]["name"] == "my-llama"
    assert found == asked(run, "my-llama/config.json") == asked(run, "my-llama/")


def test_a_model_of_the_catalog_goes_before_a_folder_of_its_name(run: Run) -> None:
    assert asked(run, "gpt2")["parameters"] == 124439808
    assert asked(run, "./gpt2")["parameters"] == 8030261248


def test_the_files_dtype_is_not_the_training_dtype(run: Run) -> None:
    found = asked(run, "my-llama")
    assert found["plan"]["precision"] == "fp32"
    assert (
        "torch_dtype 'bfloat16' says how the file's weights are stored; what is trained in is --precision"
        in found["assumptions"]
    )
    stored = asked(run, str(CONFIGS / "deepseek-v3.json"))
    assert stored["plan"]["precision"] == "fp32"
    assert stored["allocated"]["by_category"]["parameters"] == 4 * 671026404352
    said = " ".join(stored["assumptions"])
    assert "quantization_config is of the stored weights and is left aside" in said
    assert "auto_map names code of the repository, which is never run" in said


def test_absent_keys_and_nulls_are_assumptions(run: Run) -> None:
    said = asked(run, str(CONFIGS / "falcon-7b.json"))["assumptions"]
    absent = next(line for line in said if line.startswith("not in the file, so as FalconConfig of transformers"))
    for key in ("max_position_embeddings 2048", "num_kv_heads 71 (num_attention_heads)", "tie_word_embeddings true"):
        assert key in absent
    Path("config.json").write_text('{"model_type": "gpt2", "n_inner": null, "n_layer": 1}', encoding="utf-8")
    said = asked(run, "config.json")["assumptions"]
    assert "null in the file, so as GPT2Config of transformers 5.24 has it: n_inner 3072 (4 times the width)" in said
    assert "the file names no architecture; counted is GPT2LMHeadModel" in said


def test_numbers_may_be_changed_and_the_plan_is_saved(run: Run) -> None:
    words = ("my-llama", "--layers", "2", "--hidden", "256", "--save-plan", "plan.json")
    found = asked(run, *words)
    plan = Plan.load("plan.json")
    assert (plan.model.layers, plan.model.hidden) == (2, 256)
    assert plan.model.name == "my-llama (layers 2, hidden 256)"
    assert plan.model.notes == read_config("my-llama").model.notes
    again = run("estimate", "--plan", "plan.json", "--format", "json")
    assert json.loads(again.output) == found


def test_code_is_written_as_transformers_writes_it_unless_said(run: Run) -> None:
    usual = asked(run, "my-llama")
    assert usual["plan"]["implementation"]["norm"] == "python"
    assert "the model's code is written with norm python, softmax float32" in usual["assumptions"]
    own = asked(run, "my-llama", "--norm", "auto", "--softmax", "auto")
    assert own["plan"]["implementation"]["norm"] == "auto"
    assert not any("code is written with" in line for line in own["assumptions"])
    # Each norm keeps one more tensor in float32, and the normalised one.
    more, less = (each["allocated"]["by_moment"]["loss"] for each in (usual, own))
    assert more - less >= 65 * 64 * 4096 * 4
    phi = asked(run, str(CONFIGS / "phi-2.json"))["plan"]["implementation"]
    assert (phi["norm"], phi["gelu"], phi["softmax"]) == ("auto", "python", "float32")


def test_recommend_takes_a_config(run: Run) -> None:
    words = ("--layers", "1", "--gpu", "h100-80gb", "--seq-len", "128", "--strategy", "single", "--format", "json")
    result = run("recommend", "my-llama", *words)
    assert result.exit_code == 0, result.output
    plan = json.loads(result.output)["plans"][0]["plan"]
    assert plan["model"]["name"] == "my-llama (layers 1)"
    assert plan["implementation"]["norm"] == "python"


def test_stacked_experts_that_do_not_go_round_are_said(run: Run) -> None:
    words = (str(CONFIGS / "mixtral-8x7b.json"), "--layers", "1", "--strategy", "fsdp-full-shard", "--gpus")
    said = "fully_shard divides stacked experts by expert, so that 8 over 16 ranks leave a whole one on every rank"
    sixteen, eight = asked(run, *words, "16"), asked(run, *words, "8")
    assert any(line.startswith(said) for line in sixteen["assumptions"])
    assert not any("stacked experts" in line for line in eight["assumptions"])
    evenly = asked(run, *words, "16", "--fsdp-version", "1")
    assert not any("stacked experts" in line for line in evenly["assumptions"])
    experts = 3 * 8 * 4096 * 14336 * 4  # bytes in float32
    more = sixteen["allocated"]["by_category"]["parameters"] - evenly["allocated"]["by_category"]["parameters"]
    assert more == pytest.approx(experts / 16, rel=0.02)


def test_the_first_spellings_of_phi_are_those_of_today() -> None:
    first = {
        "model_type": "phi-msft", "n_embd": 2560, "n_layer": 32, "n_head": 32, "n_head_kv": None, "n_inner": None,
        "n_positions": 2048, "rotary_dim": 32, "vocab_size": 51200, "activation_function": "gelu_new",
    }  # fmt: skip
    assert of_config(first, "config.json", "phi-2").parameters == 2779683840


def test_an_architecture_that_is_not_counted_is_said() -> None:
    config = {"model_type": "llama", "num_hidden_layers": 1, "architectures": ["LlamaForSequenceClassification"]}
    said = of_config(config, "config.json", "scores").model.notes
    assert "architectures says LlamaForSequenceClassification; counted is LlamaForCausalLM, with its head" in said
