"""Public reports about modules and how they are wrapped: docs/validation/cases.md lists them by number."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch")

from memcalc.errors import InputError
from memcalc.plan import Plan
from trainers.blocks import candidates, unit_names
from trainers.factories import build_on_meta
from trainers.module import describe
from trainers.rehearsal import rehearse

TESTS = Path(__file__).parent


def test_c10_a_linear_layer_of_one_s_own() -> None:
    """huggingface/blog train_memory.md: Linear(10000, 50000), 2.0002 GB; input 0.2 GB, output 1 GB, built by nobody here."""
    model = describe(f"{TESTS / 'own_modules.py'}:large", sample="", wrap="", shape=(10_000,), tokens=0)
    found = rehearse(Plan(model=model, micro_batch=5000, device="cpu", optimizer_kind="for-loop"))
    assert found.timeline is not None
    assert found.parameters == 2_000_200_000 == 4 * 500_050_000
    assert found.timeline.at_moment("forward", "inputs") >= 200_000_000
    assert found.timeline.at_moment("forward", "activations") == 1_000_000_000


def test_c32_parameters_of_modules_that_have_modules() -> None:
    """TylerYep/torchinfo issues 366 and 28: 50 parameters and not 30, with those that no leaf module owns."""
    model = describe(f"{TESTS / 'own_modules.py'}:Net", sample="", wrap="", shape=(3,), tokens=0)
    assert sum(weight.numel for weight in model.module.weights) == 50
    assert rehearse(Plan(model=model, micro_batch=1)).parameters == 200


def test_c47_a_class_that_is_not_in_the_model_is_refused_with_those_that_are() -> None:
    """huggingface/accelerate issue 1943: GPT2Block was named for a BERT, and nothing was wrapped."""
    vit = build_on_meta(f"{TESTS / 'own_pictures.py'}:VisionTransformer")
    with pytest.raises(InputError, match=r"--wrap GPT2Block: no module is of that class; .*EncoderBlock \(12\)"):
        unit_names(vit, "GPT2Block")
    assert len(unit_names(vit, "EncoderBlock")) == candidates(vit)["EncoderBlock"] == 12
