"""The CPU meter against sizes that can be counted by hand, and the loop against hidden references."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from memcalc.measurement import RankMeasurement
from memcalc.timeline import MOMENTS
from tests.trainers.runs import Job, Result, plan, run
from trainers.meters import storages


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Result]:
    jobs = {
        "mlp": Job(plan("mlp-tiny"), measure_steps=3),
        "again": Job(plan("mlp-tiny"), measure_steps=5, steps=6),
        "two": Job(plan("mlp-tiny"), measure_steps=2),
        "accumulation": Job(plan("mlp-tiny", accumulation=4), measure_steps=3),
        "bf16": Job(plan("mlp-tiny", precision="bf16"), measure_steps=3),
        "keep": Job(plan("mlp-tiny", set_to_none=False), measure_steps=3),
        "unclipped": Job(plan("mlp-tiny"), measure_steps=3, options=(("clip", 0.0),)),
    }
    return run(jobs, 1, tmp_path_factory.mktemp("one"))


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Result]:
    names = ("ddp", "zero-1", "fsdp-full-shard", "fsdp-shard-grad-op", "fsdp-no-shard")
    return run(
        {name: Job(plan(ranks=2, strategy=name), measure_steps=3) for name in names}, 2, tmp_path_factory.mktemp("two")
    )


# mlp-tiny: four layers of 256 x 256 with bias and a head of 10 x 256 with bias.
PARAMETERS = 4 * (4 * (256 * 256 + 256) + 10 * 256 + 10)
TENSORS = 10


def test_states_to_the_byte(one: dict[str, Result]) -> None:
    (rank,) = one["mlp"].ranks
    assert (rank.parameters, rank.gradients, rank.optimizer) == (PARAMETERS, PARAMETERS, 2 * PARAMETERS + 4 * TENSORS)
    (rank,) = one["bf16"].ranks
    assert (rank.parameters, rank.gradients, rank.optimizer) == (
        PARAMETERS // 2,
        PARAMETERS // 2,
        PARAMETERS + 4 * TENSORS,
    )


def test_moments_of_a_plain_step(one: dict[str, Result]) -> None:
    (rank,) = one["unclipped"].ranks
    resident = 3 * PARAMETERS + 4 * TENSORS
    batch = 8 * 256 * 4 + 8 * 8
    log = 4  # the loss that is logged
    assert rank.by_moment["start"] == resident + 2 * batch + log
    # A layer's output is used by its ReLU only, whose output the next layer saves: four saved, and one on top.
    assert rank.by_moment["forward"] == resident + batch + log + (4 + 1) * 8 * 256 * 4
    # foreach AdamW: gradients and one list of temporaries as large as they are. At most 16 bytes a tensor are scalars.
    assert 0 <= rank.by_moment["step"] - (resident + batch + log + 2 * PARAMETERS) <= 16 * TENSORS
    assert rank.moment == "step" and rank.allocated_peak == rank.by_moment["step"]


def test_timeline_tells_the_same(one: dict[str, Result], two: dict[str, Result]) -> None:
    for result in (*one.values(), *two.values()):
        for rank in result.ranks:
            assert rank.timeline is not None
            peak = rank.timeline.peak()
            assert (peak.bytes, peak.moment) == (rank.allocated_peak, rank.moment)
            assert {moment: rank.by_moment[moment] for moment in peak.by_moment} == peak.by_moment


def test_states_in_the_timeline(two: dict[str, Result]) -> None:
    for rank in (rank for result in two.values() for rank in result.ranks):
        assert rank.timeline is not None
        for category, held in (("parameters", rank.parameters), ("optimizer", rank.optimizer)):
            assert rank.timeline.at_moment("step", category) == held


def test_steady_means_steady(one: dict[str, Result]) -> None:
    """Nothing piles up from step to step: what a step allocates, it or the next one frees."""
    (three,), (five,) = one["mlp"].ranks, one["again"].ranks
    assert (three.allocated_peak, three.by_moment) == (five.allocated_peak, five.by_moment)
    assert three.allocated_peak == one["two"].ranks[0].allocated_peak
    for name in ("mlp", "bf16", "keep"):
        timeline = one[name].ranks[0].timeline
        assert timeline is not None
        assert timeline.delta[timeline.moment != MOMENTS.index("start")].sum() == 0


def test_accumulation_adds_the_scaled_loss_and_keeps_gradients(one: dict[str, Result]) -> None:
    (plain,), (rank,) = one["mlp"].ranks, one["accumulation"].ranks
    quarter = (8 - 2) * (256 * 4 + 8)
    assert plain.by_moment["start"] - rank.by_moment["start"] == 2 * quarter - PARAMETERS  # gradients live on
    assert rank.gradients == plain.gradients


def test_kept_gradients_are_always_there(one: dict[str, Result]) -> None:
    (plain,), (rank,) = one["mlp"].ranks, one["keep"].ranks
    assert rank.by_moment["start"] - plain.by_moment["start"] == PARAMETERS


def test_building_the_model_never_takes_more_than_a_step(one: dict[str, Result], two: dict[str, Result]) -> None:
    """The model is built on meta and filled tensor by tensor, so no copy of it is made on the way."""
    for rank in (rank for result in (*one.values(), *two.values()) for rank in result.ranks):
        assert rank.init_peak is not None and rank.init_peak <= rank.allocated_peak


def test_what_is_divided_is_divided(two: dict[str, Result]) -> None:
    def total(name: str, field: str) -> int:
        return sum(getattr(rank, field) for rank in two[name].ranks)

    whole = two["ddp"].ranks[0]
    assert total("ddp", "parameters") == 2 * whole.parameters
    assert total("zero-1", "optimizer") == whole.optimizer
    for name in ("fsdp-full-shard", "fsdp-shard-grad-op"):
        assert total(name, "parameters") == whole.parameters == total(name, "gradients")
        assert all(rank.allocated_peak < whole.allocated_peak for rank in two[name].ranks)
    assert two["fsdp-full-shard"].ranks[0].allocated_peak < two["fsdp-shard-grad-op"].ranks[0].allocated_peak


def test_storages_count_shared_memory_once() -> None:
    whole = torch.zeros(100)
    scalar = torch.zeros(())
    assert sum(storages([whole[:50], whole[50:], scalar, None, 3, torch.empty(0)], torch.device("cpu")).values()) == 404


def test_measurement_files(one: dict[str, Result], tmp_path: Path) -> None:
    (rank,) = one["mlp"].ranks
    rank.save(tmp_path / "rank-0.json")
    assert RankMeasurement.from_json(tmp_path / "rank-0.json").by_moment == rank.by_moment
    assert rank.instrument == "torch.profiler memory events of the CPU allocator"
