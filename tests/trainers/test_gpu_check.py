"""The GPU check tried out on the CPU: the same program, tiny models, no GPU behind it."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from memcalc.plan import Plan
from trainers import gpu_check
from trainers.gpu_cases import WORLD, cases

ROOT = Path(__file__).resolve().parents[2]

# As on a machine with torch and numpy and nothing else that memcalc uses.
BARE = """
import sys
from importlib.machinery import PathFinder
class Bare:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name.split(".")[0] not in {"click", "tabulate", "tokenizers"}:
            return PathFinder.find_spec(name, path, target)
sys.meta_path[:] = [Bare if finder is PathFinder else finder for finder in sys.meta_path]
from trainers.gpu_check import main
sys.exit(main(sys.argv[1:]))
"""


def report(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "cpu.json").read_text())
    return found


def test_with_torch_and_numpy_alone(tmp_path: Path) -> None:
    words = ["--device", "cpu", "--out", str(tmp_path), "--only", "gpt2-tiny.fsdp-full-shard.8.fp32"]
    done = subprocess.run([sys.executable, "-c", BARE, *words], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    found = report(tmp_path)
    assert [case["name"].rsplit(".", 1)[1] for case in found["cases"]] == ["none", "full", "accumulation"]
    for case in found["cases"]:
        assert case["status"] == "ok"
        assert case["states_equal"]
        assert abs(case["error_percent"]) < 1
        assert Plan.from_dict(case["plan"]).ranks == WORLD
    assert found["facts"]["torch"] == torch.__version__
    page = (tmp_path / "cpu.md").read_text()
    assert page.startswith("# Measured on cpu\n\n3 of 3 measured cases within 1 %")
    assert all(case["name"] in page for case in found["cases"])


@pytest.mark.parametrize("strategy", ["single.1", "ddp.8", "zero-1.8", "fsdp-shard-grad-op.8", "fsdp-no-shard.8"])
def test_every_strategy_runs_on_the_fake_group(tmp_path: Path, strategy: str) -> None:
    assert gpu_check.main(["--device", "cpu", "--out", str(tmp_path), "--only", f"gpt2-tiny.{strategy}.fp32.none"]) == 0
    assert all(case["status"] == "ok" for case in report(tmp_path)["cases"])


def test_what_does_not_fit_the_time_is_said(tmp_path: Path) -> None:
    assert gpu_check.main(["--device", "cpu", "--out", str(tmp_path), "--seconds", "0"]) == 1
    assert {(case["status"], case["message"]) for case in report(tmp_path)["cases"]} == {("skipped", "no time left")}


def test_a_case_that_breaks_is_a_result_and_the_next_one_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    causes: list[BaseException | None] = [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB\nmore"),
        RuntimeError("an illegal | access"),
        None,
    ]
    train = gpu_check.train

    def broken(plan: Plan, *rest: Any) -> Any:
        cause = causes.pop(0)
        if cause is None:
            return train(plan, *rest)
        raise cause

    monkeypatch.setattr(gpu_check, "train", broken)
    words = ["--device", "cpu", "--out", str(tmp_path), "--only", "gpt2-tiny.fsdp-full-shard.8.fp32"]
    assert gpu_check.main(words) == 1
    assert [case["status"] for case in report(tmp_path)["cases"]] == ["oom", "error", "ok"]
    assert "RuntimeError: an illegal / access" in (tmp_path / "cpu.md").read_text()


def test_a_case_that_hangs_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_check, "train", lambda *_: time.sleep(30))
    words = ["--device", "cpu", "--out", str(tmp_path), "--only", "gpt2-tiny.single.1.fp32.none", "--case-seconds", "1"]
    assert gpu_check.main(words) == 1
    assert [case["message"] for case in report(tmp_path)["cases"]] == ["took longer than 1 s"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_nothing_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu_check.main(["--out", str(tmp_path / "out")]) == 2
    assert "finds no CUDA device here" in capsys.readouterr().out
    assert not (tmp_path / "out").exists()


def test_the_cases_for_a_real_gpu() -> None:
    plans = cases(device="cuda", gpu="h200", torch="2.11")
    assert len(plans) >= 45
    sizes = [sum(weight.numel for weight in plan.family.weights(plan.model)) for plan in plans.values()]
    assert min(sizes) == 124_439_808
    assert 1.4e9 < max(sizes) < 1.6e9
    assert {plan.precision for plan in plans.values()} == {"fp32", "bf16", "amp-bf16"}
    assert {plan.ranks for plan in plans.values()} == {1, WORLD}
