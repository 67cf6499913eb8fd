"""What a config.json asks for beside its sizes: its dropout is counted, and with what is not no verdict is ``fits``."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from memcalc.cli.options import build_plan
from memcalc.errors import FileError, PlanError
from memcalc.estimate import Estimate, estimate
from memcalc.models import FAMILIES, MODELS
from memcalc.plan import Plan
from memcalc.timeline import MOMENTS

GPT2 = {"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 256, "n_positions": 128}
BERT = {
    "model_type": "bert", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128,
    "vocab_size": 256, "max_position_embeddings": 128,
}  # fmt: skip
LLAMA = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 4, "vocab_size": 256, "max_position_embeddings": 256,
}  # fmt: skip
MBART = {
    "model_type": "mbart", "d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 128, "decoder_ffn_dim": 128, "vocab_size": 256,
}  # fmt: skip


def asked(folder: Path, config: dict[str, Any], **words: Any) -> Estimate:
    path = folder / "config.json"
    path.write_text(json.dumps(config))
    return estimate(build_plan({"model": path, "gpu": "a100-80gb", "tokens": 64, **words}))


def activations(found: Estimate) -> int:
    return max(found.timeline.at_moment(moment, "activations") for moment in MOMENTS)


@pytest.mark.parametrize(
    ("config", "rate"),
    [
        (GPT2, 0.1),  # configuration_gpt2.py: all three of them
        ({**GPT2, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.2}, 0.2),
        ({**GPT2, "resid_pdrop": 0.0, "embd_pdrop": 0.0}, 0.1),
        ({**GPT2, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "summary_first_dropout": 0.5}, 0.0),
        (BERT, 0.1),  # configuration_bert.py
        ({**BERT, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0, "classifier_dropout": 0.5}, 0.0),
        ({**LLAMA, "model_type": "phi", "resid_pdrop": 0.3}, 0.3),
    ],
)
def test_the_files_dropout_is_the_plans_unless_another_is_typed(
    tmp_path: Path, config: dict[str, Any], rate: float
) -> None:
    found = asked(tmp_path, config)
    assert found.plan.dropout == rate
    assert found.verdict == "fits"
    assert any("is the largest of the file" in line for line in found.assumptions) == (rate > 0)
    without = asked(tmp_path, config, dropout=0.0)
    assert without.plan.dropout == 0
    assert (activations(without) < activations(found)) == (rate > 0)
    if rate:
        assert f"dropout 0 is counted, where the file says {rate:g}" in without.assumptions


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({**LLAMA, "model_type": "llama", "attention_dropout": 0.1}, "attention_dropout 0.1"),
        ({**LLAMA, "model_type": "mixtral", "attention_dropout": 0.2}, "attention_dropout 0.2"),
        ({**MBART, "dropout": 0.1, "attention_dropout": 0.3, "activation_dropout": 0.2},
         "attention_dropout 0.3, activation_dropout 0.2"),
    ],
)  # fmt: skip
def test_with_something_uncounted_nothing_fits_for_sure(tmp_path: Path, config: dict[str, Any], named: str) -> None:
    found = asked(tmp_path, config)
    assert found.verdict == "unknown"
    assert any(named in line and "counted" in line for line in found.assumptions)
    assert not found.whole
    assert asked(tmp_path, config, micro_batch=10**6).verdict == "does-not-fit"
    assert Plan.from_json(found.plan.to_json()) == found.plan
    without = asked(tmp_path, config, dropout=0.0)
    assert without.verdict == "fits"


@pytest.mark.parametrize(
    ("words", "verdict"),
    [
        ({"attention": "eager", "precision": "bf16"}, "unknown"),
        ({"attention": "eager"}, "fits"),
        ({"precision": "bf16"}, "fits"),
    ],
)
def test_float32_copies_of_written_out_attention(tmp_path: Path, words: dict[str, str], verdict: str) -> None:
    config = {**GPT2, "model_type": "gptj", "rotary_dim": 8}
    assert asked(tmp_path, config, **words).verdict == verdict


@pytest.mark.parametrize(
    "config",
    [
        {**LLAMA, "model_type": "mistral", "sliding_window": 32},
        {
            **LLAMA,
            "model_type": "starcoder2",
            "sliding_window": 64,
        },  # as long as the sequence: masking_utils.py asks for more
        {**LLAMA, "model_type": "qwen2", "use_sliding_window": True, "sliding_window": 32},
    ],
)
def test_past_its_window_every_layer_keeps_a_mask(tmp_path: Path, config: dict[str, Any]) -> None:
    """In the dtype of queries, of each sample; the efficient kernel takes it, where flash takes none."""
    words = {"micro_batch": 4, "precision": "bf16"}
    found, plain = (
        asked(tmp_path, {**config, "sliding_window": window}, **words) for window in (config["sliding_window"], 65)
    )
    assert (found.plan.kernel, plain.plan.kernel) == ("efficient", "flash")
    made = [found.timeline.names[ident].endswith("mask bias") and size for ident, size in
            zip(found.timeline.ident, found.timeline.delta, strict=True) if size > 0]  # fmt: skip
    assert [size for size in made if size] == [2 * 4 * 64 * 64] * 2
    assert found.verdict == "fits"
    assert any("the sliding window of" in line for line in found.doubts)
    assert found.plan.untrained.startswith("with 64 tokens and a sliding window of")
    # flash-attn's own library takes the window itself.
    assert not asked(tmp_path, config, attention="flash", **words).plan.masked
    math = asked(tmp_path, config, attention="math", **words)
    assert math.timeline.peak().bytes > 0 and math.plan.kernel == "math"


def test_a_sequence_within_the_window_has_no_mask(tmp_path: Path) -> None:
    within = {**LLAMA, "model_type": "mistral", "sliding_window": 65}
    off = {**LLAMA, "model_type": "qwen2", "use_sliding_window": False, "sliding_window": 32}
    for config in (within, off):
        found = asked(tmp_path, config)
        assert found.verdict == "fits"
        assert not any("sliding window of" in line for line in found.assumptions)


def test_a_dropout_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileError, match="attention_dropout is 1.5, which is not a number from 0 to below 1"):
        asked(tmp_path, {**LLAMA, "model_type": "llama", "attention_dropout": 1.5})


@pytest.mark.parametrize(
    "name", ["gpt2-tiny", "llama-tiny", "bert-tiny", "vit-tiny", "moe-tiny", "resnet-tiny", "t5-tiny", "mlp-tiny"]
)
def test_a_family_that_says_it_has_dropout_takes_it(name: str) -> None:
    plan = build_plan({"model": name})
    if FAMILIES[plan.model.family].drops:
        assert dataclasses.replace(plan, dropout=0.1).model == MODELS[name]
    else:
        with pytest.raises(PlanError, match="dropout"):
            dataclasses.replace(plan, dropout=0.1)
