"""The matrix, how a run is judged, and what validate says; runs are made by hand, not by torch."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import pytest
from click.testing import CliRunner

from memcalc.cli.app import app
from memcalc.compare import STATES, exact
from memcalc.errors import FileError
from memcalc.estimate import estimate
from memcalc.measurement import Measurement, RankMeasurement
from memcalc.models import FAMILIES
from memcalc.plan import Plan
from memcalc.validate import Result, judge, loss_problems, matrix, validate

validate_module = import_module("memcalc.validate")

LOSSES = [2.0, 1.5, 1.25]


@pytest.fixture(autouse=True)
def without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(validate_module, "require_torch", lambda: None)
    monkeypatch.setattr(validate_module, "installed_torch", lambda: None)


def write(folder: Path, plan: Plan, *, factor: float = 1.0, losses: list[float] = LOSSES, extra: int = 0) -> None:
    """A finished run whose peak is ``factor`` times the estimate and whose optimizer holds ``extra`` bytes more."""
    estimated = estimate(plan)
    states = {category: exact(plan, category) for category in STATES}
    (folder / "measured").mkdir(parents=True)
    for number in range(plan.ranks):
        RankMeasurement(
            rank=number,
            instrument="test scales",
            moment=estimated.peak.moment,
            allocated_peak=round(estimated.peak.bytes * factor),
            by_moment=dict(estimated.peak.by_moment),
            **states | {"optimizer": states["optimizer"] + extra},
        ).save(folder / "measured" / f"rank-{number}.json")
    record = Measurement(plan=plan, status="done", device="cpu", versions={}, losses=list(losses))
    record.save(folder / "run.json")


# -- the matrix ------------------------------------------------------------------------------------


@pytest.mark.parametrize("quick", [True, False])
def test_the_matrix_covers_what_it_claims(quick: bool) -> None:
    plans = matrix(quick=quick)
    assert len(plans) >= 30
    wanted = {
        (family, strategy, ranks)
        for family in ("mlp", "gpt2", "llama")
        for strategy, worlds in (
            ("single", (1,)),
            *((name, (2, 4)) for name in ("ddp", "fsdp-full-shard", "fsdp-shard-grad-op", "zero-1")),
        )
        for ranks in worlds
    }
    for field, values in (("precision", ("fp32", "bf16")), ("checkpoint_every", (0, 1))):
        found = {(plan.model.family, plan.strategy, plan.ranks, getattr(plan, field)) for plan in plans.values()}
        for value in values:
            most = wanted if value in ("fp32", 0) or not quick else {case for case in wanted if case[2] < 4}
            assert {(*case, value) for case in most} <= found


def test_a_models_plans_share_one_global_batch() -> None:
    batches: dict[str, set[int]] = {}
    for plan in matrix(quick=False).values():
        batches.setdefault(plan.model.name, set()).add(plan.global_batch)
    assert all(len(sizes) == 1 for sizes in batches.values())


def test_filters_keep_what_they_name() -> None:
    plans = matrix(quick=False, models=["gpt2-tiny"], strategies=["ddp"], worlds=[2])
    assert len(plans) == 4
    assert {(plan.model.name, plan.strategy, plan.ranks) for plan in plans.values()} == {("gpt2-tiny", "ddp", 2)}
    assert matrix(quick=True, strategies=["single"], worlds=[2]) == {}


# -- one run ---------------------------------------------------------------------------------------

PLAN = matrix(quick=True)["gpt2-tiny.ddp.2.fp32.none"]


@pytest.mark.parametrize(
    ("factor", "extra", "problem"),
    [
        (1.0, 0, None),
        (1.009, 0, None),
        (0.991, 0, None),
        (1.02, 0, "peak off by more than 1 %"),
        (0.98, 0, "peak off by more than 1 %"),
        (1.0, 4, "parameters, gradients or optimizer states not equal"),
        (1.0, -4, "parameters, gradients or optimizer states not equal"),
    ],
)
def test_a_run_is_judged_by_its_peak_and_its_states(
    tmp_path: Path, factor: float, extra: int, problem: str | None
) -> None:
    write(tmp_path / "run", PLAN, factor=factor, extra=extra)
    assert judge("name", PLAN, tmp_path / "run", 1.0).problem == problem


def test_a_run_without_a_measurement_is_a_problem(tmp_path: Path) -> None:
    assert "holds no run" in str(judge("name", PLAN, tmp_path, 1.0).problem)


def results(tmp_path: Path, **losses: list[float]) -> list[Result]:
    found = []
    for name, values in losses.items():
        plan = matrix(quick=True)[name.replace("__", ".").replace("_", "-")]
        write(tmp_path / name, plan, losses=values)
        found.append(judge(name, plan, tmp_path / name, 1.0))
    return found


def test_losses_of_one_model_agree_to_four_decimals(tmp_path: Path) -> None:
    same = results(
        tmp_path,
        gpt2_tiny__single__1__fp32__none=LOSSES,
        gpt2_tiny__ddp__2__fp32__none=[loss + 0.00004 for loss in LOSSES],
        gpt2_tiny__ddp__2__bf16__none=[9.0, 9.0, 9.0],
        llama_tiny__ddp__2__fp32__none=[3.0, 3.0, 3.0],
    )
    assert loss_problems(same) == []
    other = results(tmp_path / "b", gpt2_tiny__ddp__2__fp32__full=[2.0, 1.5, 1.2502])
    assert loss_problems([*same, *other]) == [
        "gpt2_tiny__ddp__2__fp32__full: losses 2.0000 1.5000 1.2502, but gpt2_tiny__single__1__fp32__none has 2.0000 1.5000 1.2500"
    ]
    assert len(loss_problems([*same, *results(tmp_path / "c", gpt2_tiny__ddp__2__fp32__full=[2.0, 1.5])])) == 1


# -- many runs, with a program in torchrun's place ---------------------------------------------------

STUB = """
import shutil, sys
from pathlib import Path
prepared = Path(sys.argv[1])
for word in sys.argv[4:]:
    folder = Path(word)
    if not (prepared / folder.name).exists():
        (folder / "errors").mkdir()
        (folder / "errors" / "rank-1.json").write_text('{"rank": 1, "moment": "loss", "kind": "error", "message": "no"}')
        sys.exit(1)
    shutil.copytree(prepared / folder.name, folder, dirs_exist_ok=True)
    print("noise")
    print("done", folder.name, flush=True)
