"""Encoders, models with two towers and their odd keys, read from a config.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from memcalc.errors import MemcalcError
from memcalc.hf.reading import of_config, read_config
from memcalc.ledger import ledger
from memcalc.models.llava import image_tokens, parts
from memcalc.plan import Plan

CONFIGS = Path(__file__).parent / "configs"
# Public configs of Hugging Face repositories, what says their shape.
MBART_DECODER = {
    "model_type": "mbart", "architectures": ["MBartForCausalLM"], "vocab_size": 50000, "d_model": 384,
    "decoder_layers": 2, "decoder_attention_heads": 16, "decoder_ffn_dim": 1536, "max_position_embeddings": 1024,
}  # fmt: skip
FLAN_T5_BASE = {  # google/flan-t5-base
    "model_type": "t5", "architectures": ["T5ForConditionalGeneration"], "d_model": 768, "d_kv": 64, "d_ff": 2048,
    "num_layers": 12, "num_decoder_layers": 12, "num_heads": 12, "vocab_size": 32128, "feed_forward_proj": "gated-gelu",
    "tie_word_embeddings": False,
}  # fmt: skip


def of(name: str, **changes: Any) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((CONFIGS / f"{name}.json").read_text(encoding="utf-8"))
    return {**found, **changes}


def count(config: dict[str, Any]) -> int:
    return of_config(config, "config.json", "read").parameters


@pytest.mark.parametrize(
    ("name", "architecture", "parameters"),
    [
        # The Hub's counts of bert-base-uncased by class, and Hugging Face's of bert-large with two labels.
        ("bert-base", "BertModel", 109_482_240),
        ("bert-base", "BertForMaskedLM", 109_514_298),
        ("bert-base", "BertForPreTraining", 110_106_428),
        ("bert-large", "BertForSequenceClassification", 335_143_938),
        ("vit-base", "ViTForImageClassification", 86_567_656),
    ],
)
def test_the_architecture_decides_what_is_counted(name: str, architecture: str, parameters: int) -> None:
    assert count(of(name, architectures=[architecture])) == parameters


def test_llava_is_shown_by_its_parts() -> None:
    model = read_config(CONFIGS / "llava-1.5-7b.json").model
    assert parts(model) == {"text": 6_738_939_904, "vision": 303_507_456, "projector": 20_979_712}
    assert any("text 6,738,939,904, vision 303,507,456, projector 20,979,712" in note for note in model.notes)
    assert image_tokens(model) == 576  # (336 / 14)², Liu et al. 2023
    assert any("hidden_size 4096" in note and note.startswith("text_config: ") for note in model.notes)


@pytest.mark.parametrize(("tied", "parameters"), [(True, 24_328_704), (False, 43_528_704)])
def test_c31_a_tied_head_is_counted_once(tied: bool, parameters: int) -> None:
    """torchinfo pull request 397: mBART's decoder with its head tied to the token table, and without."""
    assert count({**MBART_DECODER, "tie_word_embeddings": tied}) == parameters


def test_t5_1_1_has_a_head_of_its_own() -> None:
    """Hugging Face's Hub counts 247,577,856 parameters in google/flan-t5-base."""
    read = of_config(FLAN_T5_BASE, "config.json", "flan-t5-base")
    assert read.parameters == 247_577_856
    assert ("lm_head.weight", (32128, 768)) in read.weights()
    assert any("parts them when the weights are loaded" in note for note in read.model.notes)
    assert (
        count({key: value for key, value in FLAN_T5_BASE.items() if key != "tie_word_embeddings"})
        == 247_577_856 - 32128 * 768
    )


def test_t5_takes_sequences_of_any_length() -> None:
    model = of_config(FLAN_T5_BASE, "config.json", "flan-t5-base").model
    short, long = (ledger(Plan(model=model, tokens=tokens, micro_batch=1)).peak().bytes for tokens in (512, 2048))
    assert long > short


