"""What cannot work is refused before anything is searched, started or made; what has no effect is refused, too."""

from __future__ import annotations

import importlib
import json
import os
import time
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from memcalc.cli.app import app
from memcalc.cli.closed import _ASKED
from memcalc.cli.recommend import CLOSED
from memcalc.configs.text import parse_text
from memcalc.errors import LONGEST, FileError, UnknownNameError
from memcalc.hf.reading import UnknownModelType, of_config, read_model
from memcalc.hf.rows import TYPES
from memcalc.layout import Layout
from memcalc.models import MODELS
from memcalc.plan import Plan
from memcalc.rehearsal import unrehearsed
from memcalc.search import WITHOUT, search
from memcalc.training import Training

TINY = Plan(model=MODELS["gpt2-tiny"], tokens=16, micro_batch=1, device="cpu", optimizer_kind="for-loop")


def refused(*words: str | Path, code: int = 2) -> str:
    result = CliRunner().invoke(app, [str(word) for word in words])
    assert result.exit_code == code, result.output
    assert result.stdout == "", "nothing is shown before it is refused"
    return result.stderr


@pytest.fixture
def plan(tmp_path: Path) -> Path:
    TINY.save(tmp_path / "plan.json")
    return tmp_path / "plan.json"


@pytest.mark.parametrize("dry", [(), ("--dry-run",)])
def test_data_that_never_ends_is_refused_before_a_folder_is_made(plan: Path, dry: tuple[str, ...]) -> None:
    pipe = plan.parent / "pipe"
    os.mkfifo(pipe)
    for data in (Path("/dev/zero"), pipe):
        said = refused("launch", plan, "--data", data, "--out", plan.parent / "run", *dry)
        assert f"data {data} is a device, a pipe or a socket" in said
    assert not (plan.parent / "run").exists()
    Training(data=plan), Training(data=plan.parent)


@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize("dry", [(), ("--dry-run",)])
def test_odd_data_is_refused_before_a_rank_starts(plan: Path, dry: tuple[str, ...]) -> None:
    """tests/test_data.py has more of what data may be."""
    here = plan.parent
    (here / "empty").mkdir()
    for name, content in (("none.txt", b""), ("short.txt", b"short"), ("noise", bytes(999)), ("odd.bin", b"abc")):
        (here / name).write_bytes(content)
    before = sorted(here.rglob("*"))
    for option, name, message in (
        ("--data", "none.txt", "none.txt is empty"),
        ("--data", "short.txt", "short.txt has 5 tokens; at least 33 are needed for samples of 16"),
        ("--data", "noise", "noise is not text; give text"),
        ("--data", "odd.bin", "odd.bin has 3 bytes; a .bin of uint16 token ids"),
        ("--data", "empty", "empty holds no text files"),
        ("--tokenizer", "empty", "empty is no file; give a tokenizer.json"),
        ("--tokenizer", "noise", "noise is not valid JSON"),
        ("--tokenizer", "none.txt", "none.txt is empty"),
        ("--tokenizer", "odd.bin", "odd.bin is not valid JSON"),
    ):
        said = refused("launch", plan, option, here / name, "--out", here / "run", *dry)
        assert message in said and said.count("\n") == 1
    assert sorted(here.rglob("*")) == before


@pytest.mark.parametrize(
    ("option", "most"),
    [
        ("--steps", "1,000,000,000"), ("--seed", "2,147,483,647"), ("--eval-every", "1,000,000,000"),
        ("--checkpoint-every", "1,000,000,000"), ("--measure-steps", "1,000,000,000"), ("--max-restarts", "1,000"),
        ("--keep-checkpoints", "1,000,000,000"), ("--nodes", "1,000,000,000,000"),
    ],
)  # fmt: skip
def test_a_number_too_large_is_one_line(plan: Path, option: str, most: str) -> None:
    launch = ("launch", plan, "--dry-run", "--out", plan.parent / "run", option)
    above = str(int(most.replace(",", "")) + 1)
    assert refused(*launch, above) == f"memcalc: {option} {above} must be at most {most}\n"
    assert refused(*launch, "9" * 5000) == f"memcalc: {option} '{'9' * 56}... must be at most {most}\n"
    assert refused(*launch, "1e18") == f"memcalc: {option} '1e18' is not a whole number\n"
    assert refused(*launch, "-1").startswith(f"memcalc: {option} -1 must be at least ")


