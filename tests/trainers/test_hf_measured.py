"""Whole steps of transformers' own modules under the CPU allocator's instrument, against the ledger of their config.

Encoders, encoders with a decoder, and models that see: the peak of the step, and what is alive when backward begins.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from memcalc.frozen import Frozen
from memcalc.hf.reading import of_config
from memcalc.implementation import Implementation
from memcalc.ledger import ledger
from memcalc.measurement import RankMeasurement
from memcalc.plan import Plan

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", minversion="5")

from tests.trainers.metered import metered  # noqa: E402 - needs torch

Config = dict[str, Any]
ROWS = 4
BERT: Config = {
    "vocab_size": 500, "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 256,
    "max_position_embeddings": 128, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
}  # fmt: skip
DISTILBERT = {
    "vocab_size": 500, "dim": 64, "n_layers": 3, "n_heads": 4, "hidden_dim": 256, "max_position_embeddings": 128,
    "dropout": 0.0, "attention_dropout": 0.0,
}  # fmt: skip
SEES: Config = {
    "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 256, "image_size": 64, "patch_size": 8,
}  # fmt: skip
T5 = {
    "d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4, "vocab_size": 300, "dropout_rate": 0.0,
    "decoder_start_token_id": 0,
}  # fmt: skip
SIDES = {
    "d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
    "encoder_ffn_dim": 128, "decoder_ffn_dim": 96, "vocab_size": 300, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2, "decoder_start_token_id": 1, "dropout": 0.0,
}  # fmt: skip
WHISPER = {
    **SIDES,
    "num_mel_bins": 16,
    "max_source_positions": 100,
    "max_target_positions": 64,
    "begin_suppress_tokens": [1],
}
MBART = {**SIDES, "max_position_embeddings": 64, "forced_eos_token_id": 2}
LLAVA = {
    "text_config": {
        "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4,
        "intermediate_size": 128, "vocab_size": 300, "max_position_embeddings": 256,
    },
    "vision_config": {**SEES, "model_type": "clip_vision_model", "hidden_size": 48, "intermediate_size": 96},
    "image_token_index": 299, "image_seq_length": 64,
}  # fmt: skip


DECODES: Config = {
    "vocab_size": 300, "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 96, "max_position_embeddings": 512, "sliding_window": 100,
}  # fmt: skip


def words(tokens: int, most: int = 300) -> Any:
    """Tokens that are no padding, which RoBERTa's positions look for."""
    return torch.randint(3, most, (ROWS, tokens))


def images() -> Any:
    return torch.randn(ROWS, 3, 64, 64)


def seen_and_read() -> Config:
    ids = words(128, 290)
    ids[:, 10:74] = 299
    return {"input_ids": ids, "labels": ids, "pixel_values": images(), "use_cache": False}


