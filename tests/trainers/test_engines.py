"""What is handed to DeepSpeed, to accelerate and to torch's scaler says the plan and how it is trained; nothing runs here."""

from __future__ import annotations

import importlib.util
import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils.file_baton import FileBaton

from memcalc.configs import apply, deepspeed_json, settle
from memcalc.configs.write import leaves
from memcalc.errors import RunError
from memcalc.fsdp import Fsdp
from memcalc.hyperparameters import COEFFICIENTS, SCALING, read_scaling
from memcalc.models import MODELS
from memcalc.offload import Offload
from memcalc.plan import Plan
from memcalc.training import Training
from tests.plans import deepspeeds
from trainers import optimizers
from trainers.backends import deepspeed_build
from trainers.backends.accelerated import fsdp_plugin
from trainers.backends.deepspeed import configuration
from trainers.backends.deepspeed_build import watched

PLAN = Plan(
    model=MODELS["gpt2-tiny"], tokens=16, micro_batch=2, ranks=2, strategy="deepspeed-2", precision="bf16-master"
)


@st.composite
def zeros(draw: st.DrawFn) -> Plan:
    stage = draw(st.integers(0, 3))
    places = ["none", "cpu"] if stage else ["none"]
    places += ["nvme"] if stage == 3 else []
    offload = Offload(
        optimizer=draw(st.sampled_from(places)),
        parameters=draw(st.sampled_from(places)) if stage == 3 else "none",
    )
    return replace(
        PLAN, strategy=f"deepspeed-{stage}", accumulation=draw(st.integers(1, 3)), micro_batch=draw(st.integers(1, 3)),
        precision=draw(st.sampled_from(["fp32", "bf16-master", "fp16-master"])),
        offload=offload if offload.on else Offload(),
        deepspeed=replace(draw(deepspeeds(f"deepspeed-{stage}")), flatten="device", pipeline_engine=False),
    )  # fmt: skip


@settings(max_examples=40, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])
@given(zeros())
def test_what_deepspeed_is_given_says_the_plan(plan: Plan) -> None:
    """Read as somebody's DeepSpeed file, it is the same plan, but for the optimizer, which is handed over itself."""
    disk = Path("/disk") if plan.offload.swaps else None
    training = Training(scaling='{"hysteresis": 3}' if plan.precision == "fp16-master" else "", nvme_path=disk)
    given_over = configuration(plan, training)
    file = deepspeed_json.read(json.loads(json.dumps(given_over)), "given over")
    found = settle(file, {"ranks": plan.ranks}, plan.model)
    before, after = leaves(plan), leaves(apply(replace(plan, update=plan.update), found.fields))
    beside = ("update.clip",)
    overlap = {"deepspeed.overlap_comm": "on" if plan.deepspeed.overlaps(plan.strategy_row.zero_stage or 0) else "off"}
    assert {name: value for name, value in after.items() if name not in beside} == {
        name: value for name, value in {**before, **overlap}.items() if name not in beside
    }
    assert found.training.get("scaling") == (training.scaling or None)
    assert found.training.get("nvme_path") == (disk and str(disk))
    if disk:
        with pytest.raises(RunError, match="needs a folder on a disk; give --nvme-path DIR"):
            configuration(plan, replace(training, nvme_path=None))


def test_losses_are_scaled_as_the_file_says() -> None:
    training = Training(scaling='{"loss_scale": 0, "initial_scale_power": 12, "loss_scale_window": 50}')
    half = replace(PLAN, precision="fp16-master")
    assert configuration(half, training)["fp16"] == {"enabled": True, **read_scaling(training.scaling)}
    scaler = torch.amp.GradScaler("cpu", **optimizers.scaler_options(training))
    scaler.scale(torch.ones(()))
    assert (scaler.get_scale(), scaler.get_growth_interval()) == (2.0**12, 50)
    assert optimizers.scaler_options(Training()) == {}
    assert set(SCALING) <= {key.removeprefix("fp16.") for key in deepspeed_json.TABLE}


@pytest.mark.parametrize("name", sorted(optimizers.CLASSES))
def test_the_table_of_coefficients_is_torchs(name: str) -> None:
    """A coefficient is one of a kind of optimizer if and only if it stands in its groups as a number, or a pair of them."""
    kind, fixed = optimizers.CLASSES[name]
    group = kind([torch.nn.Parameter(torch.zeros(2))], **fixed).param_groups[0]
    for coefficient, having in COEFFICIENTS.items():
        there = coefficient in group and isinstance(
            group[coefficient], int | float if coefficient != "betas" else tuple
        )
        if coefficient == "momentum":
            there = bool(group.get("momentum"))  # 0 is none, and takes no memory
        assert there == (name in having), coefficient


def test_coefficients_reach_every_group() -> None:
    parameters = [torch.nn.Parameter(torch.zeros(2)) for _ in range(2)]
    optimizer = torch.optim.AdamW([{"params": [each]} for each in parameters])
    optimizers.set_coefficients(optimizer, Training(coefficients='{"betas": [0.5, 0.6], "weight_decay": 0.25}'))
    for group in optimizer.param_groups:
        assert (group["betas"], group["weight_decay"], group["eps"]) == ((0.5, 0.6), 0.25, 1e-8)


@pytest.mark.skipif(importlib.util.find_spec("accelerate") is None, reason="accelerate is not installed")
def test_accelerate_is_told_all_of_fsdp() -> None:
    from torch.distributed.fsdp import BackwardPrefetch, ShardingStrategy

    plan = replace(PLAN, strategy="fsdp-shard-grad-op", precision="fp32")
    two = fsdp_plugin(plan, ["Block"])
    assert (two.fsdp_version, two.reshard_after_forward, two.transformer_cls_names_to_wrap) == (2, False, ["Block"])
    assert fsdp_plugin(replace(plan, strategy="fsdp-full-shard"), ["Block"]).reshard_after_forward is True
    old = replace(
        plan, fsdp=Fsdp(version="1", backward_prefetch="post", original_parameters=False, forward_prefetch=True)
    )
    one = fsdp_plugin(old, ["Block"])
    assert (one.fsdp_version, one.sharding_strategy, one.backward_prefetch, one.use_orig_params, one.forward_prefetch) == (
        1, ShardingStrategy.SHARD_GRAD_OP, BackwardPrefetch.BACKWARD_POST, False, True,
    )  # fmt: skip


def test_a_wait_for_a_builder_that_is_gone_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch waits for the lock of a build without an end (torch/utils/file_baton.py); what this waits for is never released."""
    lock = tmp_path / "deepspeed_shm_comm" / "lock"
    lock.parent.mkdir()
    lock.touch()
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setattr(deepspeed_build, "LOOK", 0.05)
    baton = FileBaton(str(lock), wait_seconds=0.01)
    with pytest.raises(RunError, match=f"the build of an extension of DeepSpeed's was killed: rm {lock} "), watched():
        baton.wait()
    lock.unlink()
    with watched():
        baton.wait()


def test_ninja_is_found_beside_the_python_that_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("sys.executable", str(tmp_path / "bin" / "python"))
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin" / "ninja"
    program.write_text("")
    program.chmod(0o755)
    deepspeed_build.show_ninja()
    assert shutil.which("ninja") == str(program)


def test_an_interrupt_of_ones_own_stays_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    with pytest.raises(KeyboardInterrupt), watched():
        raise KeyboardInterrupt
