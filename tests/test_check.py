"""``memcalc check`` and ``memcalc solve`` as people and builds use them."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner, Result

from memcalc.cli.app import app
from memcalc.cli.recommend import CLOSED
from memcalc.cli.solve import FOR
from memcalc.estimate import estimate
from memcalc.fitting import PROCESS_BYTES
from memcalc.gate import gate
from memcalc.models import MODELS
from memcalc.plan import Plan
from memcalc.search import RAM_SHARE, WITHOUT
from memcalc.solve import QUANTITIES

Run = Callable[..., Result]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.chdir(tmp_path)
    return lambda *words: CliRunner().invoke(app, list(words))


def test_the_names_of_the_options_are_those_of_the_tables() -> None:
    assert tuple(QUANTITIES) == FOR
    assert tuple(WITHOUT) == CLOSED


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["gpt2-tiny", "--gpu", "t4"], 0, "gpt2-tiny in fp32, single on 1 x t4: fits: it needs up to"),
        (["gpt2-xl", "--gpu", "t4"], 1, "does not fit: it needs at least"),
        (["gpt2-tiny", "--gpu", "t4", "--keep-free", "99%"], 1, "that stay free"),
        (["--params", "1e9", "--gpu", "a100-80gb"], 1, "not known to fit"),
    ],
)
def test_a_verdict_is_one_line_and_an_exit_code(run: Run, words: list[str], code: int, said: str) -> None:
    result = run("check", *words)
    assert result.exit_code == code
    (line,) = result.stdout.splitlines()
    assert said in line


@pytest.mark.parametrize(
    ("words", "ram", "code", "said"),
    [
        (["gpt2-tiny", "--gpus", "2"], 2**33, 0, "ddp on 2 ranks on CPU cores: fits: it needs up to"),
        (["gpt2-tiny"], 2**20, 1, "single on 1 rank on CPU cores: does not fit: it needs at least"),
        (["gpt2-tiny", "--keep-free", "99.99%"], 2**33, 1, "that stay free"),
        (["--params", "1e6"], 2**33, 1, "not known to fit"),
        (["gpt2-tiny"], 0, 2, "does not say how much RAM it has"),
    ],
)
def test_a_run_on_cpu_cores_is_held_against_ram(
    run: Run, monkeypatch: pytest.MonkeyPatch, words: list[str], ram: int, code: int, said: str
) -> None:
    monkeypatch.setattr("memcalc.machine.detect", lambda: SimpleNamespace(gpus=(), cores=2, ram_bytes=ram))
    result = run("check", *words, "--device", "cpu")
    assert result.exit_code == code
    (line,) = result.output.splitlines()
    assert said in line


def test_examples_and_exit_codes_stand_before_the_options_of_a_plan(run: Run) -> None:
    text = run("check", "--help").output
    assert 0 < text.index("Examples:") < text.index("Exit codes:") < text.index("--params COUNT")


def test_ranks_on_cpu_cores_share_ram_to_the_byte() -> None:
    found = estimate(Plan(model=MODELS["gpt2-tiny"], tokens=64, micro_batch=1, device="cpu", ranks=2, strategy="ddp"))
    each = found.device.high + PROCESS_BYTES  # as recommend counts a rank
    below = int(2 * each / RAM_SHARE) - 4
    assert int(below * RAM_SHARE) // 2 < each
    least = next(ram for ram in count(below) if int(ram * RAM_SHARE) // 2 == each)
    assert gate(found, ram=least).verdict == gate(found, keep_free=5, ram=least + 5).verdict == "fits"
    assert gate(found, ram=least - 3).verdict == "tight"
    assert gate(found, ram=found.device.low).verdict == "does-not-fit"


def test_between_the_bounds_it_is_not_said_to_fit(run: Run) -> None:
    low, high = (json.loads(run("check", "gpt2-tiny", "--gpu", "t4", "--format", "json").stdout)[f"needed_{end}_bytes"] for end in ("low", "high"))  # fmt: skip
    whole = json.loads(run("check", "gpt2-tiny", "--gpu", "t4", "--format", "json").stdout)["limit_bytes"]
    result = run("check", "gpt2-tiny", "--gpu", "t4", "--keep-free", f"{whole - (low + high) // 2}", "--format", "json")
    assert result.exit_code == 1
    assert json.loads(result.stdout)["verdict"] == "tight"


def test_a_saved_plan_is_checked_on_its_card_or_another(run: Run) -> None:
    run("estimate", "gpt2-large", "--gpu", "a100-80gb", "--save-plan", "plan.json")
    assert run("check", "plan.json").exit_code == 0
    result = run("check", "plan.json", "--gpu", "rtx-2080", "--format", "csv")
    assert result.exit_code == 1
    (row,) = csv.DictReader(io.StringIO(result.stdout))
    assert (row["verdict"], row["gpu"]) == ("does-not-fit", "rtx-2080")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["check", "gpt2"], "--gpu NAME"),
        (["check", "gpt2", "--gpu", "t4", "--keep-free", "100%"], "below 100%"),
        (["check", "gpt2", "--gpu", "t4", "--keep-free", "90GiB"], "cannot be kept free"),
        (["check", "missing.json", "--gpu", "t4"], "missing.json"),
        (["solve", "gpt2", "--gpu", "t4"], "--for with one of micro-batch, seq-len, gpus, layers, params"),
        (["estimate", "gpt2", "--lora"], "No such option: --lora; memcalc says it --adapter lora"),
        (["estimate", "gpt2", "--qlora"], "--adapter lora --quantize nf4-double"),
        (["solve", "gpt2", "--for", "micro-batches", "--gpu", "t4"], "did you mean 'micro-batch'"),
        (["solve", "gpt2", "--for", "micro-batch", "--batch-size", "4", "--gpu", "t4"], "leave one out"),
        (["solve", "gpt2", "--for", "params", "--gpu", "t4"], "ask for layers"),
        (["solve", "gpt2", "--for", "layers"], "--gpu NAME"),
        (["solve", "gpt2", "--for", "layers", "--device", "cpu"], "memcalc check"),
        (["recommend", "gpt2", "--gpu", "t4", "--without", "offloat"], "did you mean 'offload'"),
        (["recommend", "gpt2", "--gpu", "t4", "--only", "zero1"], "did you mean 'zero-1'"),
        (["recommend", "gpt2", "--gpu", "t4", "--gpus", "2", "--max-gpus", "4"], "leave one out"),
    ],
)
def test_mistakes_are_one_line_and_exit_with_2(run: Run, words: list[str], said: str) -> None:
    result = run(*words)
    assert result.exit_code == 2, result.output
    (line,) = result.stderr.splitlines()
    assert said in line


def test_solve_in_every_format(run: Run) -> None:
    words = ["solve", "gpt2-tiny", "--for", "micro-batch", "--gpu", "t4"]
    found = json.loads(run(*words, "--format", "json").stdout)
    assert found["needed_bytes"] <= found["limit_bytes"] < found["one_further_needs_bytes"]
    assert found["plan"]["micro_batch"] == found["value"]
    (row,) = csv.DictReader(io.StringIO(run(*words, "--format", "csv").stdout))
    assert int(row["value"]) == found["value"]
    line = run(*words).stdout
    assert line.startswith(f"largest micro-batch: {found['value']:,} samples per GPU; needs up to ")
    assert " of t4, in fp32; one step more would need " in line
    assert run(*words, "--format", "markdown").stdout == f"- {line}"


def test_solve_says_when_nothing_will_do(run: Run) -> None:
    result = run("solve", "gpt2-xl", "--for", "gpus", "--strategy", "ddp", "--gpu", "t4")
    assert result.exit_code == 1
    assert result.stderr.startswith("memcalc: none up to 4,096 GPUs will do: ddp needs ")


def test_the_number_of_gpus_is_chosen_and_the_cost_is_said(run: Run) -> None:
    closed = "tensor-parallel,pipeline-parallel,selective,every-n,chunked-loss"
    words = [
        "recommend",
        "gpt2",
        "--max-gpus",
        "4",
        "--gpu",
        "a10",
        "--tokens",
        "10b",
        "--keep-free",
        "20%",
        "--without",
        closed,
    ]
    found = json.loads(run(*words, "--format", "json").stdout)
    assert found["plans"][0]["plan"]["ranks"] == 4
    assert found["fewest"]["plan"]["ranks"] == 1
    for row in found["plans"]:
        ranks = row["plan"]["ranks"]
        middle = 10e9 / row["tokens_per_second"] * ranks / 3600
        for end in ("low", "high"):
            times = row[f"seconds_per_step_{end}"] / row["seconds_per_step"]
            assert row[f"gpu_hours_{end}"] == pytest.approx(middle * times)
        assert row["seconds_per_step_low"] <= row["seconds_per_step"] <= row["seconds_per_step_high"]
        assert row["headroom_bytes"] + row["needed_bytes"] == found["capacity_bytes"] - found["keep_free_bytes"]
    text = run(*words, "--explain").stdout
    assert "fewest ranks: " in text and "GPU-hours" in text and "time of 1: " in text and "plans in" in text
