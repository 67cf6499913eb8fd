"""Configs of published models by their exact counts, and estimates of drawn ones of every model type."""

from __future__ import annotations

import csv
import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from memcalc.estimate import estimate
from memcalc.hf.reading import of_config, read_config, read_model
from memcalc.hf.rows import TYPES
from memcalc.ledger import ledger
from memcalc.models import MODELS, Model
from memcalc.plan import Plan
from tests.drawn_configs import configs

CONFIGS = Path(__file__).parent / "configs"
with (CONFIGS / "INDEX.csv").open(encoding="utf-8") as opened:
    INDEX = {row["name"]: row["parameters"] for row in csv.DictReader(opened)}
COUNTED = [name for name, count in INDEX.items() if count]
DRAWN = sorted(name for name in TYPES if name != "phi-msft")
# Of the catalog and of the configs; what a file says besides its shape is left out.
SAME = {
    "llama-3-8b": "llama-3-8b", "llama-2-7b": "llama-2-7b", "llama-3.1-70b": "llama-3.1-70b", "qwen2.5-0.5b": "qwen2.5-0.5b",
    "qwen2.5-7b": "qwen2.5-7b", "gpt2": "gpt2", "gpt2-xl": "gpt2-xl", "mixtral-8x7b": "mixtral-8x7b", "gemma-2b": "gemma-2b",
    "gpt-neox-20b": "gpt-neox-20b", "falcon-7b": "falcon-7b", "phi-2": "phi-2", "qwen3-30b-a3b": "qwen3-30b-a3b",
}  # fmt: skip


def of(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((CONFIGS / f"{name}.json").read_text(encoding="utf-8"))
    return found


def bare(model: Model) -> Model:
    """Without its name, its notes, words that say the default, and how transformers lays tensors out."""
    usual = {"positions": "rotary", "activation": "silu"}
    blank = {field: "" for field, word in usual.items() if getattr(model, field) == word}
    return dataclasses.replace(model, name="", notes=(), stacked=False, head_major=False, **blank)


def test_the_index_names_every_file() -> None:
    assert sorted(INDEX) == sorted(path.stem for path in CONFIGS.glob("*.json"))


@pytest.mark.parametrize("name", COUNTED)
def test_published_configs_have_their_exact_count(name: str) -> None:
    read = read_config(CONFIGS / f"{name}.json")
    assert read.parameters == int(INDEX[name])
    assert read.model.name == name
    # The same tensors under the names that transformers has for them.
    total = 0
    for _, shape in read.weights():
        size = 1
        for part in shape:
            size *= part
        total += size
    assert total == read.parameters


@pytest.mark.parametrize("name", SAME)
def test_named_models_are_what_their_config_says(name: str) -> None:
    assert bare(read_model(CONFIGS / f"{name}.json")) == bare(MODELS[SAME[name]])


@pytest.mark.parametrize("model_type", DRAWN)
@settings(max_examples=4, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(data=st.data(), precision=st.sampled_from(["fp32", "bf16"]))
def test_every_drawn_config_is_estimated(model_type: str, data: st.DataObject, precision: str) -> None:
    read = of_config(data.draw(configs(model_type)), "config.json", "drawn")
    plan = Plan(
        model=read.model, tokens=7 if read.model.context else 0, micro_batch=2, precision=precision, device="cpu"
    )
    assert Plan.from_json(plan.to_json()) == plan
    found = estimate(plan)
    assert found.peak.by_category["parameters"] == read.parameters * (2 if precision == "bf16" else 4)
    assert set(read.model.notes) <= set(found.assumptions)
    on_cuda = estimate(dataclasses.replace(plan, device="cuda"))
    assert on_cuda.peak.bytes >= on_cuda.peak.by_category["parameters"] >= found.peak.by_category["parameters"]


def kept(model: Model, precision: str) -> int:
    """Bytes that a step has at its peak above its states, on a CPU."""
    timeline = ledger(Plan(model=model, tokens=64, micro_batch=1, precision=precision, device="cpu"))
    return timeline.peak().by_category["activations"]


def test_latent_attention_keeps_what_its_operations_keep() -> None:
    """Counted by hand: two layers of DeepSeek V3's attention whose ranks, heads and values have other widths each."""
    config = {
        "model_type": "deepseek_v3", "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
        "intermediate_size": 8, "vocab_size": 8, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 5,
        "kv_lora_rank": 7, "first_k_dense_replace": 1, "q_lora_rank": None,
    }  # fmt: skip
    narrow = of_config(config, "config.json", "drawn").model
    through = of_config({**config, "q_lora_rank": 11}, "config.json", "drawn").model
    # Beside q_b's output, whose width is that of q_proj: q_a's output, its norm, and the norm's statistics.
    chain = 4 * 64 * (11 + 11 + 11 + 1)
    assert 4 * 64 * 2 * 11 <= kept(through, "fp32") - kept(narrow, "fp32") <= chain