# Inputs of each, and the length of the sequence; the class that is built is the one its config is counted as.
INPUTS: dict[str, tuple[Callable[[], Config], int]] = {
    "MaskedLM": (lambda: {"input_ids": words(120), "labels": words(120)}, 120),
    "SequenceClassification": (lambda: {"input_ids": words(120), "labels": torch.randint(2, (ROWS,))}, 120),
    "TokenClassification": (lambda: {"input_ids": words(120), "labels": torch.randint(2, (ROWS, 120))}, 120),
    "PreTraining": (lambda: {"input_ids": words(120), "labels": words(120), "next_sentence_label": torch.randint(2, (ROWS,))}, 120),
    "ImageClassification": (lambda: {"pixel_values": images(), "labels": torch.randint(10, (ROWS,))}, 0),
    "t5": (lambda: {"input_ids": words(64), "labels": words(64), "use_cache": False}, 64),
    "whisper": (lambda: {"input_features": torch.randn(ROWS, 16, 200), "labels": words(64), "use_cache": False}, 64),
    "llava": (seen_and_read, 128),
    "window": (lambda: {"input_ids": words(256), "labels": words(256), "use_cache": False}, 256),
}  # fmt: skip
CASES: dict[str, tuple[Config, str, str, dict[str, Any]]] = {
    "bert": ({**BERT, "model_type": "bert"}, "MaskedLM", "sdpa", {}),
    "bert with dropout": ({**BERT, "model_type": "bert", "hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1}, "MaskedLM", "eager", {"dropout": 0.1}),
    "bert with gelu_new": ({**BERT, "model_type": "bert", "hidden_act": "gelu_new"}, "MaskedLM", "sdpa", {}),
    "bert that classifies": ({**BERT, "model_type": "bert", "architectures": ["BertForSequenceClassification"]}, "SequenceClassification", "sdpa", {}),
    "bert of tokens": ({**BERT, "model_type": "bert", "architectures": ["BertForTokenClassification"]}, "TokenClassification", "sdpa", {}),
    "bert of pretraining": ({**BERT, "model_type": "bert", "architectures": ["BertForPreTraining"]}, "PreTraining", "sdpa", {}),
    "roberta": ({**BERT, "model_type": "roberta", "type_vocab_size": 1}, "MaskedLM", "eager", {}),
    "electra": ({**BERT, "model_type": "electra", "embedding_size": 32, "architectures": ["ElectraForMaskedLM"]}, "MaskedLM", "sdpa", {}),
    "distilbert": ({**DISTILBERT, "model_type": "distilbert"}, "MaskedLM", "sdpa", {}),
    "vit": ({**SEES, "model_type": "vit", "num_labels": 10}, "ImageClassification", "sdpa", {}),
    "vit written out": ({**SEES, "model_type": "vit", "num_labels": 10}, "ImageClassification", "eager", {}),
    "t5": ({**T5, "model_type": "t5"}, "t5", "eager", {}),
    "t5 with a gate": ({**T5, "model_type": "t5", "feed_forward_proj": "gated-gelu"}, "t5", "eager", {}),
    "whisper": ({**WHISPER, "model_type": "whisper"}, "whisper", "sdpa", {}),
    "whisper written out": ({**WHISPER, "model_type": "whisper"}, "whisper", "eager", {}),
    "mbart": ({**MBART, "model_type": "mbart", "dropout": 0.1}, "t5", "sdpa", {"dropout": 0.1}),
    "bart": ({**MBART, "model_type": "bart"}, "t5", "eager", {}),
    "llava": ({**LLAVA, "model_type": "llava"}, "llava", "sdpa", {}),
    "llava with a frozen tower": ({**LLAVA, "model_type": "llava"}, "llava", "sdpa", {"frozen": Frozen(parts="vision")}),
    "mistral past its window": ({**DECODES, "model_type": "mistral"}, "window", "sdpa", {}),
    "mistral as long as its window": ({**DECODES, "model_type": "mistral", "sliding_window": 256}, "window", "sdpa", {}),
    "mistral within its window": ({**DECODES, "model_type": "mistral", "sliding_window": 257}, "window", "sdpa", {}),
    "starcoder2 past its window": ({**DECODES, "model_type": "starcoder2"}, "window", "sdpa", {}),
    "llava whose projector alone is trained": (
        {**LLAVA, "model_type": "llava"}, "llava", "sdpa",
        {"frozen": Frozen(parts="vision,embed_tokens,layers,norm,lm_head")},
    ),
}  # fmt: skip


# Where transformers has what is frozen.
MODULES = {"vision": "model.vision_tower", "embed_tokens": "model.language_model", "lm_head": "lm_head"}


def measured(
    config: Config, architecture: str, attention: str, inputs: Callable[[], Config], frozen: Frozen
) -> RankMeasurement:
    """Two steps; the loss is taken inside the module."""
    torch.manual_seed(0)
    built = transformers.CONFIG_MAPPING[config["model_type"]].from_dict(dict(config))
    built._attn_implementation = attention

    def build() -> Any:
        module = getattr(transformers, architecture)(built).train()
        for part in set(frozen.names) & MODULES.keys():
            module.get_submodule(MODULES[part]).requires_grad_(False)
        return module

    return metered(build, inputs, lambda module, batch: module(**batch), lambda output, _: output.loss)


@pytest.mark.parametrize("name", CASES)
def test_the_ledger_of_a_config_agrees_with_a_real_step(name: str) -> None:
    config, kind, attention, fields = CASES[name]
    inputs, tokens = INPUTS[kind]
    read = of_config(config, "config.json", name)
    fields = dict(fields)
    fields.setdefault("attention", "eager" if attention == "eager" and read.model.family != "t5" else "auto")
    plan = Plan(
        model=read.model, tokens=tokens, micro_batch=ROWS, device="cpu", optimizer_kind="for-loop",
        implementation=Implementation.suited(read.model, read.written), **fields,
    )  # fmt: skip
    real, ours = measured(config, read.head, attention, inputs, plan.frozen), ledger(plan).peak()
    assert real.parameters == 4 * read.parameters
    assert ours.bytes == pytest.approx(real.allocated_peak, rel=0.01)
    states = ledger(plan).at_moment("backward", "parameters") + ledger(plan).at_moment("backward", "optimizer")
    # What is above the states, so that these cannot hide a difference.
    assert ours.by_moment["backward"] - states == pytest.approx(real.by_moment["backward"] - states, rel=0.01)
