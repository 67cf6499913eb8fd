"""The command line as people use it: answers, exit codes, and one line for every mistake."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from memcalc.cli import estimate as estimate_command
from memcalc.cli.app import app
from memcalc.estimate import estimate
from memcalc.models import MODELS
from memcalc.plan import Plan
from memcalc.timeline import MOMENTS

KEYS = ["plan", "allocated", "reserved", "device", "host", "parameters", "verdict", "assumptions"]
GPT2 = Plan(model=MODELS["gpt2-tiny"], tokens=128, micro_batch=1)

Run = Callable[..., Result]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """``run("estimate", "gpt2")`` in an empty folder."""
    monkeypatch.chdir(tmp_path)
    return lambda *words: CliRunner().invoke(app, list(words))


def asked(run: Run, *words: str) -> dict[str, Any]:
    """The JSON of an estimate."""
    result = run("estimate", *words, "--format", "json")
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.output)
    return found


def test_a_billion_parameters_with_adam(run: Run) -> None:
    lines = run("estimate", "--params", "1e9", "--adam").output.splitlines()
    text = "\n".join(" ".join(line.split()) for line in lines)
    assert text.startswith("peak 20 GB (18.626 GiB) in the moment step")
    for row in (
        "model states parameters 4 GB 3.725 GiB",
        "gradients 4 GB 3.725 GiB",
        "optimizer states 8 GB 7.451 GiB",
        "model states in all 16 GB 14.901 GiB",
        "temporary list in the optimizer step (foreach) 4 GB 3.725 GiB",
        "peak 20 GB 18.626 GiB",
        "activations are not counted because no shape was given",
    ):
        assert row in text, row
    for meter in ("allocated (", "reserved (", "device (", "host ("):
        assert meter in text
    held = next(line for line in lines if "GPUs that hold it" in line)
    assert held.split(":")[1].split() == ["rtx-4090,", "rtx-a5000,", "rtx-3090,", "titan-rtx", "and", "20", "larger"]


def test_meters_of_the_cpu_are_not_called_by_those_of_a_gpu(run: Run) -> None:
    words = ("estimate", "gpt2-tiny", "--format", "csv")
    names = ("max_memory_allocated", "max_memory_reserved", "nvidia-smi")
    assert all(name in run(*words).output for name in names)
    cpu = run(*words, "--device", "cpu").output
    assert "allocated (all tensors)" in cpu and not any(name in cpu for name in names)


def test_a_fused_step_needs_no_temporary_list(run: Run) -> None:
    found = asked(run, "--params", "1e9", "--adam", "--optimizer-kind", "fused")
    assert found["allocated"]["peak_bytes"] == 16 * 10**9


@pytest.mark.parametrize("count", ["1e9", "1_000_000_000", "1B", "1b", "1000M"])
def test_a_count_is_read_however_it_is_written(run: Run, count: str) -> None:
    assert asked(run, "--params", count)["parameters"] == 10**9


def test_json_has_exactly_its_keys_and_is_the_library_s(run: Run) -> None:
    found = asked(run, "gpt2-tiny")
    assert list(found) == KEYS
    assert found == json.loads(json.dumps(estimate(GPT2).to_dict()))


def test_csv_is_plain_bytes(run: Run) -> None:
    rows = list(csv.DictReader(io.StringIO(run("estimate", "gpt2-tiny", "--format", "csv").output)))
    peak = next(row for row in rows if row["what"] == "peak")
    assert int(peak["low_bytes"]) == int(peak["high_bytes"]) == estimate(GPT2).peak.bytes
    at_peak = [int(row["low_bytes"]) for row in rows if row["group"] == peak["group"] and row is not peak]
    assert sum(at_peak) == estimate(GPT2).peak.bytes


def test_explain_adds_up_to_the_peak(run: Run) -> None:
    lines = json.loads(run("estimate", "gpt2-tiny", "--explain", "--format", "json").output)
    assert sum(line["bytes"] for line in lines) == estimate(GPT2).peak.bytes
    assert {"name": "h.*.mlp.c_fc.weight", "category": "parameters", "formula": "256 × 64 × 4 B"}.items() <= next(
        line.items() for line in lines if line["name"] == "h.*.mlp.c_fc.weight"
    )
    by_category: dict[str, int] = {}
    for line in lines:
        by_category[line["category"]] = by_category.get(line["category"], 0) + line["bytes"]
    assert by_category == {name: size for name, size in estimate(GPT2).peak.by_category.items() if size}


def test_markdown_has_no_escape_codes_and_one_table(run: Run) -> None:
    text = run("estimate", "gpt2-tiny", "--format", "markdown").output
    assert text.startswith("**peak ")
    assert "\033" not in text
    assert sum(line.startswith("|--") for line in text.splitlines()) == 1


def test_the_example_with_images_and_stated_activations(run: Run) -> None:
    stated = ["--params", "1e9", "--adam", "--batch-size", "32", "--input-shape", "224x224x3", "--layers", "5"]
    found = asked(run, *stated, "--activation-per-layer", "64KB", "--save-plan", "plan.json")
    assert "taken for the whole micro batch of 32" in " ".join(found["assumptions"])
    plan = Plan.load(Path("plan.json"))
    assert (plan.model.features, plan.model.layer_bytes, plan.micro_batch) == (150528, 64000, 32)
    kept = made_in_forward(plan)
    assert kept["activations"] == 5 * 64_000 + 5 * pad(64_000)
    assert kept["inputs"] == 32 * 602_112


def made_in_forward(plan: Plan) -> dict[str, int]:
    """Bytes by category: activations of the forward pass, and one batch of inputs without its targets."""
    step = estimate(plan).timeline
    made = {"activations": 0, "inputs": 0}
    for moment, ident, delta in zip(step.moment, step.ident, step.delta, strict=True):
        if delta > 0 and MOMENTS[moment] == "forward":
            made["activations"] += int(delta)
        if delta > 0 and step.names[ident] == "inputs":
            made["inputs"] = int(delta)
    return made


def pad(size: int) -> int:
    """What rounding up to a block of 512 B adds."""
    return -size % 512


def test_layers_times_batch_times_sample_times_four(run: Run) -> None:
    asked(
        run, "--params", "1e9", "--layers", "5", "--batch-size", "32", "--sample-size", "1024", "--save-plan", "p.json"
    )
    assert made_in_forward(Plan.load(Path("p.json")))["activations"] == 5 * 32 * 1024 * 4


def test_changed_numbers_of_a_named_model(run: Run) -> None:
    run("estimate", "gpt2", "--hidden", "1024", "--heads", "16", "--layers", "24", "--save-plan", "medium.json")
    model, medium = Plan.load(Path("medium.json")).model, MODELS["gpt2-medium"]
    assert (model.hidden, model.heads, model.kv_heads, model.ffn) == (1024, 16, 16, 4096)
    assert model.name == "gpt2 (layers 24, hidden 1024, heads 16)"
    assert asked(run, "--plan", "medium.json")["parameters"] == asked(run, "gpt2-medium")["parameters"]
    assert medium.layers == model.layers


def test_several_gpus_mean_ddp_and_the_cpu_its_own_optimizer_loop(run: Run) -> None:
    plan = asked(run, "gpt2-tiny", "--gpus", "4")["plan"]
    assert (plan["strategy"], plan["ranks"], plan["optimizer_kind"]) == ("ddp", 4, "foreach")
    assert asked(run, "gpt2-tiny", "--device", "cpu")["plan"]["optimizer_kind"] == "for-loop"


def test_a_saved_plan_gives_the_same_answer(run: Run) -> None:
    first = asked(run, "gpt2-tiny", "--precision", "amp-bf16", "--checkpointing", "full", "--save-plan", "plan.json")
    assert asked(run, "--plan", "plan.json") == first


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["gpt2-tiny", "--gpu", "t4"], 0),
        (["llama-3-70b", "--gpu", "t4"], 1),
        (["--params", "1t", "--gpu", "t4"], 1),
    ],
)
def test_check_exits_1_when_it_does_not_fit(run: Run, words: list[str], code: int) -> None:
    result = run("estimate", *words, "--check", "--format", "json")
    assert result.exit_code == code
    assert (json.loads(result.stdout)["verdict"] == "does-not-fit") == bool(code)
    assert result.stderr.startswith("memcalc: does not fit: it needs at least ") == bool(code)
    assert len(result.stderr.splitlines()) == code


def test_a_plan_of_thousands_of_blocks_says_that_it_takes_a_while(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "SLOW = 2000" in Path(estimate_command.__file__).read_text(encoding="utf-8")
    monkeypatch.setattr(estimate_command, "SLOW", 5)
    words = ("estimate", "--params", "1e9", "--layers")
    assert run(*words, "4").stderr == ""
    assert run(*words, "5").stderr == "memcalc: plays 5 blocks one by one, about a second for every thousand\n"


def test_a_plan_file_may_begin_with_a_byte_order_mark(run: Run) -> None:
    first = asked(run, "gpt2-tiny", "--save-plan", "plan.json")
    Path("plan.json").write_bytes(b"\xef\xbb\xbf" + Path("plan.json").read_bytes())
    assert asked(run, "--plan", "plan.json") == first


def test_values_of_a_plan_file_that_clash_are_said_with_the_file(run: Run) -> None:
    run("estimate", "gpt2-tiny", "--save-plan", "plan.json")
    text = Path("plan.json").read_text(encoding="utf-8")
    for old, new, said in (
        ('"ranks": 1', '"ranks": 4', "strategy single runs on 1 rank, not 4"),
        ('"adamw"', '"adamv"', "unknown optimizer 'adamv'; did you mean"),
        ('"hidden": ', '"hidden": -', "model: model gpt2-tiny: hidden -"),
    ):
        Path("clash.json").write_text(text.replace(old, new), encoding="utf-8")
        done = run("estimate", "--plan", "clash.json")
        assert done.exit_code == 2
        assert done.stderr.startswith(f"memcalc: clash.json: {said}")
        assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("words", [[], ["--help"], ["-h"]])
def test_the_group_explains_itself(run: Run, words: list[str]) -> None:
    result = run(*words)
    assert result.exit_code == 0
    assert "Examples:" in result.output
    assert "  estimate " in result.output


def test_the_help_lists_the_catalogs(run: Run) -> None:
    text = " ".join(run("estimate", "--help").output.split()).replace("- ", "-")
    for name in (
        "fsdp-full-shard",
        "amp-bf16: float32 weights and states",
        "adamw-8bit",
        "a100-80gb",
        "efficient",
        "markdown",
    ):
        assert name in text


NET = "from torch import nn\n\n\ndef Net():\n    return nn.Linear(12, 4)\n"


@pytest.mark.parametrize("command", ["estimate", "recommend", "strategies", "rehearse", "launch"])
def test_the_help_says_that_a_model_may_be_a_file_or_code(run: Run, command: str) -> None:
    text = " ".join(run(command, "--help").output.split())
    for word in ("config.json of Hugging Face", "its folder", "--module", f"memcalc {command} my-llama/config.json"):
        assert word in text, word


@pytest.mark.parametrize("command", ["bench", "explain-meters", "doctor", "snapshot", "validate", "compare"])
def test_the_help_lists_formats(run: Run, command: str) -> None:
    text = " ".join(run(command, "--help").output.split())
    assert "table, markdown, csv, json" in text or "[table|markdown|csv|json]" in text


def test_every_example_in_the_help_runs(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net.py").write_text(NET)
    header = json.dumps({"w": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}).encode()
    (tmp_path / "weights.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(16))
    (tmp_path / "my-llama").mkdir()
    (tmp_path / "my-llama" / "config.json").write_text('{"model_type": "llama", "num_hidden_layers": 1}')
    text = run("estimate", "--help").output
    examples = [line.split() for line in text.splitlines() if line.startswith("    memcalc estimate ")]
    assert 4 <= len(examples) <= 13
    for example in examples:
        result = run(*example[1:])
        assert result.exit_code == (1 if "--check" in example else 0), (example, result.output)


def test_the_version_is_the_package_s(run: Run) -> None:
    import memcalc

    assert run("--version").output == f"memcalc {memcalc.__version__}\n"
