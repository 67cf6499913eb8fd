"""Every strategy of torch on 2 and 4 ranks: it learns what one rank learns, holds what was estimated, and goes on from its checkpoint.

Every strategy runs by default on each number of ranks, and with ALL_RUNS more of what they are combined with. Runs on two
ranks also go on with other ranks, layouts and strategies (moves.py), as if nothing had changed.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from memcalc.fsdp import Fsdp
from memcalc.layout import Layout
from memcalc.measurement import Measurement
from memcalc.training import Training
from tests.trainers.matrix import (
    GPT2,
    HOST,
    LLAMA,
    MLP,
    OLD,
    STEPS,
    STOP,
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
from tests.trainers.moves import MOVES
from tests.trainers.runs import ROOT, Job, rare
from trainers.loop import train
from trainers.process import Rank, join

SAVED = Path("checkpoints") / f"step-{STOP}"
PIPED = {"accumulation": 4, "layout": Layout(pipeline=2)}
HYBRID = {"strategy": "fsdp-hybrid-shard", "fsdp": Fsdp(replicas=2)}
TWO: dict[str, Fields] = {
    "ddp": {"strategy": "ddp", "accumulation": 2},
    "ddp-static-graph": {"strategy": "ddp", "static_graph": True, "bucket_views": True, "accumulation": 4},
    "zero-1": {"strategy": "zero-1"},
    "fsdp-full-shard": {"strategy": "fsdp-full-shard", "checkpoint_every": 2},
    "fsdp-shard-grad-op": {"strategy": "fsdp-shard-grad-op", "accumulation": 2},
    "fsdp-no-shard": {"strategy": "fsdp-no-shard"},
    "fsdp-offload": {"strategy": "fsdp-full-shard", "offload": HOST},
    "fsdp-1": {"strategy": "fsdp-full-shard", "fsdp": OLD},
    "tensor": {"model": LLAMA, "layout": Layout(tensor=2)},
    "sequence": {"model": LLAMA, "layout": Layout(tensor=2, sequence=True), "accumulation": 2},
    "1f1b": PIPED,
    "1f1b-mlp": PIPED | {"model": MLP},
    "gpipe-tied": {"model": TIED, "accumulation": 4, "layout": Layout(pipeline=2, schedule="gpipe")},
    "interleaved": {"accumulation": 4, "layout": Layout(pipeline=2, schedule="interleaved", chunks=2)},
} | rare(
    {
        "fsdp-1-grad-op": {"strategy": "fsdp-shard-grad-op", "fsdp": OLD, "accumulation": 2},
        "fsdp-1-flat": {"strategy": "fsdp-full-shard", "fsdp": Fsdp(version="1", original_parameters=False)},
        "1f1b-checkpoint": PIPED | {"checkpoint_every": 1},
        "gpipe-mlp": {
            "model": MLP,
            "accumulation": 8,
            "layout": Layout(pipeline=2, schedule="gpipe"),
            "checkpoint_every": 2,
        },
        "interleaved-mlp": {
            "model": MLP,
            "accumulation": 4,
            "layout": Layout(pipeline=2, schedule="interleaved", chunks=2),
        },
        "gpipe-many": {"accumulation": 8, "layout": Layout(pipeline=2, schedule="gpipe")},
    }
)
FOUR: dict[str, Fields] = {
    "ddp": {"strategy": "ddp"},
    "zero-1": {"strategy": "zero-1", "accumulation": 2},
    "fsdp-full-shard": {"strategy": "fsdp-full-shard"},
    "fsdp-shard-grad-op": {"strategy": "fsdp-shard-grad-op"},
    "fsdp-no-shard": {"strategy": "fsdp-no-shard"},
    "fsdp-1": {"strategy": "fsdp-full-shard", "fsdp": OLD},
    "hybrid": HYBRID,
    "hybrid-1": HYBRID | {"fsdp": Fsdp(version="1", replicas=2)},
    "hybrid-tensor": HYBRID | {"model": LLAMA, "layout": Layout(tensor=2)},
    "ddp-tensor": {"model": LLAMA, "strategy": "ddp", "layout": Layout(tensor=2, sequence=True), "accumulation": 2},
    "pipeline-tensor": {"model": LLAMA, "accumulation": 4, "layout": Layout(pipeline=2, tensor=2)},
    "pipeline-fsdp": PIPED | {"strategy": "fsdp-full-shard"},
} | rare(
    {
        "hybrid-grad-op": {"strategy": "fsdp-hybrid-shard-grad-op", "fsdp": Fsdp(replicas=2), "accumulation": 2},
        "fsdp-tensor": {"model": LLAMA, "strategy": "fsdp-full-shard", "layout": Layout(tensor=2), "accumulation": 2},
        "pipeline-ddp": PIPED | {"strategy": "ddp"},
        "pipeline-mlp-fsdp": PIPED | {"model": MLP, "strategy": "fsdp-full-shard"},
        "pipeline-mlp-of-4": {"model": MLP, "accumulation": 4, "layout": Layout(pipeline=4)},
        "pipeline-of-4": {"accumulation": 8, "layout": Layout(pipeline=4)},
        "interleaved-ddp": {
            "strategy": "ddp", "accumulation": 4, "layout": Layout(pipeline=2, schedule="interleaved", chunks=2),
        },
    }
)  # fmt: skip
EIGHT: dict[str, Fields] = rare(
    {
        "all-ddp": {"model": LLAMA, "strategy": "ddp", "layout": Layout(tensor=2, pipeline=2), "accumulation": 4},
        "all-fsdp": {
            "model": LLAMA, "strategy": "fsdp-full-shard", "layout": Layout(tensor=2, pipeline=2), "accumulation": 4,
        },
    }
)  # fmt: skip


@pytest.fixture(scope="module")
def alone() -> dict[str, Measurement]:
    return references([GPT2, LLAMA, TIED, MLP])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("matrix")


@pytest.fixture(scope="module")
def two(folder: Path) -> Runs:
    (there := folder / "two").mkdir()
    return both({name: plan(2, **fields) for name, fields in TWO.items()}, 2, there)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def four(two: Runs, folder: Path) -> Runs:
    """Beside its own runs, those that go on from two ranks."""
    (there := folder / "four").mkdir()
    moved = {
        f"from {name}": Job(
            plan(4, **fields), steps=STEPS, out=there / f"from {name}", options=(("resume", True),),  # type: ignore[arg-type]
            copy=(folder / "two" / name / SAVED, there / f"from {name}" / SAVED),
        )
        for name, fields in MOVES.values()
    }  # fmt: skip
    return both({name: plan(4, **fields) for name, fields in FOUR.items()}, 4, there, more=moved)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def one(two: Runs, folder: Path) -> dict[str, Measurement]:
    """What goes on from two ranks alone."""
    found = {}
    settings = Training(steps=STEPS, measure_steps=0, learning_rate=1e-3, resume=True)
    with join(Rank(rank=0, local=0, world=1), "cpu", 0) as process:
        for name, _ in MOVES.values():
            out = folder / "one" / name
            shutil.copytree(folder / "two" / name / SAVED, out / SAVED)
            found[name] = train(plan(1, model=two.plans[name].model), settings, process, out=out)
    return found


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


@pytest.mark.parametrize("name", [name for name, _ in MOVES.values()])
def test_a_run_goes_on_with_other_ranks(two: Runs, four: Runs, one: dict[str, Measurement], name: str) -> None:
    wanted, moved = two.whole[name], four.resumed[f"from {name}"]
    assert len(wanted.losses) == STEPS
    for losses, evaluation in ((moved.losses, moved.evaluation), (one[name].losses, one[name].evaluation_loss)):
        assert losses == pytest.approx(wanted.losses, abs=5e-5, rel=0)
        assert evaluation == pytest.approx(wanted.evaluation, abs=5e-5, rel=0)


def test_the_docs_promise_these_moves() -> None:
    text = (ROOT / "docs" / "running.md").read_text(encoding="utf-8")
    table = text.partition("| on 2 ranks | on 4 ranks |")[2].partition("\n\n")[0]
    assert re.findall(r"^\| ([^|-][^|]*?) \| ([^|]*?) \|", table, re.MULTILINE) == list(MOVES)


@pytest.fixture(scope="module")
def eight(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    plans = {name: plan(8, **fields) for name, fields in EIGHT.items()}  # type: ignore[arg-type]
    return both(plans, 8, tmp_path_factory.mktemp("eight"))


@pytest.mark.parametrize("name", EIGHT)
def test_data_tensor_and_pipeline_parallel_at_once(eight: Runs, alone: dict[str, Measurement], name: str) -> None:
    check_losses(eight, name, alone)
    check_peak(eight, name, 1.0)
    check_resumed(eight, name)
