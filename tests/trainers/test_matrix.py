"""Every strategy of torch on 2 and 4 ranks: it learns what one rank learns, holds what was estimated, and goes on from its checkpoint.

One in five runs by default; ALL_RUNS takes all.
"""

from __future__ import annotations

import pytest

from memcalc.fsdp import Fsdp
from memcalc.layout import Layout
from memcalc.measurement import Measurement
from tests.trainers.matrix import (
    GPT2,
    HOST,
    LLAMA,
    OLD,
    TIED,
    Fields,
    Runs,
    both,
    check_losses,
    check_peak,
    check_resumed,
    plan,
    references,
)
from tests.trainers.runs import some

PIPED = {"accumulation": 4, "layout": Layout(pipeline=2)}
TWO: dict[str, Fields] = some(
    {
        "1f1b": PIPED,
        "ddp": {"strategy": "ddp", "accumulation": 2},
        "tensor": {"model": LLAMA, "layout": Layout(tensor=2, sequence=True), "accumulation": 2},
        "interleaved": {"accumulation": 4, "layout": Layout(pipeline=2, schedule="interleaved", chunks=2)},
        "zero-1": {"strategy": "zero-1"},
        "ddp-static-graph": {"strategy": "ddp", "static_graph": True, "bucket_views": True, "accumulation": 4},
        "fsdp-shard-grad-op": {"strategy": "fsdp-shard-grad-op", "accumulation": 2},
        "fsdp-1": {"strategy": "fsdp-full-shard", "fsdp": OLD},
        "fsdp-full-shard": {"strategy": "fsdp-full-shard", "checkpoint_every": 2},
        "fsdp-no-shard": {"strategy": "fsdp-no-shard"},
        "gpipe-tied": {"model": TIED, "accumulation": 4, "layout": Layout(pipeline=2, schedule="gpipe")},
        "fsdp-1-grad-op": {"strategy": "fsdp-shard-grad-op", "fsdp": OLD, "accumulation": 2},
        "fsdp-1-flat": {"strategy": "fsdp-full-shard", "fsdp": Fsdp(version="1", original_parameters=False)},
        "fsdp-offload": {"strategy": "fsdp-full-shard", "offload": HOST},
        "1f1b-checkpoint": PIPED | {"checkpoint_every": 1},
        "gpipe-many": {"accumulation": 8, "layout": Layout(pipeline=2, schedule="gpipe")},
    },
    one_in=5,
)
FOUR: dict[str, Fields] = some(
    {
        "pipeline-tensor": {"model": LLAMA, "accumulation": 4, "layout": Layout(pipeline=2, tensor=2)},
        "ddp": {"strategy": "ddp"},
        "fsdp-full-shard": {"strategy": "fsdp-full-shard"},
        "pipeline-fsdp": PIPED | {"strategy": "fsdp-full-shard"},
        "pipeline-of-4": {"accumulation": 8, "layout": Layout(pipeline=4)},
        "zero-1": {"strategy": "zero-1", "accumulation": 2},
        "hybrid-tensor": {
            "model": LLAMA, "strategy": "fsdp-hybrid-shard", "fsdp": Fsdp(replicas=2), "layout": Layout(tensor=2),
        },
        "ddp-tensor": {"model": LLAMA, "strategy": "ddp", "layout": Layout(tensor=2, sequence=True), "accumulation": 2},
        "hybrid-grad-op": {"strategy": "fsdp-hybrid-shard-grad-op", "fsdp": Fsdp(replicas=2), "accumulation": 2},
        "fsdp-shard-grad-op": {"strategy": "fsdp-shard-grad-op"},
        "pipeline-ddp": PIPED | {"strategy": "ddp"},
        "hybrid": {"strategy": "fsdp-hybrid-shard", "fsdp": Fsdp(replicas=2)},
        "hybrid-1": {"strategy": "fsdp-hybrid-shard", "fsdp": Fsdp(version="1", replicas=2)},
        "fsdp-tensor": {"model": LLAMA, "strategy": "fsdp-full-shard", "layout": Layout(tensor=2), "accumulation": 2},
        "fsdp-1": {"strategy": "fsdp-full-shard", "fsdp": OLD},
    },
    one_in=5,
)  # fmt: skip


@pytest.fixture(scope="module")
def alone() -> dict[str, Measurement]:
    return references([GPT2, LLAMA, TIED])


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return both({name: plan(2, **fields) for name, fields in TWO.items()}, 2, tmp_path_factory.mktemp("two"))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    plans = {name: plan(4, **fields) for name, fields in FOUR.items()}  # type: ignore[arg-type]
    return both(plans, 4, tmp_path_factory.mktemp("four"))


@pytest.mark.parametrize("name", TWO)
def test_two_ranks(two: Runs, alone: dict[str, Measurement], name: str) -> None:
    check_losses(two, name, alone)
    check_peak(two, name, 1.0)
    check_resumed(two, name)


@pytest.mark.parametrize("name", FOUR)
def test_four_ranks(four: Runs, alone: dict[str, Measurement], name: str) -> None:
    check_losses(four, name, alone)
    check_peak(four, name, 1.0)
    check_resumed(four, name)
