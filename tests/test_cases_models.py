"""Public reports about parameter counts: docs/validation/cases.md lists them by number."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from memcalc.cli.app import app
from memcalc.ledger import ledger
from memcalc.models import MODELS
from tests.figures import parameters, sized, trained


def test_c30_factors_that_are_no_whole_number_and_three_matrices() -> None:
    """EleutherAI/cookbook issue 36: two MLP matrices were assumed, and a whole factor; Llama-2-70B's is 3.5."""
    model = MODELS["llama-2-70b"]
    assert model.ffn / model.hidden == 3.5
    assert parameters(trained(model, tokens=8)) == 68_976_648_192


def test_c30_qwen_1_5_72b_has_biases_and_three_matrices() -> None:
    """The same issue: 56.19e9 were said of 72,287,920,128."""
    model = dataclasses.replace(
        MODELS["qwen2.5-72b"], name="qwen1.5-72b", kv_heads=64, ffn=24576, vocab=152064, context=4096
    )
    assert model.biases == ("qkv",)
    assert parameters(trained(model, tokens=8)) == 72_287_920_128


def test_every_case_of_the_page_has_a_test_and_no_other() -> None:
    here = Path(__file__).parent
    page = (here.parent / "docs" / "validation" / "cases.md").read_text(encoding="utf-8")
    tests = "\n".join(path.read_text(encoding="utf-8") for path in here.glob("test_cases_*.py"))
    listed = re.findall(r"^\| C(\d\d) \|", page, re.MULTILINE)
    assert listed == sorted(set(re.findall(r"^def test_c(\d\d)_", tests, re.MULTILINE)))


@pytest.mark.parametrize(
    ("name", "count"), [("t5-base", 222_903_552), ("gpt2", 124_439_808), ("gemma-2b", 2_506_172_416)]
)
def test_c31_shared_tensors_are_counted_once(name: str, count: int) -> None:
    """TylerYep/torchinfo issues 377 and 322, huggingface/accelerate issue 3308."""
    assert parameters(trained(name, tokens=8)) == count


def test_c31_a_tied_head_saves_the_embedding() -> None:
    """TylerYep/torchinfo pull request 397, a decoder of vocabulary 50,000 and width 384: 19,200,000 parameters."""
    model = dataclasses.replace(MODELS["t5-small"], vocab=50_000, hidden=384, heads=16, kv_heads=16, ffn=1536)
    tied, untied = (parameters(trained(dataclasses.replace(model, tied=tied), tokens=8)) for tied in (True, False))
    assert untied - tied == 50_000 * 384 == 19_200_000


def test_c40_a_size_alone_is_printed_as_it_was_taken_and_marked_rough() -> None:
    """RahulSChand/gpu_poor issue 7, 0xBakeer/inference-atlas pull request 153: 16B typed and the model's file gave different
    memory; what is called 35B has 35.952B parameters."""
    result = CliRunner().invoke(app, ["estimate", "--params", "8b", "--gpu", "b200"])
    assert "8,000,000,000 parameters, fp32, adamw" in result.output
    assert "verdict: unknown on b200" in result.output and "activations are not counted" in result.output
    states = ("parameters", "gradients", "optimizer")
    for model, count in ((sized(8_000_000_000), 8_000_000_000), (MODELS["llama-3-8b"], 8_030_261_248)):
        found = ledger(trained(model, tokens=8 * bool(model.context)))
        assert sum(found.at_moment("step", name) for name in states) == 16 * count
