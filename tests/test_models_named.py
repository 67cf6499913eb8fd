"""Parameter counts of the named models, exactly."""

from __future__ import annotations

import pytest

from memcalc.models import FAMILIES, MODELS
from memcalc.plan import Plan

# The published checkpoints: number of elements over all distinct tensors.
PUBLISHED = {
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "distilgpt2": 81_912_576,
    "llama-2-7b": 6_738_415_616,
    "llama-2-13b": 13_015_864_320,
    "llama-2-70b": 68_976_648_192,
    "llama-3-8b": 8_030_261_248,
    "llama-3-70b": 70_553_706_496,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "llama-3.1-405b": 405_853_388_800,
    "tinyllama-1.1b": 1_100_048_384,
    "mistral-7b": 7_241_732_096,
    "codellama-34b": 33_743_970_304,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "phi-3-mini": 3_821_079_552,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-32b": 32_763_876_352,
    "qwen2.5-72b": 72_706_203_648,
    "qwen3-0.6b": 596_049_920,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-32b": 32_762_123_264,
    "gemma-2b": 2_506_172_416,
    "gemma-7b": 8_537_680_896,
    "gemma-2-2b": 2_614_341_888,
    "gemma-2-9b": 9_241_705_984,
    "gemma-2-27b": 27_227_128_320,
    "powerlm-3b": 3_510_819_072,
    "gpt-neox-20b": 20_554_567_680,
    "pythia-160m": 162_322_944,
    "pythia-410m": 405_334_016,
    "pythia-1b": 1_011_781_632,
    "pythia-2.8b": 2_775_208_960,
    "pythia-6.9b": 6_857_302_016,
    "pythia-12b": 11_846_072_320,
    "gpt-j-6b": 6_050_882_784,
    "phi-1.5": 1_418_270_720,
    "phi-2": 2_779_683_840,
    "falcon-7b": 6_921_720_704,
    "falcon-40b": 41_303_293_952,
    "opt-125m": 125_239_296,
    "opt-1.3b": 1_315_758_080,
    "opt-6.7b": 6_658_473_984,
    "opt-13b": 12_853_473_280,
    "bloom-560m": 559_214_592,
    "bloom-7b1": 7_069_016_064,
    "mpt-7b": 6_649_286_656,
    "starcoder": 15_517_456_384,
    "qwen3-30b-a3b": 30_532_122_624,
    "t5-3b": 2_851_598_336,
    "mixtral-8x7b": 46_702_792_704,
    "mixtral-8x22b": 140_620_634_112,
    "resnet-18": 11_689_512,
    "resnet-34": 21_797_672,
    "resnet-50": 25_557_032,
    "resnet-101": 44_549_160,
    "resnet-152": 60_192_808,
    "t5-small": 60_506_624,
    "t5-base": 222_903_552,
    "t5-large": 737_668_096,
    "flan-t5-base": 247_577_856,
    "flan-t5-large": 783_150_080,
    "flan-t5-xl": 2_849_757_184,
    "flan-t5-xxl": 11_135_332_352,
    "bert-base": 109_514_298,  # BertForMaskedLM; without the head and with a pooler it is 109,482,240
    "bert-large": 335_174_458,
    "vit-tiny-16": 5_717_416,
    "vit-small-16": 22_050_664,
    "vit-base-16": 86_567_656,
    "vit-large-16": 304_326_632,
    "vit-huge-14": 632_045_800,
    "bloom-176b": 176_247_271_424,  # BigScience 2022, config of bigscience/bloom
}
OURS = {
    "t5-tiny",
    "resnet-tiny",
    "moe-tiny",
    "vit-tiny",
    "bert-tiny",
    "gpt2-small-text",
    "gpt2-tiny",
    "llama-tiny",
    "mlp",
    "mlp-tiny",
}
BY_FORMULA = {"megatron-1.3b", "megatron-22b", "megatron-175b", "megatron-530b", "megatron-1t"}


def parameters(name: str) -> int:
    model = MODELS[name]
    return sum(weight.numel for weight in FAMILIES[model.family].weights(model))


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_counts(name: str) -> None:
    assert parameters(name) == PUBLISHED[name]


def test_every_model_is_either_published_or_one_of_ours() -> None:
    assert set(MODELS) == set(PUBLISHED) | OURS | BY_FORMULA


@pytest.mark.parametrize("name", sorted(BY_FORMULA))
def test_megatrons_models_have_as_many_parameters_as_their_paper_says(name: str) -> None:
    """Narayanan et al. 2021, equation 2, which leaves out the last LayerNorm."""
    layers, h, rows = MODELS[name].layers, MODELS[name].hidden, MODELS[name].vocab + MODELS[name].context
    assert parameters(name) == 12 * layers * h**2 + 13 * layers * h + rows * h + 2 * h


@pytest.mark.parametrize("name", sorted(OURS))
def test_ours_train_on_two_cores(name: str) -> None:
    assert parameters(name) < 6_000_000


def test_the_mlp_is_layers_of_equal_width_and_a_classifier() -> None:
    layer = 1024 * 1024 + 1024
    assert parameters("mlp") == 5 * layer + 10 * 1024 + 10


@pytest.mark.parametrize("name", list(MODELS))
def test_every_named_model_makes_a_plan_at_its_longest(name: str) -> None:
    model = MODELS[name]
    plan = Plan(model=model, tokens=model.context, micro_batch=1)
    assert Plan.from_json(plan.to_json()) == plan


@pytest.mark.parametrize("name", list(MODELS))
def test_weights_have_names_of_their_own(name: str) -> None:
    model = MODELS[name]
    names = [weight.name for weight in FAMILIES[model.family].weights(model)]
    assert len(set(names)) == len(names)
    assert {weight.group for weight in FAMILIES[model.family].weights(model)} >= {"head"}