"""


@pytest.fixture
def prepared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[dict[str, Plan]], Path]:
    """Runs made beforehand; the program copies them. One that was not made fails and ends the job, as torchrun would."""
    monkeypatch.setattr(
        validate_module,
        "command",
        lambda ranks, module, *words, **how: [sys.executable, "-c", STUB, str(tmp_path / "made"), *words],
    )

    def make(plans: dict[str, Plan]) -> Path:
        for name, plan in plans.items():
            write(tmp_path / "made" / name, plan)
        return tmp_path / "out"

    return make


def test_every_plan_is_run_once_and_shown_at_once(prepared: Callable[[dict[str, Plan]], Path]) -> None:
    plans = matrix(quick=True, models=["mlp-tiny"])
    shown: list[str] = []
    found = validate(plans, out=prepared(plans), show=lambda result: shown.append(result.name))
    assert sorted(shown) == sorted(plans) == sorted(result.name for result in found)
    assert [result.problem for result in found] == [None] * len(plans)


def test_a_plan_that_fails_does_not_take_the_others_with_it(prepared: Callable[[dict[str, Plan]], Path]) -> None:
    plans = matrix(quick=True, models=["mlp-tiny"], worlds=[2])
    names = list(plans)
    out = prepared({name: plans[name] for name in names if name not in (names[1], names[-1])})
    found = {result.name: result.problem for result in validate(plans, out=out, show=lambda result: None)}
    assert set(found) == set(plans)
    for name, problem in found.items():
        if name in (names[1], names[-1]):
            assert problem == f"rank 1 of 2 failed in loss: no; see {out}/{name}/logs/rank-1.log"
        else:
            assert problem is None


def test_a_folder_in_use_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mine").touch()
    for out in (tmp_path, tmp_path / "mine"):
        with pytest.raises(FileError, match="is not an empty folder"):
            validate({}, out=out, show=print)


def said(*words: str) -> tuple[int, str, str]:
    done = CliRunner().invoke(app, ["validate", *words])
    return done.exit_code, done.stdout, done.stderr


def test_the_command(prepared: Callable[[dict[str, Plan]], Path]) -> None:
    plans = matrix(quick=True, models=["mlp-tiny"], worlds=[2])
    prepared(plans)
    words = ("--quick", "--model", "mlp-tiny", "--ranks", "2")
    code, out, err = said(*words)
    assert code == 0
    assert [line.split()[0] for line in out.splitlines()] == ["plan", *plans]
    assert f"{len(plans)} of {len(plans)} plans within 1 %" in err
    code, out, err = said(*words, "--format", "json")
    assert {row["result"] for row in json.loads(out)} == {"ok"}
    assert err.count("\n") == len(plans) + 1


def test_the_command_fails_when_a_plan_is_off(tmp_path: Path, prepared: Callable[[dict[str, Plan]], Path]) -> None:
    plans = matrix(quick=True, models=["mlp-tiny"], strategies=["ddp"], worlds=[2])
    first, *others = plans
    prepared({name: plans[name] for name in others})
    write(tmp_path / "made" / first, plans[first], factor=1.5)
    words = ("--quick", "--model", "mlp-tiny", "--strategy", "ddp", "--ranks", "2")
    code, out, err = said(*words)
    assert code == 1
    assert "peak off by more than 1 %" in out.splitlines()[1]
    assert err.splitlines()[-1] == "memcalc: 1 plans off, 0 losses differ"
    assert said(*words, "--tolerance", "60")[0] == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--strategy", "single", "--ranks", "2"), "no plan of the matrix is left"),
        (("--model", "gpt3"), "unknown model 'gpt3'"),
        (("--tolerance", "nan"), "tolerance nan must be from 0 to 100"),
        (("--ranks", "3"), "unknown ranks '3'"),
    ],
)
def test_bad_words(words: tuple[str, ...], message: str) -> None:
    code, _, err = said(*words)
    assert code == 2
    assert message in err
    assert len(err.splitlines()) == 1


def test_models_of_the_matrix_can_be_trained() -> None:
    assert all(FAMILIES[plan.model.family].reads in ("tokens", "features") for plan in matrix(quick=False).values())
