"""Coefficients of optimizers and the scaling of losses: read, judged, and given on to a run."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from memcalc.configs import read, settle
from memcalc.configs.write import write
from memcalc.errors import InputError, PlanError
from memcalc.hyperparameters import check_coefficients, check_scaling, read_coefficients, read_scaling
from memcalc.launch import check_plan
from memcalc.models import MODELS
from memcalc.offload import Offload
from memcalc.plan import Plan
from memcalc.training import Training
from memcalc.update import Update

PLAN = Plan(model=MODELS["gpt2-tiny"], tokens=16, micro_batch=2, strategy="ddp", ranks=2)
ZERO = replace(PLAN, strategy="deepspeed-2", precision="fp16-master", optimizer_kind="fused")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[1]", "is not a JSON object"),
        ("{", "coefficients"),
        ('{"beta": 1}', "unknown key .beta.; did you mean .betas."),
        ('{"betas": [0.9]}', "must be two numbers from 0 to below 1, like \\[0.9, 0.999\\]"),
        ('{"betas": [0.9, 1.0]}', "must be two numbers"),
        ('{"eps": true}', "eps True must be a number of at least 0"),
        ('{"weight_decay": -1}', "weight_decay -1 must be a number of at least 0"),
        ('{"eps": NaN}', "NaN is not a number JSON knows"),
        ('{"momentum": 0}', "must be a number above 0"),
    ],
)
def test_coefficients_that_are_none(text: str, said: str) -> None:
    with pytest.raises(InputError, match=said):
        Training(coefficients=text)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"loss_scale": "auto"}', "loss_scale 'auto' is not a number of at least 0"),
        ('{"initial_scale_power": 1.5}', "is not a whole number"),
        ('{"consecutive_hysteresis": 1}', "is not true or false"),
        ('{"initial_scale": 1}', "did you mean .initial_scale_power."),
    ],
)
def test_scaling_that_is_none(text: str, said: str) -> None:
    with pytest.raises(InputError, match=said):
        Training(scaling=text)


def test_an_optimizer_is_given_what_it_has() -> None:
    check_coefficients(PLAN, '{"betas": [0.8, 0.9], "eps": 1e-6, "weight_decay": 0.1}')
    with pytest.raises(PlanError, match="sgd has no betas; of those named it has: weight_decay$"):
        check_coefficients(replace(PLAN, optimizer="sgd"), '{"betas": [0.8, 0.9]}')
    with pytest.raises(PlanError, match="rprop has no eps; of those named it has: none"):
        check_coefficients(replace(PLAN, optimizer="rprop"), '{"eps": 1e-6}')


def test_decay_that_takes_memory_is_said_by_the_plan() -> None:
    """torch adds it to a copy of the gradients; only AdamW and its like decay weights in place."""
    adam = replace(PLAN, optimizer="adam")
    with pytest.raises(PlanError, match="weight_decay 0.1 of adam is added to gradients; add --l2"):
        check_coefficients(adam, '{"weight_decay": 0.1}')
    check_coefficients(adam, '{"weight_decay": 0}')
    decays = replace(adam, update=Update(l2=True))
    check_coefficients(decays, '{"weight_decay": 0.1}')
    with pytest.raises(PlanError, match="weight_decay 0 of adam is not added to gradients; leave out --l2"):
        check_coefficients(decays, '{"weight_decay": 0}')


def test_scaling_is_for_float16_and_what_torch_has() -> None:
    with pytest.raises(PlanError, match="fp32 scales no losses; leave out scaling initial_scale_power"):
        check_scaling(PLAN, '{"initial_scale_power": 8}')
    check_scaling(ZERO, '{"loss_scale": 128, "hysteresis": 4}')
    mixed = replace(PLAN, precision="amp-fp16")
    check_scaling(mixed, '{"initial_scale_power": 8, "loss_scale_window": 100, "hysteresis": 2}')
    with pytest.raises(
        PlanError, match="loss_scale 128 is DeepSpeed's alone; torch's GradScaler, which ddp takes, has"
    ):
        check_scaling(mixed, '{"loss_scale": 128}')


def test_a_launch_is_refused_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="sgd has no betas"):
        check_plan(
            replace(PLAN, optimizer="sgd"), out=tmp_path / "a", training=Training(coefficients='{"betas": [0, 0]}')
        )
    with pytest.raises(PlanError, match="fp32 scales no losses"):
        check_plan(PLAN, out=tmp_path / "a", training=Training(scaling='{"loss_scale": 8}'))


def test_arguments_carry_them_to_the_ranks(tmp_path: Path) -> None:
    training = Training(coefficients='{"eps": 1e-6}', scaling='{"loss_scale": 8}')
    words = training.arguments()
    assert [words[words.index(name) + 1] for name in ("--coefficients", "--scaling")] == [
        '{"eps": 1e-6}', '{"loss_scale": 8}',
    ]  # fmt: skip
    training.save(tmp_path / "training.json")
    assert Training.saved(tmp_path / "training.json") == training.as_saved()


def test_what_a_run_takes_is_written_and_read_back(tmp_path: Path) -> None:
    offload = Offload(optimizer="nvme", parameters="nvme")
    plan = replace(ZERO, strategy="deepspeed-3", offload=offload)
    training = Training(coefficients='{"betas": [0.8, 0.95], "weight_decay": 0.1}', scaling='{"hysteresis": 4}')
    path = tmp_path / "ds.json"
    path.write_text(write(plan, "deepspeed", training).text)
    found = settle(read(path), {"ranks": 2}, plan.model).training
    assert read_coefficients(found["coefficients"]) == read_coefficients(training.coefficients)
    assert read_scaling(found["scaling"]) == {"hysteresis": 4}


def test_a_written_file_decays_as_the_run_does() -> None:
    """trainers/optimizers.py leaves AdamW torch's 0.01, which DeepSpeed's own Adam would not have."""
    for plan, decay in ((ZERO, 0.01), (replace(ZERO, optimizer="adam"), 0.0)):
        assert json.loads(write(plan, "deepspeed").text)["optimizer"]["params"]["weight_decay"] == decay