@pytest.mark.parametrize(
    ("labels", "classes"),
    [({}, 2), ({"num_labels": 7}, 7), ({"id2label": {"0": "a", "1": "b", "2": "c"}}, 3), ({"id2label": None}, 2),
     ({"id2label": {"0": "a", "1": "b"}, "num_labels": 2}, 2)],
)  # fmt: skip
def test_classes_are_the_labels(labels: dict[str, Any], classes: int) -> None:
    config = of("bert-base", architectures=["BertForSequenceClassification"], **labels)
    assert of_config(config, "config.json", "read").model.classes == classes


def llava(**changes: Any) -> dict[str, Any]:
    return of("llava-1.5-7b", **changes)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (of("vit-base", id2label=["a"]), "config.json: id2label is .* not an object"),
        (of("vit-base", id2label={}), "config.json: id2label is .* not an object"),
        (of("vit-base", num_labels=3), "num_labels 3 and the 1000 names in id2label contradict each other"),
        (of("bert-base", architectures=["BertForTokenClassification"], num_labels="3"), "num_labels is '3'"),
        (of("bert-base", tie_word_embeddings=False), "config.json: tie_word_embeddings is false"),
        (of("bert-base", position_embedding_type="relative_key"), "position_embedding_type is relative_key"),
        (of("bert-base", add_cross_attention=True), "add_cross_attention is true"),
        (of("vit-base", qkv_bias=False), "qkv_bias is false"),
        (of("vit-base", image_size=[224, 224]), "image_size is .* not a whole number"),
        (llava(text_config=[1]), "config.json: text_config is .* not an object"),
        (llava(text_config={"model_type": "bloom"}), "over the family decoder is not known"),
        (llava(text_config={"hidden_size": -4}), "config.json: text_config: hidden_size -4 must be at least 1"),
        (
            llava(vision_config={"model_type": "nothing"}),
            "config.json: vision_config: model_type 'nothing' is not known",
        ),
        (llava(vision_feature_layer=99), "vision_feature_layer 99 is not the output of one of 24 layers"),
        (llava(vision_feature_layer=[-2, -5]), "vision_feature_layer is .* not a whole number"),
        (llava(vision_feature_select_strategy="all"), "neither default nor full"),
        (llava(projector_hidden_act="relu"), "only true and gelu are known"),
        ({**FLAN_T5_BASE, "feed_forward_proj": "gated-gated-gelu"}, "feed_forward_proj gated-gated-gelu is not known"),
        ({**FLAN_T5_BASE, "feed_forward_proj": "silu"}, "without a gate only relu is known"),
    ],
)
def test_what_cannot_be_read_is_refused_in_a_line(config: dict[str, Any], said: str) -> None:
    with pytest.raises(MemcalcError, match=said) as refused:
        of_config(config, "config.json", "read")
    assert "\n" not in str(refused.value)


def test_a_text_config_of_itself_is_refused() -> None:
    config = llava()
    for _ in range(200):
        config = {**llava(), "text_config": config}
    with pytest.raises(MemcalcError, match="over the family llava is not known"):
        of_config(config, "config.json", "read")


def test_an_image_takes_places_of_the_sequence() -> None:
    model = read_config(CONFIGS / "llava-1.5-7b.json").model
    with pytest.raises(MemcalcError, match="one image alone takes 576"):
        Plan(model=model, tokens=500, micro_batch=1)
    plan = Plan(model=model, tokens=1024, micro_batch=1, precision="bf16", checkpoint_every=1)
    inputs = ledger(plan).at_moment("forward", "inputs")
    assert inputs == 2 * 1024 * 8 + 3 * 336 * 336 * 2


def test_what_nothing_reads_has_no_gradient() -> None:
    """vision_feature_layer -2 leaves out the last block and the norm after it: 16 and 2 tensors."""
    plan = Plan(model=read_config(CONFIGS / "llava-1.5-7b.json").model, tokens=1024, micro_batch=1)
    still = [weight.name for weight in plan.weights if not weight.trainable]
    assert len(still) == 18
    assert all(name.startswith(("vision.layers.23.", "vision.post_layernorm.")) for name in still)
