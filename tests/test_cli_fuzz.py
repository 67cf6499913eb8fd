"""Anything may be typed and any bytes may be in a file: the answer is a result or one line, never a traceback."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import plans
import pytest
from click.testing import CliRunner, Result
from hypothesis import example, given
from hypothesis import strategies as st

from memcalc.cli.app import app
from memcalc.hardware import GPUS
from memcalc.models import MODELS
from memcalc.optimizers import KINDS, OPTIMIZERS
from memcalc.plan import Plan
from memcalc.precision import PRECISIONS
from memcalc.sound import ATTENTIONS, DEVICES
from memcalc.strategies import STRATEGIES
from memcalc.tables import FORMATS

NUMBERS = ["1", "2", "4", "7", "64", "1000", "0", "-1", "1e3", "1_000", "nan", "", " 8 ", "٣", "9" * 50, "10**12"]
COUNTS = ["1e9", "7b", "124M", "1_000", "-1", "nan", "1e400", "1e18", "1e17", "", "b", "0.5", "1e-400", "1" * 60]
TINY = [name for name in MODELS if "tiny" in name or name == "mlp"]

VALUES: dict[str, Sequence[str]] = {
    "--params": COUNTS,
    "--layers": ["1", "3", "0", "11", "1000000000000", "x"],
    **dict.fromkeys(
        ["--hidden", "--heads", "--kv-heads", "--ffn", "--vocab", "--context", "--classes", "--batch-size", "--micro-batch",
         "--accumulation", "--seq-len", "--tokens", "--gpus", "--nodes", "--bucket-mb"],
        [*NUMBERS, "1000000000000"],
    ),
    "--input-shape": ["224x224x3", "3x", "x", "1024", "0x3", "1e3", "9999999x9999999"],
    "--activation-per-layer": ["64KB", "1GiB", "64", "-1KB", "KB", "1e30GB"],
    "--attention": [*ATTENTIONS, "flush"],
    "--dropout": ["0", "0.1", "1", "-0.1", "nan", "inf", "half"],
    "--precision": [*PRECISIONS, "fp8", ""],
    "--optimizer": [*OPTIMIZERS, "adam-w"],
    "--optimizer-kind": [*KINDS, "each"],
    "--checkpointing": ["none", "full", "every-2", "every-0", "every--1", "every-99999999999", "all"],
    "--strategy": [*STRATEGIES, "FULL_SHARD", "zero-9"],
    "--gpu": [*GPUS, "h1000"],
    "--device": [*DEVICES, "tpu"],
    "--torch": ["2.6", "2.13.0+cpu", "1.0", "two", "²."],
    "--format": [*FORMATS, "html"],
    "--plan": ["missing.json", "/", "", "\0"],
}  # fmt: skip
FLAGS = [
    "--adam",
    "--reentrant",
    "--keep-gradients",
    "--bucket-views",
    "--static-graph",
    "--explain",
    "--check",
    "--nonsense",
    "-h",
    "--",
]


@st.composite
def words(draw: st.DrawFn) -> list[str]:
    """A command line of names, options and values; each is right or wrong on its own."""
    typed = draw(st.sampled_from([[name] for name in TINY] + [[], ["gtp2"], ["mlp", "mlp"]]))
    for option in draw(st.lists(st.sampled_from(sorted(VALUES)), max_size=5, unique=True)):
        strange = draw(st.integers(0, 11)) == 11
        typed = [*typed, option, draw(st.text(max_size=8) if strange else st.sampled_from(VALUES[option]))]
    return typed + draw(st.lists(st.sampled_from(FLAGS), max_size=2))


def invoke(*words: str) -> Result:
    """Run a command and check what holds for every command line there is."""
    result = CliRunner().invoke(app, list(words))
    assert result.exit_code in (0, 1, 2), (words, result.stderr)
    if result.exit_code == 2:
        assert result.stdout == ""
        assert len(result.stderr.splitlines()) == 1
        assert result.stderr.startswith("memcalc: ")
        assert "internal error" not in result.stderr
    else:
        assert result.stderr == ""
        assert result.stdout.strip()
    return result


@given(words())
@example(["--params", "1e17"])
@example(["--params", "1e9", "--input-shape", "1000000", "--batch-size", "1000000000000"])
def test_any_command_line_gives_a_result_or_one_line(typed: list[str]) -> None:
    result = invoke("estimate", *typed)
    if result.exit_code == 1:
        assert "--check" in typed


@given(st.lists(st.text(max_size=12), min_size=1, max_size=4))
def test_any_words_give_a_result_or_one_line(typed: list[str]) -> None:
    invoke(*typed)


def estimate_file(content: bytes) -> Result:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "plan.json"
        path.write_bytes(content)
        result = invoke("estimate", "--plan", str(path), "--format", "json")
        assert [path.name for path in Path(folder).iterdir()] == ["plan.json"]
    return result


@given(st.binary(max_size=200))
@example(b'{"memcalc_plan": 1}')
@example(b"\xef\xbb\xbf{}")
@example(b'{"memcalc_plan": 1e999}')
@example(b'{"memcalc_plan": ' + b"9" * 5000 + b"}")
def test_any_bytes_as_a_plan_file_are_refused_in_one_line(content: bytes) -> None:
    assert estimate_file(content).exit_code == 2


SCALARS = (
    st.none() | st.booleans() | st.integers(-2, 40) | st.sampled_from([10**6, 10**12, 10**18, 10**30, -(10**18)])
    | st.floats() | st.text(max_size=5)
    | st.sampled_from([*STRATEGIES, *PRECISIONS, *OPTIMIZERS, *KINDS, *ATTENTIONS, *DEVICES, "gpt2", "llama", "mlp", "size"])
)  # fmt: skip


@st.composite
def mutated(draw: st.DrawFn) -> dict[str, Any]:
    """A sound plan as JSON with one to three values changed, dropped or added, also inside the model."""
    fields: dict[str, Any] = json.loads(draw(plans.plans(max_ranks=4)).to_json())
    for _ in range(draw(st.integers(1, 3))):
        inside = fields["model"] if draw(st.booleans()) and isinstance(fields.get("model"), dict) else fields
        key = draw(st.sampled_from(sorted(inside)) | st.text(max_size=4)) if inside else draw(st.text(max_size=4))
        if draw(st.integers(0, 4)):
            inside[key] = draw(SCALARS)
        else:
            inside.pop(key, None)
    return fields


@given(mutated())
def test_a_mutated_plan_is_estimated_or_refused_in_one_line(fields: dict[str, Any]) -> None:
    result = estimate_file(json.dumps(fields).encode())
    if result.exit_code == 0:
        found = json.loads(result.output)
        assert Plan.from_dict({"memcalc_plan": 1} | found["plan"]) == Plan.from_dict(fields)
        assert sum(found["allocated"]["by_category"].values()) == found["allocated"]["peak_bytes"] >= 0
        assert max(found["allocated"]["by_moment"].values()) == found["allocated"]["peak_bytes"]


@given(plans.plans(max_ranks=4))
def test_every_sound_plan_is_explained_to_the_byte(plan: Plan) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "plan.json"
        plan.save(path)
        lines = json.loads(invoke("estimate", "--plan", str(path), "--explain", "--format", "json").output)
        found = json.loads(invoke("estimate", "--plan", str(path), "--format", "json").output)
    assert sum(line["bytes"] for line in lines) == found["allocated"]["peak_bytes"]


@pytest.mark.parametrize("name", MODELS)
def test_every_named_model_is_estimated(name: str) -> None:
    assert invoke("estimate", name).exit_code == 0
