"""DeepSpeed and accelerate for real, on the CPU: what one rank of torch learns, what was estimated, and their checkpoints.

Parameters, gradients and states are equal to the byte, and the peak is within 1 %: 0.02 % off at most when this was written.
All runs of a number of ranks share one start of torchrun.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
from pathlib import Path

import pytest

from memcalc.compare import STATES, exact
from memcalc.deepspeed import DeepSpeed
from memcalc.errors import RunError
from memcalc.extensions import built, has_libaio
from memcalc.fsdp import Fsdp
from memcalc.loss import Loss
from memcalc.measurement import Measurement
from memcalc.models import Model
from memcalc.offload import Offload
from memcalc.plan import Plan
from memcalc.training import Training
from tests.trainers.engines import need
from tests.trainers.matrix import (
    GPT2,
    HOST,
    OLD,
    SMALL,
    STEPS,
    STOP,
    Fields,
    Runs,
    both,
    check_losses,
    check_peak,
    check_resumed,
    plan,
    references,
)
from tests.trainers.runs import Job, some
from trainers.loop import train
from trainers.process import Rank, join

need("deepspeed", "accelerate")

WIDE = Model(
    name="wide-gpt2", family="gpt2", layers=2, hidden=512, heads=8, kv_heads=8, ffn=2048, vocab=512, context=64, tied=True
)  # fmt: skip
"""Its partitions are large enough to be swapped, from 1 MiB on."""
SWAPPED = Offload(
    optimizer="nvme", parameters="nvme", parameter_buffers=12, parameter_buffer_size=600_000, max_in_cpu=0
)
STATES_ON_HOST = Offload(optimizer="cpu")
BF16 = {"precision": "bf16-master"}
TWO: dict[str, Fields] = {
    "deepspeed-0": {"strategy": "deepspeed-0"},
    "deepspeed-1": {"strategy": "deepspeed-1", "accumulation": 2},
    "deepspeed-2": {"strategy": "deepspeed-2", "accumulation": 2},
    "deepspeed-0-bf16": {"strategy": "deepspeed-0", **BF16},
    "deepspeed-2-bf16-offload": {"strategy": "deepspeed-2", "offload": STATES_ON_HOST, **BF16},
    "deepspeed-3-bf16-offload": {"strategy": "deepspeed-3", "offload": HOST, **BF16},
    "accelerate-ddp": {"strategy": "ddp", "accumulation": 2},
    "accelerate-deepspeed-2": {"strategy": "deepspeed-2", "accumulation": 2},
    "accelerate-fsdp-2": {"strategy": "fsdp-full-shard", "accumulation": 2},
    "accelerate-fsdp-1": {"strategy": "fsdp-shard-grad-op", "fsdp": OLD},
    "accelerate-ddp-amp": {"strategy": "ddp", "precision": "amp-bf16", "loss": Loss(float32_output=True)},
    "accelerate-fsdp-2-amp": {
        "strategy": "fsdp-full-shard",
        "precision": "amp-bf16",
        "fsdp": Fsdp(reduce_dtype="compute"),
    },
    "accelerate-fsdp-2-offload": {"strategy": "fsdp-full-shard", "offload": HOST},
} | some(
    {
        "deepspeed-3": {"strategy": "deepspeed-3"},
        "deepspeed-3-offload": {"strategy": "deepspeed-3", "offload": HOST},
        "deepspeed-2-offload": {"strategy": "deepspeed-2", "offload": STATES_ON_HOST},
        "deepspeed-1-offload": {"strategy": "deepspeed-1", "offload": STATES_ON_HOST},
        "deepspeed-1-bf16-sums": {
            "strategy": "deepspeed-1",
            "deepspeed": DeepSpeed(grad_accum_dtype="float32"),
            **BF16,
        },
        "deepspeed-1-bf16": {"strategy": "deepspeed-1", **BF16},
        "deepspeed-2-bf16": {"strategy": "deepspeed-2", **BF16},
        "deepspeed-3-bf16": {"strategy": "deepspeed-3", **BF16},
        "deepspeed-3-accumulation": {"strategy": "deepspeed-3", "accumulation": 2},
        "accelerate-deepspeed-3": {"strategy": "deepspeed-3", **BF16},
        "accelerate-deepspeed-0": {"strategy": "deepspeed-0"},
        "accelerate-fsdp-2-grad-op": {"strategy": "fsdp-shard-grad-op"},
        "accelerate-fsdp-1-flat": {"strategy": "fsdp-full-shard", "fsdp": Fsdp(version="1", original_parameters=False)},
    },
    one_in=13,
)
"""Every stage, offload and both engines in CI; ALL_RUNS takes all."""
FOUR: dict[str, Fields] = some(
    {
        "deepspeed-3": {"strategy": "deepspeed-3"},
        "deepspeed-1": {"strategy": "deepspeed-1"},
        "deepspeed-2": {"strategy": "deepspeed-2", "accumulation": 2},
    }
) | {
    "accelerate-hybrid": {"strategy": "fsdp-hybrid-shard", "fsdp": Fsdp(replicas=2), "accumulation": 2},
}
if os.environ.get("ALL_RUNS") and (built("async_io") or has_libaio()):  # some minutes where it is not built yet
    NVME: Fields = {"model": WIDE, "strategy": "deepspeed-3"}
    TWO |= {
        "deepspeed-3-nvme": NVME | {"offload": Offload(optimizer="nvme")},
        "deepspeed-3-bf16-nvme": NVME | BF16 | {"offload": SWAPPED},
        "deepspeed-3-bf16-nvme-weights": NVME | BF16 | {"offload": dataclasses.replace(SWAPPED, optimizer="cpu")},
    }
OTHER = '{"betas": [0.8, 0.95], "eps": 1e-3, "weight_decay": 0.3}'
"""Numbers that no default has, for the run of stage 2."""


def planned(fields: Fields, ranks: int) -> Plan:
    """Buckets and thresholds as small as the model."""
    knobs = fields.get("deepspeed", DeepSpeed())
    assert isinstance(knobs, DeepSpeed)
    small = ("reduce_bucket_size", "prefetch_bucket_size", "persistence_threshold")
    of_stage_3 = str(fields["strategy"]) == "deepspeed-3"
    if "deepspeed" in str(fields["strategy"]):
        knobs = dataclasses.replace(
            knobs, **{name: getattr(SMALL, name) for name in (small if of_stage_3 else small[:1])}
        )
    return plan(ranks, **fields | {"deepspeed": knobs})


def run_all(cases: dict[str, Fields], ranks: int, folder: Path, more: dict[str, Job] | None = None) -> Runs:
    plans = {name: planned(fields, ranks) for name, fields in cases.items()}
    by_name: dict[str, dict[str, object]] = {
        name: {"accelerate": True} for name in cases if name.startswith("accelerate")
    }
    by_name |= {"deepspeed-2": {"coefficients": OTHER}} if ranks == 2 else {}
    by_name |= {name: {"nvme_path": str(folder / "disk" / name)} for name, each in plans.items() if each.offload.swaps}
    folder.mkdir()
    swapped = tuple(name for name, each in plans.items() if each.offload.parameters == "nvme")  # not gone on with
    once = () if os.environ.get("ALL_RUNS") else tuple(name for name in by_name if name.startswith("accelerate"))
    return both(plans, ranks, folder, by_name, more, (*once, *swapped), driver="driver_accelerate.py")


@pytest.fixture(scope="module")
def alone() -> dict[str, Measurement]:
    return references([GPT2, *({plan.model for plan in (planned(fields, 2) for fields in TWO.values())} - {GPT2})])


@pytest.fixture(scope="module")
def otherwise() -> dict[str, Measurement]:
    """The same with other numbers in the optimizer."""
    return references([GPT2], coefficients=OTHER)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("engines")


@pytest.fixture(scope="module")
def two(folder: Path) -> Runs:
    return run_all(TWO, 2, folder / "two")


@pytest.fixture(scope="module")
def four(two: Runs, folder: Path) -> Runs:
    """Beside its own runs, one of stage 2 that goes on from the checkpoint of stage 3 on two ranks."""
    saved = Path("checkpoints") / f"step-{STOP}"
    there = folder / "four" / "resharded"
    job = Job(
        planned({"strategy": "deepspeed-2"}, 4), steps=STEPS, out=there, options=(("resume", True),),
        copy=(folder / "two" / "deepspeed-3" / saved, there / saved),
    )  # fmt: skip
    return run_all(FOUR, 4, folder / "four", {"resharded": job})


def check(runs: Runs, name: str, alone: dict[str, Measurement]) -> None:
    """Losses to 4 decimals in float32, and within what bfloat16 rounds off; states, peak, checkpoint."""
    check_losses(runs, name, alone, places=0.005 if "bf16" in runs.plans[name].precision else 5e-5)
    check_peak(runs, name, 2.0 if runs.plans[name].model == WIDE else 1.0)  # a gather that ends late: 1.3 % seen
    check_states(runs, name)
    if name in runs.resumed:  # what accelerate wraps is saved by the same code as without it
        check_resumed(runs, name)


def check_states(runs: Runs, name: str) -> None:
    """To the byte, on the rank that holds most of each."""
    measured = {kind: max(getattr(rank, kind) for rank in runs.whole[name].ranks) for kind in STATES}
    assert measured == {kind: exact(runs.plans[name], kind) for kind in STATES}


@pytest.mark.parametrize("name", TWO)
def test_two_ranks(two: Runs, alone: dict[str, Measurement], otherwise: dict[str, Measurement], name: str) -> None:
    check(two, name, otherwise if name == "deepspeed-2" else alone)


def test_the_numbers_of_the_optimizer_matter(alone: dict[str, Measurement], otherwise: dict[str, Measurement]) -> None:
    assert (
        max(abs(a - b) for a, b in zip(*(found[GPT2.name].losses for found in (alone, otherwise)), strict=True)) > 0.01
    )  # type: ignore[operator]


@pytest.mark.parametrize("name", FOUR)
def test_four_ranks(four: Runs, alone: dict[str, Measurement], name: str) -> None:
    check(four, name, alone)


def test_another_number_of_ranks_and_another_stage_go_on(two: Runs, four: Runs) -> None:
    """Checkpoints hold whole weights and states by name, which DeepSpeed's own for the same number of ranks do not."""
    assert four.resumed["resharded"].losses == pytest.approx(two.whole["deepspeed-3"].losses, abs=5e-5, rel=0)
    assert four.resumed["resharded"].evaluation == pytest.approx(two.whole["deepspeed-3"].evaluation, abs=5e-5, rel=0)


