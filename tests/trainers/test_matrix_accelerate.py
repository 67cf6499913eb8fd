"""accelerate around ddp for real, and that what it makes of FSDP on the CPU is not taken for FSDP."""

from __future__ import annotations

from pathlib import Path

import pytest

from memcalc.measurement import Measurement
from tests.trainers.matrix import GPT2, Runs, both, check_losses, check_peak, check_resumed, plan, references
from tests.trainers.runs import Job, run

pytest.importorskip("accelerate")


@pytest.fixture(scope="module")
def alone() -> dict[str, Measurement]:
    return references([GPT2])


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    plans = {"ddp": plan(2, strategy="ddp", accumulation=2)}
    return both(plans, 2, tmp_path_factory.mktemp("two"), accelerate=True)


def test_ddp(two: Runs, alone: dict[str, Measurement]) -> None:
    check_losses(two, "ddp", alone)
    check_peak(two, "ddp", 1.0)
    check_resumed(two, "ddp")


def test_another_strategy_than_the_planned_is_not_run(tmp_path: Path) -> None:
    job = Job(plan(2, strategy="fsdp-full-shard"), steps=1, options=(("accelerate", True),))
    with pytest.raises(
        AssertionError, match="accelerate made MULTI_CPU with a DistributedDataParallel of fsdp-full-shard"
    ):
        run({"fsdp": job}, 2, tmp_path)
