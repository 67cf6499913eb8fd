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
from memcalc.models import MODELS, Model
from memcalc.plan import Plan
from tests.drawn_configs import configs
from tests.sized_configs import SIZED, activations, kept, sized

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
    """Without its name, its notes, its dropout, words that say the default, and how transformers lays tensors out."""
    usual = {"positions": "rotary", "activation": "silu"}
    blank = {field: "" for field, word in usual.items() if getattr(model, field) == word}
    return dataclasses.replace(
        model, name="", notes=(), dropout=0.0, wide_scores=False, stacked=False, head_major=False, **blank
    )


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


# Bytes that autograd keeps of a forward pass, the logits among them: written out in float32, and by the kernel that
# scaled_dot_product_attention takes in bfloat16 (0 where transformers has no such form, or gives it a mask). Counted on a
# CPU with torch.autograd.graph.saved_tensors_hooks on the modules of transformers 5.24 and torch 2.13.
KEPT = {
    "bloom": (1440768, 0),
    "deepseek_v2": (1833488, 1293328),
    "deepseek_v3": (1791504, 1273872),
    "falcon": (1282080, 0),
    "gemma": (1708800, 860416),
    "gemma2": (2261760, 0),
    "gemma3_text": (2177024, 1328640),
    "gpt2": (2193920, 970240),
    "gpt_bigcode": (1407488, 527872),
    "gpt_neo": (1702400, 0),
    "gpt_neox": (1146880, 544768),
    "gptj": (2076672, 911360),
    "granite": (1707520, 777216),
    "llama": (1707520, 777216),
    "mistral": (1707520, 777216),
    "mixtral": (2650656, 1261600),
    "mpt": (1415168, 0),
    "opt": (1047552, 397312),
    "phi": (1572864, 659456),
    "phi3": (1707520, 859136),
    "qwen2": (1707520, 777216),
    "qwen2_moe": (1763872, 815648),
    "qwen3": (1910272, 930816),
    "qwen3_moe": (1736224, 854048),
    "smollm3": (1707520, 777216),
    "starcoder2": (1218560, 449536),
}  # fmt: skip


@pytest.mark.parametrize("model_type", KEPT)
def test_what_is_kept_is_what_autograd_keeps_of_transformers(model_type: str) -> None:
    read = of_config(sized(model_type), "config.json", "sized")
    written_out, fused = KEPT[model_type]
    assert kept(read, "eager", "fp32") == pytest.approx(written_out, rel=0.01)
    if fused:
        assert kept(read, "sdpa", "bf16") == pytest.approx(fused, rel=0.01)


def test_latent_attention_keeps_queries_keys_and_their_product_apart() -> None:
    """By a fused kernel: queries and keys joined with their rotated parts, and the product that values are views of."""

    def at(width: int) -> int:
        config = {**sized("deepseek_v3"), "qk_nope_head_dim": width, "max_position_embeddings": 128}
        model = of_config(config, "config.json", "sized").model
        return activations(Plan(model=model, tokens=128, micro_batch=1, device="cuda"))

    each = 4 * 128 * 4  # bytes of one element a head, of 128 tokens and 4 heads: whole blocks of the allocator
    assert at(20) - at(12) == 2 * 3 * 8 * each  # 2 layers


def test_every_decoder_is_sized() -> None:
    assert list(KEPT) == SIZED
