"""A plan may come from anywhere: code that it names runs only where its user names it, too."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from click.testing import CliRunner

from memcalc.cli.app import app
from memcalc.errors import InputError
from memcalc.launch import Place, torchrun
from memcalc.models import Model, Module, Weight
from memcalc.named_code import confirm_code
from memcalc.plan import Plan
from memcalc.training import Training
from trainers.__main__ import read_plan

MODULE = Module(factory="own:tiny", shape=(12,), weights=(Weight("enter.weight", (32, 12)),))
TINY = Model(name="own:tiny", family="module", features=12, classes=10, module=MODULE)
PLAN = Plan(model=TINY, micro_batch=4)

_CONFIG = "config.json"
_BOTH = "the plan runs the code of {0}:module and {0}:batch; say that it shall: "


@pytest.mark.parametrize(
    ("factory", "sample", "named", "message"),
    [
        (_CONFIG, "{0}:batch", [], "the plan runs the code of {0}:batch; say that it shall: "),
        ("{0}:module", "{0}:batch", ["--module", "{0}:module"], _BOTH),
        ("{0}:module", "{0}:batch", ["--sample", "{0}:batch"], _BOTH),
        ("{0}:module", "{0}:batch", ["--module", "{0}:module", "--sample", "own:batch"], "is not what the plan runs"),
        ("{0}:module", "", ["--module", "{0}:other"], "is not what the plan runs"),
        ("{0}:module", "", ["--module", "{0}:module", "--sample", "{0}:batch"], "which runs no such code of yours"),
    ],
)
def test_no_file_named_in_a_plan_is_run_unless_its_user_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, factory: str, sample: str, named: list[str], message: str
) -> None:
    """By no command that takes a plan, and not by the ranks of a run: the code would leave a file."""
    monkeypatch.chdir(tmp_path)
    evil = tmp_path / "evil.py"
    evil.write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    (tmp_path / _CONFIG).write_text('{"model_type": "bert"}')
    own = dataclasses.replace(
        MODULE, factory=factory.format(evil) if ":" in factory else f"{tmp_path}/{factory}", sample=sample.format(evil)
    )
    plan = dataclasses.replace(PLAN, model=dataclasses.replace(TINY, module=own), device="cpu")
    plan.save(tmp_path / "plan.json")
    given = [word.format(evil) for word in named]
    for command in (["estimate", "--plan", "plan.json"], ["rehearse", "plan.json"], ["rehearse", "--plan", "plan.json"],
                    ["launch", "plan.json", "--out", "run"]):  # fmt: skip
        said = CliRunner().invoke(app, [*command, *given])
        assert said.exit_code == 2, said.output
        assert message.format(evil) in said.output and said.output.count("\n") == 1
    options = dict(zip(given[::2], given[1::2], strict=True))
    with pytest.raises(InputError, match=message.format(evil).split(";")[0]):
        read_plan(tmp_path / "plan.json", options.get("--module"), options.get("--sample"))
    assert not (tmp_path / "ran").exists() and not (tmp_path / "run").exists()


def test_a_run_names_the_code_of_its_plan_to_its_ranks(tmp_path: Path) -> None:
    own = dataclasses.replace(MODULE, sample="own:batch")
    plan = dataclasses.replace(PLAN, model=dataclasses.replace(TINY, module=own))
    words = torchrun(plan, Training(), Place(), tmp_path)
    assert words[-4:] == ["--module", "own:tiny", "--sample", "own:batch"]
    confirm_code(plan, words[-3], words[-1], "")
