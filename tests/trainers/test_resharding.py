"""A run goes on with another number of ranks, another layout or another strategy, as if nothing had changed.

The table of docs/running.md has these moves and no others.
"""

from __future__ import annotations

import dataclasses
import re
import shutil
from pathlib import Path

import pytest

from memcalc.fsdp import Fsdp
from memcalc.layout import Layout
from memcalc.measurement import Measurement
from memcalc.training import Training
from tests.trainers.matrix import GPT2, HOST, LLAMA, OLD, STEPS, STOP, TIED, Fields, plan
from tests.trainers.runs import ROOT, Job, Result, run
from trainers.loop import train
from trainers.process import Rank, join

PIPE = {"accumulation": 4, "layout": Layout(pipeline=2)}
FULL: Fields = {"strategy": "fsdp-full-shard"}
MOVES: dict[tuple[str, str], tuple[Fields, Fields]] = {
    ("ddp", "ddp"): ({"strategy": "ddp"}, {"strategy": "ddp"}),
    ("zero-1", "zero-1"): ({"strategy": "zero-1"}, {"strategy": "zero-1"}),
    ("fsdp-full-shard", "fsdp-full-shard"): (FULL, FULL),
    ("fsdp-full-shard of FSDP 1", "fsdp-full-shard of FSDP 1"): (FULL | {"fsdp": OLD}, FULL | {"fsdp": OLD}),
    ("fsdp-shard-grad-op", "fsdp-hybrid-shard"): (
        {"strategy": "fsdp-shard-grad-op"},
        {"strategy": "fsdp-hybrid-shard", "fsdp": Fsdp(replicas=2)},
    ),
    ("fsdp-no-shard", "fsdp-no-shard"): ({"strategy": "fsdp-no-shard"}, {"strategy": "fsdp-no-shard"}),
    ("fsdp-full-shard, offloaded", "zero-1"): (FULL | {"offload": HOST}, {"strategy": "zero-1"}),
    ("tensor parallel", "tensor parallel in DDP"): (
        {"model": LLAMA, "layout": Layout(tensor=2)},
        {"model": LLAMA, "layout": Layout(tensor=2), "strategy": "ddp"},
    ),
    ("sequence parallel", "pipeline of 2 x tensor 2"): (
        {"model": LLAMA, "layout": Layout(tensor=2, sequence=True)},
        {"model": LLAMA, "layout": Layout(tensor=2, pipeline=2), "accumulation": 2},
    ),
    ("pipeline of 2", "pipeline of 4"): (PIPE, {"accumulation": 4, "layout": Layout(pipeline=4)}),
    ("pipeline of 2, tied", "fsdp-full-shard"): (PIPE | {"model": TIED}, FULL | {"model": TIED}),
    ("interleaved pipeline", "pipeline of 2 in DDP"): (
        {"accumulation": 4, "layout": Layout(pipeline=2, schedule="interleaved", chunks=2)},
        PIPE | {"strategy": "ddp"},
    ),
}
FROM = {f"from-{index}": before for index, (before, _) in enumerate(MOVES.values())}
TO = {f"from-{index}": after for index, (_, after) in enumerate(MOVES.values())}


@dataclasses.dataclass(frozen=True)
class Moved:
    """Runs on two ranks, and the same from their checkpoint on four ranks and on one."""

    whole: dict[str, Result]
    four: dict[str, Result]
    one: dict[str, Measurement]


@pytest.fixture(scope="module")
def moved(tmp_path_factory: pytest.TempPathFactory) -> Moved:
    folder, step = tmp_path_factory.mktemp("moved"), Path("checkpoints") / f"step-{STOP}"
    first = {
        name: Job(plan(2, **fields), steps=STEPS, out=folder / name, options=(("checkpoint_every", STOP),))  # type: ignore[arg-type]
        for name, fields in FROM.items()
    }
    whole = run(first, 2, folder, timeout=900)
    again = {
        name: Job(
            plan(4, **fields), steps=STEPS, out=folder / f"{name}-4", options=(("resume", True),),  # type: ignore[arg-type]
            copy=(folder / name / step, folder / f"{name}-4" / step),
        )
        for name, fields in TO.items()
    }  # fmt: skip
    one = {}
    with join(Rank(rank=0, local=0, world=1), "cpu", 0) as process:
        for name, fields in FROM.items():
            shutil.copytree(folder / name / step, folder / f"{name}-1" / step)
            settings = Training(steps=STEPS, measure_steps=0, learning_rate=1e-3, resume=True)
            alone = plan(1, model=fields.get("model", GPT2))  # type: ignore[arg-type]
            one[name] = train(alone, settings, process, out=folder / f"{name}-1")
    return Moved(whole, run(again, 4, folder, timeout=900), one)


@pytest.mark.parametrize("name", FROM)
def test_a_run_goes_on_with_other_ranks(moved: Moved, name: str) -> None:
    wanted = moved.whole[name]
    assert len(wanted.losses) == STEPS
    for found, evaluation in (
        (moved.four[name].losses, moved.four[name].evaluation),
        (moved.one[name].losses, moved.one[name].evaluation_loss),
    ):
        assert found == pytest.approx(wanted.losses, abs=5e-5, rel=0)
        assert evaluation == pytest.approx(wanted.evaluation, abs=5e-5, rel=0)


def test_the_docs_promise_these_moves() -> None:
    text = (ROOT / "docs" / "running.md").read_text(encoding="utf-8")
    table = text.partition("| on 2 ranks | on 4 ranks |")[2].partition("\n\n")[0]
    assert re.findall(r"^\| ([^|-][^|]*?) \| ([^|]*?) \|", table, re.MULTILINE) == list(MOVES)
