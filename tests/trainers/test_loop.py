"""What the loop says about itself: the speed of its steps alone, and the loss of every step."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from memcalc.measurement import Measurement
from memcalc.training import Training
from tests.trainers.runs import plan
from trainers import loop
from trainers.process import Rank, join

PLAN = plan()  # 8 samples of 32 tokens a step
ALONE = Rank(rank=0, local=0, world=1)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("0123456789abcdef" * 1000)
    return path


def train(out: Path | None, lines: list[str], **options: Any) -> Measurement:
    settings = Training(measure_steps=0, **options)
    with join(ALONE, "cpu", settings.seed) as process:
        return loop.train(PLAN, settings, process, out=out, say=lines.append)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step takes a second; an evaluation, a checkpoint and a look at the meter take a thousand."""
    now = [0.0]
    monkeypatch.setattr(loop, "time", SimpleNamespace(perf_counter=lambda: now[0]))

    def takes(name: str, seconds: float) -> None:
        original = getattr(loop._Run, name)

        def timed(self: Any, *arguments: Any) -> None:
            original(self, *arguments)
            now[0] += seconds

        monkeypatch.setattr(loop._Run, name, timed)

    takes("step", 1.0)
    for name in ("evaluate", "save", "read_meter"):
        takes(name, 1000.0)


def test_every_seed_gives_masks_of_their_own() -> None:
    seeds = [
        loop.mask_seed(seed, step, rank)
        for seed in (0, 1, 2**31 - 1) for step in (0, 1, 10**9) for rank in (0, 1, 4095)
    ]  # fmt: skip
    assert len(set(seeds)) == len(seeds)
    for seed in seeds:
        torch.manual_seed(seed)


def test_the_number_of_metered_steps_is_kept() -> None:
    with join(ALONE, "cpu", 0) as process:
        made = {steps: loop.train(plan("mlp-tiny"), Training(steps=steps), process).ranks[0].steps for steps in (1, 4)}
    assert made == {1: 1, 4: 3}


@pytest.mark.parametrize(
    "options", [{}, {"eval_every": 7}, {"checkpoint_every": 3}, {"eval_every": 5, "checkpoint_every": 4}]
)
@pytest.mark.usefixtures("clock")
def test_only_steps_count_as_time(tmp_path: Path, text: Path, options: dict[str, int]) -> None:
    lines: list[str] = []
    record = train(tmp_path / "run", lines, steps=60, data=text, **options)
    speeds = {match[1] for line in lines if (match := re.search(r"([\d,]+) tokens/s", line))}
    assert speeds == {"256"}
    assert (record.samples_per_second, record.tokens_per_second) == (8, 256)
    assert Measurement.from_json(tmp_path / "run" / "run.json").tokens_per_second == 256


def test_a_checkpoint_holds_the_losses_up_to_it(tmp_path: Path, text: Path) -> None:
    whole, again = tmp_path / "whole", tmp_path / "again"
    lines: list[str] = []
    # Lines are said every 2 steps, checkpoints are saved every 7: the window is half full at every second one.
    losses = train(whole, lines, steps=42, data=text, checkpoint_every=7).losses
    assert len(losses) == 42
    for step in (7, 14, 21):
        saved = json.loads((whole / "checkpoints" / f"step-{step}" / "done.json").read_text())
        assert saved["losses"] == losses[:step]
    shutil.copytree(whole / "checkpoints" / "step-7", again / "checkpoints" / "step-7")
    resumed = train(again, lines, steps=42, data=text, resume=True)
    assert resumed.losses == pytest.approx(losses, abs=1e-6, rel=0)
    assert Measurement.from_json(again / "run.json").losses == resumed.losses


def test_a_run_that_is_done_is_left_as_it_is(tmp_path: Path, text: Path) -> None:
    lines: list[str] = []
    train(tmp_path / "run", lines, steps=3, data=text)
    before = (tmp_path / "run" / "run.json").read_bytes()
    train(tmp_path / "run", lines, steps=3, data=text, resume=True)
    assert lines[-1] == "already at step 3; give more --steps to go on"
    assert (tmp_path / "run" / "run.json").read_bytes() == before
