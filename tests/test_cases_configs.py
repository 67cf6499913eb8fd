"""Public reports about configuration files: docs/validation/cases.md lists them by number."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest
from click.testing import CliRunner

from memcalc.cli.app import app
from memcalc.hf.reading import read_model
from memcalc.plan import Plan

LLAMA_3_1 = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "attention_bias": False, "hidden_act": "silu",
    "max_position_embeddings": 131072, "mlp_bias": False, "num_key_value_heads": 8, "rms_norm_eps": 1e-05,
    "rope_theta": 500000.0, "tie_word_embeddings": False, "torch_dtype": "bfloat16", "vocab_size": 128256,
}  # fmt: skip
SIZES = {
    8_030_261_248: {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
    },
    70_553_706_496: {
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_attention_heads": 64,
        "num_hidden_layers": 80,
    },
}


def test_c36_nested_files_are_counted_in_all_their_parts() -> None:
    """jundot/omlx pull request 1448, intel/auto-round pull request 1958: only one part of a nested file was read.

    The file of llava-hf/llava-1.5-7b-hf names no size of its language model at all.
    """
    model = read_model(Path(__file__).parent / "configs" / "llava-1.5-7b.json")
    parts = {"vision": 0, "projector": 0, "text": 0}
    for weight in Plan(model=model, tokens=1024, micro_batch=1).weights:
        first = weight.name.split(".")[0]
        parts[first if first in parts else "text"] += weight.numel
    assert parts == {"vision": 303_507_456, "projector": 20_979_712, "text": 6_738_939_904}
    assert sum(parts.values()) == 7_063_427_072


@pytest.mark.parametrize("count", SIZES)
@pytest.mark.parametrize("method", ["fp8", "compressed-tensors", "bitsandbytes"])
def test_c37_quantised_files_are_counted_by_their_shapes(count: int, method: str, tmp_path: Path) -> None:
    """llm-d/llm-d-benchmark issue 345, huggingface/huggingface.js pull request 1770: 8B was counted as 2B of packed tensors."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA_3_1 | SIZES[count] | {"quantization_config": {"quant_method": method}}))
    model = read_model(path)
    plan = Plan(model=model, tokens=8, micro_batch=1)
    assert sum(weight.numel for weight in plan.weights) == count
    assert {weight.dtype for weight in plan.weights} == {""}  # what is trained in is said by the precision alone
    assert any(note.startswith("quantization_config ") for note in model.notes)
    assert any(note.startswith("torch_dtype ") for note in model.notes)


def test_c39_a_local_file_needs_no_network_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """huggingface/accelerate issue 4212, embeddings-benchmark/mteb pull request 4090: a name, a path and a hub's id were
    taken for each other, and the hub was asked without need."""

    def ask(*_: object, **__: object) -> None:
        raise AssertionError("the network was asked")

    for name in ("socket", "create_connection", "getaddrinfo"):
        monkeypatch.setattr(socket, name, ask)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.json").write_text(json.dumps(LLAMA_3_1 | SIZES[8_030_261_248]))
    before = sorted(tmp_path.rglob("*"))
    for words in ("mine", "mine/config.json", str(tmp_path / "mine")):
        result = CliRunner().invoke(app, ["estimate", words, "--seq-len", "8"])
        assert (result.exit_code, "mine: 8,030,261,248 parameters" in result.output) == (0, True), result.output
    for words, said in (
        (
            "meta-llama/Llama-3.1-8B",
            "meta-llama/Llama-3.1-8B does not exist; give the path of a config.json or of a folder",
        ),
        ("Llama-3.1-8X", "unknown model 'Llama-3.1-8X'; did you mean 'llama-3.1-8b'?"),
    ):
        result = CliRunner().invoke(app, ["estimate", words])
        assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (2, "", 1)
        assert result.stderr.startswith(f"memcalc: {said}")
    assert sorted(tmp_path.rglob("*")) == before
