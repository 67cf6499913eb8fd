"""Modules of one's own at the command line: names, the process their code runs in, and what a file alone never does."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from memcalc import failure
from memcalc.cli.app import app
from memcalc.cli.summary import summary
from memcalc.errors import FileError, InputError, PlanError
from memcalc.estimate import Rehearsed, estimate
from memcalc.ledger import ledger
from memcalc.measurement import RankMeasurement
from memcalc.models import Model, Module, Weight
from memcalc.module import by_transformers, fullest_rank
from memcalc.named_code import check_name, confirm_code
from memcalc.plan import Plan
from memcalc.recommend import next_plan
from memcalc.search import search
from memcalc.strategies import STRATEGIES

OWN = Path(__file__).with_name("own_modules.py")
MODULE = Module(
    factory="own:tiny",
    shape=(12,),
    weights=(
        Weight("enter.weight", (32, 12)),
        Weight("layers.0.weight", (32, 32), "layers.0"),
        Weight("layers.1.weight", (32, 32), "layers.1"),
        Weight("frozen", (8, 8), trainable=False, dtype="bfloat16"),
    ),
    buffers=(Weight("mean", (32,)),),
)
TINY = Model(name="own:tiny", family="module", layers=2, features=12, classes=10, module=MODULE)
PLAN = Plan(model=TINY, micro_batch=4)
STATES = 4 * (32 * 12 + 2 * 32 * 32)

Run = Callable[..., Result]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """``run("estimate", "--module", ...)`` in an empty folder."""
    monkeypatch.chdir(tmp_path)
    return lambda *words: CliRunner().invoke(app, list(words))


def test_a_plan_of_a_module_survives_json() -> None:
    assert Plan.from_json(PLAN.to_json()) == PLAN


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weights": [7]}, "weights 0: expected an object, found 7"),
        ({"weights": [{"name": "a", "shape": [1, -2]}]}, r"a of shape \[1, -2\]"),
        ({"weights": [{"name": "a", "shape": "many"}]}, "shape is 'many', which is not a list"),
        ({"weights": [{"name": "a", "shape": [2], "dtype": "int3"}]}, "dtype int3"),
        ({"weights": [{"name": "a", "shape": [2]}] * 2}, "a weight stands twice"),
        ({"weights": [{"name": "a", "shape": [2], "trainable": False}]}, "none of its 1 weights is trained"),
        ({"factory": ""}, "needs the factory of its module; give --module"),
        ({"shape": [5]}, r"12 features are not '?\[5\]"),
    ],
)
def test_damaged_plans_are_refused_by_name(change: dict[str, object], message: str) -> None:
    data = json.loads(PLAN.to_json())
    data["model"]["module"] |= change
    with pytest.raises((FileError, PlanError), match=message):
        Plan.from_dict(data)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"dropout": 0.1}, "has what its code says"),
        ({"checkpoint_every": 2}, "one by one"),
        ({"checkpoint_every": 1, "reentrant": True}, "not reentrant"),
        ({"attention": "math"}, "the module family has none"),
        ({"micro_batch": 0}, "micro batch 0 must be at least 1"),
        ({"tokens": 8}, "a module that reads tokens needs a number of them"),
    ],
)
def test_what_says_nothing_about_a_module_is_refused(fields: dict[str, object], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        Plan(**({"model": TINY, "micro_batch": 4} | fields))  # type: ignore[arg-type]


def test_states_come_from_the_ledger_to_the_byte() -> None:
    step = ledger(dataclasses.replace(PLAN, device="cpu", optimizer_kind="for-loop"))
    assert step.at_moment("step", "parameters") == STATES + 2 * 64
    assert step.at_moment("step", "gradients") == STATES
    assert step.at_moment("step", "optimizer") == 2 * STATES + 3 * 4
    assert step.at_moment("step", "buffers") == 4 * 32


@pytest.mark.parametrize("strategy", [name for name, row in STRATEGIES.items() if row.parallel])
def test_every_strategy_divides_a_module(strategy: str) -> None:
    """Over two ranks none holds more than one alone, and those that divide parameters hold half of them and the pads."""
    trained = dataclasses.replace(MODULE, weights=MODULE.weights[:3])
    plan = Plan(
        model=dataclasses.replace(TINY, module=trained), micro_batch=4, ranks=2, strategy=strategy,
        precision="bf16-master" if STRATEGIES[strategy].masters else "fp32",
    )  # fmt: skip
    itemsize = 2 if STRATEGIES[strategy].masters else 4
    held = ledger(plan).at_moment("start", "parameters")
    whole = itemsize * (32 * 12 + 2 * 32 * 32)
    assert held >= whole // (2 if STRATEGIES[strategy].shards_parameters else 1)


def test_whole_tensors_are_not_dealt_out_evenly() -> None:
    """Three weights of 5, 4 and 4 rows over two ranks: the second has 8."""
    weights = tuple(Weight(name, (rows, 10)) for name, rows in (("a", 5), ("b", 4), ("c", 4)))
    model = dataclasses.replace(TINY, layers=0, module=dataclasses.replace(MODULE, weights=weights))
    plan = Plan(model=model, micro_batch=1, ranks=2, strategy="zero-1")
    assert fullest_rank(plan) == 1
    assert fullest_rank(dataclasses.replace(plan, strategy="ddp")) == 0


def test_without_a_rehearsal_nothing_is_said_to_fit() -> None:
    found = estimate(dataclasses.replace(PLAN, gpu="h100-80gb"))
    assert found.verdict == "unknown"
    assert any("activations are not counted" in line for line in found.assumptions)
    assert "GPUs that hold it" not in summary(estimate(PLAN), "table")
    huge = dataclasses.replace(MODULE, weights=(Weight("w", (10**11,)),))
    plan = Plan(model=dataclasses.replace(TINY, layers=0, module=huge), micro_batch=4, gpu="h100-80gb")
    assert estimate(plan).verdict == "does-not-fit"


def test_a_rehearsal_takes_the_place_of_the_ledger() -> None:
    plan = dataclasses.replace(PLAN, gpu="t4")
    step = ledger(plan)
    found = estimate(plan, rehearsal=Rehearsed(timeline=step, remarks=("so",), sure=True))
    assert found.verdict == "fits"
    assert "so" in found.assumptions
    assert found.peak.bytes == step.peak().bytes + 2 * 8_519_680  # cuBLAS has a workspace for each of two threads
    assert estimate(plan, rehearsal=Rehearsed(timeline=step, sure=False)).verdict == "unknown"


@pytest.mark.parametrize("name", ["tiny", "own:", ":tiny", "own tiny:x", "a/b:tiny", "own:tiny()", "own.py"])
def test_names_that_cannot_be_read(name: str) -> None:
    with pytest.raises(InputError, match="write it like package.file:name or path/file.py:name"):
        check_name(name)


def test_names_of_files_hold_wherever_one_stands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert check_name("models/own.py:tiny") == f"{tmp_path}/models/own.py:tiny"
    assert check_name("models.own:Outer.tiny") == "models.own:Outer.tiny"


def test_a_plan_s_code_runs_only_when_it_is_named(run: Run, tmp_path: Path) -> None:
    PLAN.save(tmp_path / "plan.json")
    for command in (["launch", "plan.json", "--out", "run"], ["rehearse", "plan.json"]):
        said = run(*command)
        assert said.exit_code == 2
        assert "the plan runs the code of own:tiny; say that it shall: " in said.output
        assert "--module own:tiny" in said.output
    assert not (tmp_path / "run").exists()
    said = run("estimate", "--plan", "plan.json")
    assert said.exit_code == 0
    assert "a module's code is run for them only when it is named" in said.output
    with pytest.raises(InputError, match="--module own:other is not what the plan runs, which is own:tiny"):
        confirm_code(PLAN, "own:other", None, "")
    assert "it shall: memcalc rehearse plan.json --module own:tiny" in run("rehearse", "plan.json").output


def test_the_file_of_a_plan_s_code_names_it_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match="is not what the plan runs, which is own:tiny"):
        confirm_code(PLAN, "own.py:tiny", None, "")
    Path("own.py").touch()
    confirm_code(PLAN, "own.py:tiny", None, "")
    with pytest.raises(InputError, match="is not what the plan runs, which is own:tiny"):
        confirm_code(PLAN, "own.py:other", None, "")


def test_a_rehearsed_module_is_not_held_against_a_ledger_that_knows_half(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    PLAN.save(tmp_path / "plan.json")
    step = ledger(PLAN)
    found = RankMeasurement(
        rank=0, instrument="a stub", moment="step", allocated_peak=step.peak().bytes, by_moment={}, parameters=0,
        gradients=0, optimizer=0, init_peak=0, timeline=step,
    )  # fmt: skip
    monkeypatch.setattr("memcalc.rehearsal.rehearse_module", lambda plan, **words: (found, (), ()))
    said = run("rehearse", "plan.json", "--module", "own:tiny")
    assert said.exit_code == 0, said.output
    assert "ledger off" not in said.output and "%" not in said.output
    assert "the ledger is left out: it knows this model's states, not its activations" in said.output


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["gpt2", "--module", "own:tiny"], "give a model or --module, not both: leave out gpt2"),
        (["--module", "own:tiny", "--hidden", "3"], "--hidden does not apply to --module, whose code says it"),
        (["--module", "own:tiny", "--seq-len", "3", "--input-shape", "3"], "both say what the module reads"),
        (["gpt2", "--wrap", "Block"], "--wrap is for a module of your own; give --module FILE:NAME"),
        (["gpt2", "--sample", "own:batch"], "--sample is for a module of your own"),
        (["--module", "tiny"], "--module 'tiny' cannot be read"),
    ],
)
def test_words_that_do_not_go_together(run: Run, words: list[str], message: str) -> None:
    said = run("estimate", *words)
    assert said.exit_code == 2
    assert message in said.output
    assert said.output.count("\n") == 1


def test_an_unknown_type_without_transformers_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    from memcalc.hf.reading import UnknownModelType

    monkeypatch.setattr("memcalc.module.importlib.util.find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"pip install transformers 'torch>=2\.6'$"):
        by_transformers(UnknownModelType("new", "config.json"))
    with pytest.raises(UnknownModelType, match="hidden_size is null"):
        by_transformers(UnknownModelType("new", "config.json", ("hidden_size",)))


def test_an_unknown_type_with_transformers_is_estimated_or_says_why_not(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "new"}')
    own = dataclasses.replace(MODULE, factory=f"{tmp_path}/config.json")
    model = dataclasses.replace(TINY, module=own)

    def refused(plan: Plan, **options: object) -> None:
        raise InputError("it does not like it")

    monkeypatch.setattr("memcalc.module.by_transformers", lambda error, **options: model)
    monkeypatch.setattr("memcalc.module.rehearse", refused)
    said = run("estimate", "config.json", "--gpu", "t4")
    assert said.exit_code == 0
    assert "activations are not counted: it cannot be rehearsed (it does not like it)" in said.output
    assert "verdict: unknown on t4" in said.output


def test_after_running_out_of_memory_no_plan_is_made_up(tmp_path: Path) -> None:
    assert next_plan(PLAN, 10**12) is None
    assert failure._next_plan(PLAN, tmp_path) == (
        "compare smaller plans of the module with memcalc estimate --module",
        None,
    )


def test_recommend_says_what_to_do_with_a_module() -> None:
    with pytest.raises(PlanError, match="compare some with memcalc estimate --module"):
        search(dataclasses.replace(PLAN, gpu="t4"))
