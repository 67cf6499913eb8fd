"""What ``memcalc recommend`` shows, and what it says where nothing fits or something is mistaken."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import pytest

from memcalc.plan import Plan
from tests.recommending import Run, asked, recommender


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    return recommender(tmp_path, monkeypatch)


def test_the_table_shows_plans_reasons_and_what_comes_next(run: Run) -> None:
    result = run("gpt2-xl", "--gpus", "4", "--gpu", "a10", "--without", "tensor-parallel,pipeline-parallel")
    assert result.exit_code == 0, result.output
    lines = result.output.splitlines()
    assert "gpt2-xl: 1,557,611,200 parameters on 4 x a10" in lines[1]
    head = next(line for line in lines if "checkpointing" in line and "headroom" in line)
    assert head.split()[:3] == ["strategy", "ranks", "checkpointing"]
    assert any(line.startswith("  1: ") for line in lines)
    broken = next(line for line in lines if line.startswith("  does not fit: ddp"))
    assert "too much; at the peak in " in broken and "the largest part is optimizer, 12.461 GB (11.605 GiB)" in broken
    assert lines[-1] == "  memcalc launch plan.json --steps 200 --out run"


def test_json_holds_plans_that_can_be_read_back(run: Run) -> None:
    found = asked(run("gpt2", "--gpus", "2", "--gpu", "t4", "--format", "json", "--top", "2"))
    assert len(found["plans"]) == 2
    for row in found["plans"]:
        plan = Plan.from_dict(row["plan"])
        assert (plan.ranks, plan.gpu, plan.precision) == (2, "t4", "amp-fp16")
        assert row["peak_bytes"] < row["needed_bytes"] == found["capacity_bytes"] - row["headroom_bytes"]
        assert 0 < row["relative_speed"] <= 1


def test_csv_and_markdown(run: Run) -> None:
    rows = list(csv.DictReader(io.StringIO(run("gpt2", "--gpu", "t4", "--format", "csv").output)))
    assert rows[0]["strategy"] == "single"
    assert int(rows[0]["peak_bytes"]) > 10**9
    text = run("gpt2", "--gpu", "t4", "--format", "markdown").output
    assert text.startswith("**single: ")
    assert "|" in text


# -- what cannot be done ---------------------------------------------------------------------------


def test_when_nothing_fits_it_exits_with_1_and_says_what_would(run: Run) -> None:
    result = run("gpt2-xl", "--gpu", "t4", "--save-plan", "no.json")
    assert result.exit_code == 1
    (line,) = result.stderr.splitlines()
    assert line.startswith("memcalc: nothing fits; the closest is single, micro batch 1 on 1 rank")
    assert "what would do: --gpus 4, or --gpu " in line
    assert not Path("no.json").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["gpt2", "--gpus", "8"], "no GPU that can be seen"),
        (["gpt2", "--gpus", "0", "--gpu", "t4"], "--gpus 0 must be at least 1"),
        (["gpt2", "--gpu", "t5"], "did you mean 't4'"),
        (["gpt3", "--gpu", "t4"], "unknown model 'gpt3'"),
        (["gpt2", "--gpus", "3", "--gpu", "t4", "--global-batch", "8"], "take 6 or 9"),
        (
            ["gpt2", "--gpu", "t4", "--global-batch", "8", "--accumulation", "2"],
            "leave out --accumulation",
        ),
        (
            ["gpt2", "--gpu", "t4", "--global-batch", "8", "--batch-size", "3"],
            "no micro batch divides global batch 8",
        ),
        (["gpt2", "--gpu", "t4", "--device", "cpu"], "contradict each other"),
        (["gpt2", "--gpu", "t4", "--top", "0"], "--top 0 must be at least 1"),
        (
            ["gpt2", "--gpu", "t4", "--strategy", "single", "--gpus", "2"],
            "strategy single runs on 1 rank",
        ),
        (["gpt2", "--gpu", "t4", "--launch"], "--launch needs --out"),
        (["gpt2", "--gpu", "t4", "--steps", "5"], "belong to --launch"),
        (["gpt2", "--gpu", "t4", "--save-plan", "no/such/plan.json"], "there is no folder no/such"),
        (["gpt2", "--gpu", "t4", "--heads", "7"], "7"),
        (["--gpu", "t4"], "give a model"),
    ],
)
def test_mistakes_are_one_line_and_exit_with_2(run: Run, words: list[str], said: str) -> None:
    result = run(*words)
    assert result.exit_code == 2, result.output
    (line,) = result.stderr.splitlines()
    assert said in line


def test_help_teaches_by_example(run: Run) -> None:
    text = run("--help").output
    assert "memcalc recommend gpt2-xl --gpus 8 --gpu a100-80gb" in text
    assert "--allow-pure-16bit" in text


def test_of_a_model_known_by_its_size_no_micro_batch_is_made_up(run: Run) -> None:
    words = ["--params", "7b", "--gpus", "8", "--gpu", "a100"]
    result = run(*words)
    lines = result.output.splitlines()
    assert ": micro batch not given on 8 ranks, amp-bf16, checkpointing none" in lines[0]
    assert lines[1].startswith("7,000,000,000 parameters on 8 x a100-40gb")
    assert "micro batch 0" not in result.output
    assert (
        "  zero-1: whole tensors are handed to ranks, and of a model known by its size one tensor is known"
        in result.output
    )
    assert "one tensor is known" not in run(*words, "--layers", "32").output
    rows = list(csv.DictReader(io.StringIO(run(*words, "--format", "csv").output)))
    assert rows and all(row["micro_batch"] == "" for row in rows)


def test_what_is_true_of_several_plans_is_said_once(run: Run) -> None:
    lines = run(
        "gpt2-xl", "--gpus", "4", "--gpu", "rtx-4090", "--without", "tensor-parallel,pipeline-parallel"
    ).output.splitlines()
    assert sum("one fused kernel" in line for line in lines) == 1
    assert "  1, 2, 3, 4, 5: the optimizer's step is one fused kernel, without temporaries" in lines


def test_many_gpus_are_on_machines_of_eight(run: Run) -> None:
    text = run("gpt2-xl", "--gpus", "16", "--gpu", "h100", "--without", "tensor-parallel,pipeline-parallel").output
    assert "on 16 x h100-80gb on 2 machines" in text


def test_a_full_card_is_pointed_out(run: Run) -> None:
    text = run("gpt2-large", "--gpus", "4", "--gpu", "a10").output
    assert "5: less than 2% of the card is left" in text and "--keep-free 5%" in text
    text = run("gpt2-large", "--gpus", "4", "--gpu", "a10", "--keep-free", "10%").output
    assert "fits" in text and "of the card is left" not in text


@pytest.mark.parametrize("format_", ["table", "csv", "json"])
def test_seconds_of_cores_that_nobody_measured_are_not_said(run: Run, format_: str) -> None:
    words = ("gpt2-tiny", "--device", "cpu", "--gpus", "1", "--tokens", "1b", "--format", format_)
    text = run(*words).output
    if format_ == "json":
        first = json.loads(text)["plans"][0]
        unknown = {
            "seconds_per_step_low",
            "seconds_per_step",
            "seconds_per_step_high",
            "tokens_per_second",
            "mfu",
            "gpu_hours_low",
            "gpu_hours_high",
        }
        assert {name for name, value in first.items() if value is None} == unknown
    elif format_ == "csv":
        names, row = list(csv.reader(io.StringIO(text)))[:2]
        assert {name for name, cell in zip(names, row, strict=True) if not cell} >= {
            "seconds_per_step",
            "gpu_hours_low",
            "gpu_hours_high",
        }
        assert float(row[names.index("relative_speed")]) > 0.9
    else:
        assert "no seconds are said" in text and "tokens/s" not in text and "GPU-hours" not in text
