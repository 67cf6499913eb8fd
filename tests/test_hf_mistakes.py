"""Configs as people and machines get them wrong: one clear line each, and nothing run."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from memcalc.cli.app import app
from memcalc.errors import MemcalcError
from memcalc.hf.reading import UnknownModelType, of_config, read_config
from memcalc.hf.rows import TYPES
from memcalc.plan import Plan
from tests.drawn_configs import configs

CONFIGS = Path(__file__).parent / "configs"
LLAMA: dict[str, Any] = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 96, "vocab_size": 100,
    "max_position_embeddings": 32,
}  # fmt: skip

Run = Callable[..., Result]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """``run("estimate", "config.json")`` in an empty folder."""
    monkeypatch.chdir(tmp_path)
    return lambda *words: CliRunner().invoke(app, list(words))


def refused(result: Result, said: str) -> None:
    """One line that says so, exit code 2, and no traceback."""
    assert result.exit_code == 2, result.output
    assert not isinstance(result.exception, Exception)  # SystemExit alone
    assert len(result.output.splitlines()) == 1
    assert said in result.output


TEXTS = [
    ("", "config.json is empty; expected JSON"),
    ("{", "config.json is not valid JSON"),
    ("[]", "expected an object as a config.json is one, found []"),
    ("7", "found 7"),
    ("null", "found None"),
    ('"llama"', "found 'llama'"),
    ('{"model_type": "llama", "model_type": "gpt2"}', "the key 'model_type' stands twice"),
    ('{"model_type": "llama", "hidden_size": NaN}', "NaN is not a number JSON knows"),
    ('{"model_type": "llama", "hidden_size": Infinity}', "Infinity is not a number JSON knows"),
    ('{"model_type": "llama", "rms_norm_eps": 1e999}', "too large for a number"),
    (
        '{"model_type": "llama", "hidden_size": ' + "9" * 5000 + "}",
        "a whole number of thousands of digits is too large",
    ),
    ("[" * 5_000_000 + "]" * 5_000_000, "config.json is not valid JSON: it is nested too deeply to be read"),
    ('{"a":' * 200_000, "config.json is not valid JSON: it is nested too deeply to be read"),
    ("\x00\x01", "config.json is not valid JSON"),
    ("{}", "model_type is missing; it says which model this is, such as llama"),
    ('{"model_type": null}', "model_type is missing"),
    ('{"model_type": 3}', "model_type is 3"),
    ('{"model_type": ["llama"]}', "model_type is ['llama']"),
]


@pytest.mark.parametrize(("text", "said"), TEXTS, ids=range(len(TEXTS)))
def test_what_is_no_config_is_refused_in_one_line(run: Run, text: str, said: str) -> None:
    Path("config.json").write_text(text, encoding="utf-8")
    refused(run("estimate", "config.json"), said)


KEYS = [
    ({"hidden_size": -64}, "hidden_size -64 must be at least 1"),
    ({"hidden_size": 0}, "hidden_size 0 must be at least 1"),
    ({"hidden_size": "64"}, "hidden_size is '64', which is not a whole number"),
    ({"hidden_size": 64.0}, "hidden_size is 64.0, which is not a whole number"),
    ({"hidden_size": True}, "hidden_size is True, which is not a whole number"),
    ({"hidden_size": [64]}, "hidden_size is [64], which is not a whole number"),
    ({"hidden_size": {}}, "hidden_size is {}, which is not a whole number"),
    ({"hidden_size": None}, "hidden_size is null, which LlamaConfig cannot make a number of"),
    ({"intermediate_size": None}, "intermediate_size is null"),
    ({"hidden_size": 10**12}, "hidden_size 1000000000000 must be at most 1000000000"),
    ({"num_hidden_layers": 10**6}, "num_hidden_layers 1000000 must be at most 10000"),
    ({"tie_word_embeddings": 1}, "tie_word_embeddings is 1, which is not true or false"),
    ({"attention_bias": "no"}, "attention_bias is 'no', which is not true or false"),
    ({"hidden_act": 3}, "hidden_act is 3, which is not text"),
    ({"quantization_config": []}, "quantization_config is [], which is not an object"),
    ({"hidden_act": "glu"}, "unknown activation function 'glu'; did you mean 'gelu'?"),
    ({"architectures": "LlamaForCausalLM"}, "which is not a list of class names"),
    ({"num_key_value_heads": 3}, "3 key/value heads do not divide 4 heads"),
    ({"head_dim": 7}, "rotary positions on 7 of a head's width 7"),
    ({"num_attention_heads": 5}, "5 heads"),
    ({"model_type": "gpt2", "n_embd": 32, "hidden_size": 64}, "n_embd 32 and hidden_size 64 are the same key, and contradict each other"),
    ({"model_type": "gpt2", "add_cross_attention": True}, "add_cross_attention is true"),
    ({"model_type": "gpt_neox", "rotary_pct": 1.5}, "rotary_pct is 1.5, which is not a number above 0 and up to 1"),
    ({"model_type": "opt", "dropout": 1}, "dropout is 1, which is not a number from 0 to below 1"),
    ({"model_type": "opt", "layer_norm_elementwise_affine": False}, "layer_norm_elementwise_affine is false"),
    ({"model_type": "gemma2", "attn_logit_softcapping": 0}, "attn_logit_softcapping is 0, which is not a number above 0"),
    ({"model_type": "mixtral", "num_local_experts": 2, "num_experts_per_tok": 3}, "num_experts_per_tok 3: there are only 2 experts"),
    ({"model_type": "mixtral", "hidden_act": "gelu"}, "hidden_act gelu: only mixtures of experts with silu are known"),
    ({"model_type": "qwen3_moe", "mlp_only_layers": [-1]}, "mlp_only_layers is [-1], which is not a list of whole numbers"),
    ({"model_type": "deepseek_v2"}, "num_experts_per_tok is missing, and DeepseekV2Config has no default"),
    ({"model_type": "falcon", "new_decoder_architecture": True, "parallel_attn": False}, "make no Falcon that transformers runs"),
]  # fmt: skip


@pytest.mark.parametrize(("keys", "said"), KEYS, ids=[",".join(keys) for keys, _ in KEYS])
def test_keys_that_cannot_be_are_refused_by_name(run: Run, keys: dict[str, Any], said: str) -> None:
    Path("config.json").write_text(json.dumps({**LLAMA, **keys}), encoding="utf-8")
    refused(run("estimate", "config.json", "--seq-len", "8"), said)


def test_paths_that_lead_nowhere(run: Run) -> None:
    Path("empty").mkdir()
    Path("loop.json").symlink_to("loop.json")
    Path("one").symlink_to("two")
    Path("two").symlink_to("one")
    Path("folder.json").mkdir()
    refused(run("estimate", "nowhere/config.json"), "nowhere/config.json does not exist")
    refused(run("estimate", "config.json"), "config.json does not exist")
    refused(run("estimate", "./llama"), "llama does not exist")
    refused(run("estimate", "empty/"), "empty is a folder without a config.json")
    refused(run("estimate", "."), "is a folder without a config.json")
    refused(run("estimate", "loop.json"), "loop.json is a link that leads nowhere, or in a circle")
    refused(run("estimate", "./one"), "one is a link that leads nowhere, or in a circle")
    refused(run("estimate", "folder.json"), "folder.json is a folder without a config.json")
    refused(run("estimate", "/dev/zero.json"), "does not exist")
    refused(run("estimate", "empty"), "unknown model 'empty'")
    refused(run("estimate", "a" * 300), "unknown model 'aaaa")
    refused(run("estimate", f"./{'a' * 300}"), "cannot be read: file name too long")
    refused(run("estimate", ""), "unknown model ''")
    os.mkfifo("pipe.json")  # a reader would wait for ever
    refused(run("estimate", "pipe.json"), "pipe.json is not a regular file")


def test_a_type_without_a_row_is_told_with_the_nearest() -> None:
    with pytest.raises(
        UnknownModelType, match="^config.json: model_type 'lama' is not known; the nearest is llama; known are"
    ):
        of_config({"model_type": "lama"}, "config.json", "drawn")


def test_what_only_its_own_code_could_count_is_refused_with_the_keys_named(run: Run) -> None:
    path = CONFIGS / "nemotron-super-49b-toplevel.json"
    refused(run("estimate", str(path)), "intermediate_size and num_key_value_heads are null")
    with pytest.raises(UnknownModelType) as caught:
        read_config(path)
    assert (caught.value.model_type, caught.value.path) == ("nemotron-nas", str(path))
    assert caught.value.nulls == ("intermediate_size", "num_key_value_heads")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**20), 10**20) | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)


@pytest.mark.parametrize("model_type", sorted(TYPES))
@settings(max_examples=20, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_anything_in_any_key_is_read_or_refused(model_type: str, data: st.DataObject) -> None:
    config = data.draw(configs("phi" if model_type == "phi-msft" else model_type)) | {"model_type": model_type}
    spelled = sorted({name for key in TYPES[model_type].keys.values() for name in key.names if "." not in name})
    for name in data.draw(
        st.lists(st.sampled_from([*spelled, "architectures", "torch_dtype"]), min_size=1, max_size=2)
    ):
        config[name] = data.draw(st.one_of(JSON, st.integers(0, 70)))
    try:
        read = of_config(config, "config.json", "drawn")
        if read.model.vocab < 10**5 and read.model.layers < 100:
            Plan(model=read.model, tokens=1, micro_batch=1)
            assert dict(read.weights())
    except MemcalcError as error:
        assert "\n" not in str(error)