@pytest.mark.parametrize("dry", [(), ("--dry-run",)])
def test_a_dry_run_refuses_the_folders_that_a_run_refuses(plan: Path, dry: tuple[str, ...]) -> None:
    circle, used = plan.parent / "circle", plan.parent / "used"
    circle.symlink_to(circle)
    used.mkdir()
    (used / "mine.txt").write_text("x")
    launch = ("launch", plan, *dry, "--out")
    assert "is a file" in refused(*launch, plan)
    assert "in a circle" in refused(*launch, circle)
    assert "in a circle" in refused(*launch, circle / "run")
    assert "is not empty" in refused(*launch, used)
    assert "nothing to resume" in refused(*launch, plan.parent / "none", "--resume")
    assert sorted(path.name for path in plan.parent.iterdir()) == ["circle", "plan.json", "used"]


def test_a_dry_run_is_for_machines_that_are_not_this_one(plan: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.access", lambda *_: False)
    assert "no permission" in refused("launch", plan, "--out", "/shared/run")
    result = CliRunner().invoke(app, ["launch", str(plan), "--out", "/shared/run", "--dry-run"])
    assert result.exit_code == 0, result.output


def test_a_node_rank_that_is_typed_needs_several_nodes(plan: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ("launch", str(plan), "--out", str(plan.parent / "run"), "--dry-run")
    assert "--node-rank is for several nodes" in refused(*words, "--node-rank", "0")
    monkeypatch.setenv("SLURM_NODEID", "0")
    result = CliRunner().invoke(app, [*words, "--on-oom", "next"])
    assert result.exit_code == 0, result.output
    assert "the line does not go on with another plan" in result.stderr


@pytest.mark.parametrize(
    ("words", "option"),
    [
        (("--batch-size", "4"), "--batch-size"),
        (("--checkpointing", "full"), "--checkpointing"),
        (("--input-shape", "10", "--batch-size", "4", "--checkpointing", "full"), "--checkpointing"),
    ],
)
def test_options_of_activations_need_activations(words: tuple[str, ...], option: str) -> None:
    assert f"{option} changes nothing" in refused("estimate", "--params", "1e6", *words)
    shaped = ["estimate", "--params", "1e6", "--input-shape", "10", "--layers", "2"]
    rest = [word for word in words if word not in ("--input-shape", "10")]
    assert CliRunner().invoke(app, [*shaped, *rest]).exit_code == 0


def test_the_folder_of_a_launch_file_is_looked_at_before_the_search(plan: Path) -> None:
    for target in (plan, plan / "below", Path("/dev/null"), Path("/proc/x")):
        said = refused("recommend", "gpt2-tiny", "--device", "cpu", "--gpus", "1", "--emit", "torchrun", target)
        assert f"{target} cannot be" in said


def test_too_few_micro_batches_for_a_pipeline_are_known_without_a_process() -> None:
    piped = replace(TINY, ranks=2, layout=Layout(pipeline=2))
    assert "1 micro batch a step for 2 stages of 1f1b; give --accumulation 2" in unrehearsed(piped)
    assert not unrehearsed(replace(piped, accumulation=2))
    assert not unrehearsed(replace(piped, layout=Layout(pipeline=2, schedule="gpipe")))


def test_giant_names_are_refused_at_once(tmp_path: Path) -> None:
    giant = "x" * 10**7
    started = time.process_time()
    with pytest.raises(UnknownModelType, match="is not known"):
        of_config({"model_type": giant}, "config.json", "")
    with pytest.raises(UnknownNameError):
        raise UnknownNameError("GPU", giant, ["t4"])
    with pytest.raises(FileError, match="more than 64 KiB"):
        parse_text("\n".join(f"key{number}: 1" for number in range(80_000)), "fsdp.yaml")
    assert time.process_time() - started < 1
    assert max(map(len, TYPES)) <= LONGEST
    for file in ("a" * 5000, "a\0b"):
        index = tmp_path / "model.safetensors.index.json"
        index.write_text(json.dumps({"metadata": {"total_size": 8}, "weight_map": {"w": file}}))
        with pytest.raises(FileError, match="which is not a file beside the index") as error:
            read_model(index)
        assert len(str(error.value)) < 300 + len(str(index))


def test_what_is_no_yaml_is_said_with_its_reason() -> None:
    with pytest.raises(FileError, match=r"the character U\+0000 at position 4 is none of YAML's"):
        parse_text("a: b\0", "fsdp.yaml")


def test_an_output_that_cannot_be_written_is_refused_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def work(*_: object, **__: object) -> None:
        raise AssertionError("it worked before it looked")

    for name in (
        "recommend.recommend", "calibrate.machine.measure", "calibrate.published.fit", "estimate.estimate",
        "cli.report.subject", "cli.plot.subject",
    ):  # fmt: skip
        where, _, what = f"memcalc.{name}".rpartition(".")
        monkeypatch.setattr(importlib.import_module(where), what, work)
    cpu = ("gpt2-tiny", "--device", "cpu", "--gpus", "1")
    for words, end in [
        (("recommend", *cpu, "--save-plan"), "json"), (("estimate", *cpu, "--save-plan"), "json"),
        (("calibrate", "--device", "cpu", "--ranks", "1", "-o"), "json"), (("calibrate", "--published", "-o"), "json"),
        (("report", *cpu, "-o"), "html"), (("plot", *cpu, "-o"), "svg"),
    ]:  # fmt: skip
        target = tmp_path / "none" / f"out.{end}"
        assert f"{target} cannot be written: there is no folder {target.parent}" in refused(*words, target)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("without", "other"),
    [
        ("checkpointing", "--checkpointing full"), ("checkpointing", "--reentrant"), ("every-n", "--checkpointing every-2"),
        ("selective", "--checkpoint-policy matrix-products"), ("tensor-parallel", "--tensor-parallel 2"),
        ("pipeline-parallel", "--pipeline-parallel 2"), ("fused", "--optimizer-kind fused"), ("ddp", "--only ddp"),
        ("chunked-loss", "--loss-chunks 8"), ("offload", "--offload-optimizer cpu"), ("ddp", "--only ddp,zero-1"),
        ("zero-1", "--strategy zero-1"), ("torch", "--strategy ddp"),
    ],
)  # fmt: skip
def test_what_is_closed_and_asked_for_is_refused(without: str, other: str) -> None:
    said = refused("recommend", "gpt2", "--gpus", "2", "--gpu", "t4", "--without", without, *other.split())
    assert said == f"memcalc: --without {without} and {other} contradict each other; leave one out\n"


def test_every_choice_that_can_be_closed_can_be_asked_for() -> None:
    assert set(_ASKED) == set(WITHOUT) == set(CLOSED)


def test_groups_of_strategies_are_left_out_together() -> None:
    job = search(
        replace(TINY, ranks=2, strategy="ddp"), capacity=2**33, strategies=["ddp", "deepspeed-2"], without=["torch"]
    )
    assert job.strategies == ("deepspeed-2",)
    for group in ("torch", "all"):
        said = refused("recommend", "gpt2", "--gpus", "2", "--gpu", "t4", "--without", group)
        assert f"--without {group} leaves no strategy to choose from; name others with --only" in said
