"""Several nodes, restarts, and what follows when memory runs out: the calls and the words, with trainers that only talk."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import pytest
from click.testing import CliRunner

from memcalc.checkpoints import newest_checkpoint
from memcalc.cli.app import app
from memcalc.errors import InputError, MemcalcError, PlanError
from memcalc.failure import OutOfMemory
from memcalc.launch import Place, launch, torchrun
from memcalc.plan import Plan
from memcalc.training import Training
from tests.launching import PLAN, TWO, saves

pytestmark = pytest.mark.usefixtures("machine")
NODES = replace(TWO, ranks=4, nodes=2)


def test_one_node_meets_nobody() -> None:
    words = " ".join(torchrun(TWO, Training(), Place(restarts=3), Path("run"))[2:9])
    assert words == "torch.distributed.run --standalone --max-restarts 3 --nproc-per-node 2 -m"


def test_nodes_meet_under_one_name() -> None:
    first, second = (
        torchrun(NODES, Training(), Place(node=node, rendezvous="node0:29500"), Path("run")) for node in (0, 1)
    )
    assert first[first.index("--node-rank") + 1] == "0"
    assert second[second.index("--node-rank") + 1] == "1"
    assert {word for word in first if word.startswith("memcalc-")} == {
        word for word in second if word.startswith("memcalc-")
    }
    assert first[first.index("--nproc-per-node") + 1] == "2"


@pytest.mark.parametrize(
    ("plan", "place", "message", "kind"),
    [
        (NODES, Place(), "for 2 nodes; on each of them give --node-rank R and --rdzv HOST:PORT", PlanError),
        (TWO, Place(rendezvous="a:1"), "--rdzv is for several nodes", InputError),
        (NODES, Place(node=2, rendezvous="a:1"), "--node-rank 2 must be below the number of nodes, 2", InputError),
    ],
)
def test_places_that_cannot_be(
    tmp_path: Path, plan: Plan, place: Place, message: str, kind: type[MemcalcError]
) -> None:
    with pytest.raises(kind, match=message):
        launch(plan, out=tmp_path / "run", training=Training(), place=place)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("text", ["node0", "node0:", ":1", "a b:1", "a:123456", "tcp://a:1", "[::1:1"])
def test_a_rendezvous_is_a_host_and_a_port(text: str) -> None:
    with pytest.raises(InputError, match="is not HOST:PORT"):
        Place(rendezvous=text)
    assert Place(rendezvous="[::1]:29500").rendezvous == "[::1]:29500"


def test_a_dry_run_shows_what_would_be_called(tmp_path: Path) -> None:
    NODES.save(tmp_path / "plan.json")
    words = [
        "launch",
        str(tmp_path / "plan.json"),
        "--out",
        str(tmp_path / "run"),
        "--rdzv",
        "node0:29500",
        "--dry-run",
    ]
    result = CliRunner().invoke(app, words)
    call, srun = map(shlex.split, result.output.splitlines())
    real = torchrun(NODES, Training(), Place(rendezvous="node0:29500"), tmp_path / "run")
    assert [call[0], *call[1:]] == ["torchrun", *(w.replace("/run/plan.json", "/plan.json") for w in real[3:])]
    assert srun[:5] == ["srun", "--nodes", "2", "--ntasks-per-node", "1"]
    assert srun[5:7] == ["memcalc", "launch"] and "--rdzv" in srun
    assert not (tmp_path / "run").exists()
    again = CliRunner().invoke(app, [*srun[6:], "--node-rank", "1", "--dry-run"])
    assert shlex.split(again.output.splitlines()[0])[3:5] == ["--node-rank", "1"], again.output


OUT_OF_MEMORY = (
    "(out / 'errors').mkdir(exist_ok=True); (out / 'errors' / 'rank-0.json').write_text("
    + repr(
        json.dumps(
            {"rank": 0, "moment": "backward", "kind": "oom", "message": "CUDA out of memory", "allocated": 3 * 2**30}
        )
    )
    + ")\nsys.exit(1)\n"
)


def test_the_next_plan_goes_on_from_the_last_checkpoint(
    tmp_path: Path, stub: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    following = replace(PLAN, checkpoint_every=1)
    monkeypatch.setattr(
        import_module("memcalc.recommend"), "next_plan", lambda plan, capacity: None if plan == following else following
    )
    stub(
        "if '--resume' in sys.argv: print('resumed'); sys.exit(0)\n" + saves(5) + OUT_OF_MEMORY
    )  # the first try saves step 5 and fails
    lines: list[str] = []
    launch(PLAN, out=tmp_path / "run", training=Training(), on_oom_next=True, show=lines.append)
    assert "rank 0 of 1 ran out of memory in backward (estimated " in lines[0]
    assert "there, measured 3.221 GB" in lines[0]
    assert lines[0].endswith("; goes on with that")
    assert lines[1:] == ["resumed"]
    assert Plan.load(tmp_path / "run" / "plan.json") == following
    found = newest_checkpoint(tmp_path / "run")
    assert found is not None and found[0] == 5


def test_where_no_plan_is_left_memory_running_out_is_the_end(
    tmp_path: Path, stub: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[Plan] = []

    def next_plan(plan: Plan, capacity: int) -> Plan | None:
        tried.append(plan)
        return replace(plan, checkpoint_every=1) if len(tried) == 1 else None

    monkeypatch.setattr(import_module("memcalc.recommend"), "next_plan", next_plan)
    stub(OUT_OF_MEMORY)
    with pytest.raises(OutOfMemory, match="no plan for this model fits on this machine"):
        launch(PLAN, out=tmp_path / "run", training=Training(), on_oom_next=True, show=lambda line: None)
    assert [plan.checkpoint_every for plan in tried] == [0, 1]
