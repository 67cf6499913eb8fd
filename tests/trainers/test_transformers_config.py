"""Configurations that transformers builds: what they may not lead to, and what is said of those it does not take."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from memcalc.errors import InputError
from trainers.transformers_config import from_config, offline

pytest.importorskip("transformers")
SMALL = {
    "model_type": "xglm", "architectures": ["XGLMForCausalLM"], "d_model": 16, "num_layers": 1, "attention_heads": 2,
    "ffn_dim": 16, "vocab_size": 20, "max_position_embeddings": 16,
}  # fmt: skip


def built(folder: Path, **changes: Any) -> Any:
    path = folder / "config.json"
    path.write_text(json.dumps(SMALL | changes))
    return from_config(path)()


@pytest.mark.parametrize("key", ["attn_implementation", "_attn_implementation", "_attn_implementation_internal"])
def test_no_kernels_are_fetched(key: str, tmp_path: Path) -> None:
    model = built(tmp_path, **{key: "somebody/kernels"})
    assert model.config._attn_implementation in ("sdpa", "eager")
    nested = built(
        tmp_path, model_type="llava", architectures=["LlavaForConditionalGeneration"],
        text_config={"model_type": "llama", "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
                     "intermediate_size": 16, "vocab_size": 20, key: "somebody/kernels"},
        vision_config={"model_type": "clip_vision_model", "hidden_size": 16, "num_hidden_layers": 1,
                       "num_attention_heads": 2, "intermediate_size": 16, key: "somebody/kernels"},
    )  # fmt: skip
    assert nested.config.text_config._attn_implementation in ("sdpa", "eager")
    assert nested.config.vision_config._attn_implementation in ("sdpa", "eager")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"backbone": "somebody/weights"}, "backbone names a model that would be fetched"),
        ({"parts": [{"backbone": "somebody/weights"}]}, "parts.backbone names a model that would be fetched"),
        ({"num_layers": -1}, "num_layers is -1; a size is not below 0$"),
        ({"text_config": {"hidden_size": -8}}, "text_config.hidden_size is -8; a size is not below 0$"),
        ({"d_model": "wide"}, "config.json: d_model is 'wide'; transformers does not take it .*wide"),
        ({"id2label": 5}, "config.json: id2label is 5; transformers does not take it "),
        ({"model_type": "new"}, "model_type 'new' is unknown to transformers .* too"),
    ],
)
def test_what_is_refused_says_where_it_stands(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=message) as caught:
        built(tmp_path, **changes)
    assert "\n" not in str(caught.value)


def test_code_of_a_repository_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where transformers has the type itself; else it is refused as unknown."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Model: pass\n")
    places = dict.fromkeys(("AutoConfig", "AutoModelForCausalLM"), "evil.Model")
    model = built(tmp_path, architectures=[], auto_map=places, own={"auto_map": places})
    assert type(model).__name__ == "XGLMForCausalLM"
    assert not hasattr(model.config, "auto_map") and model.config.own == {}
    with pytest.raises(InputError, match="is unknown to transformers"):
        built(tmp_path, model_type="new", auto_map=places)
    assert not (tmp_path / "ran").exists()


def test_numbers_below_zero_that_are_no_sizes_are_kept(tmp_path: Path) -> None:
    model = built(tmp_path, pad_token_id=None, eos_token_id=-1, max_relative_positions=-1, window_size=-1)
    assert model.config.max_relative_positions == model.config.window_size == -1


def test_no_connection_is_opened_while_a_model_is_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import transformers

    def fetch(config: Any) -> nn.Module:
        with socket.socket() as there:
            there.connect(("127.0.0.1", 9))
        return nn.Linear(1, 1)

    monkeypatch.setattr(transformers, "XGLMForCausalLM", None)
    known = transformers.AutoModelForCausalLM._model_mapping
    auto = {"from_config": lambda config, **options: fetch(config), "_model_mapping": known}
    monkeypatch.setattr(transformers, "AutoModelForCausalLM", type("Auto", (), auto))
    with pytest.raises(ConnectionRefusedError, match="built without any connection"):
        built(tmp_path)
    with offline():
        assert os.environ["HF_HUB_OFFLINE"] == os.environ["TRANSFORMERS_OFFLINE"] == "1"
    with socket.socket() as server:  # other code of the process goes on as it did
        server.bind(("127.0.0.1", 0))
        server.listen()
        with socket.create_connection(server.getsockname()):
            pass