@pytest.mark.parametrize("name", ["deepspeed-1", "deepspeed-3"])
def test_torch_alone_goes_on_from_deepspeeds_checkpoint(two: Runs, folder: Path, tmp_path: Path, name: str) -> None:
    saved = Path("checkpoints") / f"step-{STOP}"
    shutil.copytree(folder / "two" / name / saved, tmp_path / saved)
    settings = Training(steps=STEPS, measure_steps=0, learning_rate=1e-3, resume=True)
    with join(Rank(rank=0, local=0, world=1), "cpu", 0) as process:
        found = train(plan(1), settings, process, out=tmp_path)
    assert found.losses == pytest.approx(two.whole[name].losses, abs=5e-5, rel=0)


def test_accelerate_runs_no_other_strategy_than_the_planned() -> None:
    """On the CPU it leaves FSDP out without a word."""
    sharded = plan(1, strategy="fsdp-full-shard")
    settings = Training(steps=1, measure_steps=0, accelerate=True)
    with join(Rank(rank=0, local=0, world=1), "cpu", 0) as process, pytest.raises(RunError) as caught:
        train(sharded, settings, process)
    said = "a run that is another one than planned is not started"
    assert str(caught.value) == f"accelerate made NO on cpu with a GPT2 of fsdp-full-shard; {said}"


def test_what_a_left_over_environment_says_does_not_decide(monkeypatch: pytest.MonkeyPatch) -> None:
    """accelerate reads these where nobody says otherwise: DeepSpeed would take ddp's place, bfloat16 that of float32."""
    for name, value in {
        "ACCELERATE_USE_DEEPSPEED": "true",
        "ACCELERATE_MIXED_PRECISION": "bf16",
        "FSDP_VERSION": "2",
    }.items():
        monkeypatch.setenv(name, value)
    usual = Training(steps=2, measure_steps=0, learning_rate=1e-3)
    with join(Rank(rank=0, local=0, world=1), "cpu", 0) as process:
        plain, wrapped = (train(plan(1), dataclasses.replace(usual, accelerate=way), process) for way in (False, True))
    assert wrapped.losses == plain.losses
