"""Launch files on the command line: estimated, launched and written."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner, Result

from memcalc.cli.app import app
from memcalc.configs.emit import text_of
from memcalc.configs.sayable import narrowed
from memcalc.configs.scripts import sbatch, torchrun
from memcalc.configs.write import FORMATS
from memcalc.errors import PlanError
from memcalc.loss import Loss
from memcalc.models import MODELS
from memcalc.plan import Plan
from memcalc.search import search
from memcalc.strategies import STRATEGIES
from memcalc.structures import structures
from memcalc.training import Training
from tests.launch_files import ACCELERATE_FSDP_2, FSDP, TUTORIAL

Run = Callable[..., Result]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, machine: SimpleNamespace) -> Run:
    """``run("estimate", ...)`` in a folder with the files, on a machine of two cores without a GPU."""
    monkeypatch.chdir(tmp_path)
    for name, text in (("fsdp.yaml", FSDP), ("ds.json", TUTORIAL), ("accelerate.yaml", ACCELERATE_FSDP_2)):
        Path(name).write_text(text)
    return lambda *words: CliRunner().invoke(app, list(words))


@pytest.mark.parametrize(
    ("file", "words", "options"),
    [
        ("fsdp.yaml", [], ["--strategy", "fsdp-full-shard", "--gpus", "8", "--precision", "amp-fp16", "--checkpointing", "full", "--reentrant",
                           "--offload-parameters", "cpu", "--offload-optimizer", "cpu", "--tensor-parallel", "2"]),
        ("ds.json", ["--gpus", "8"], ["--strategy", "deepspeed-2", "--gpus", "8", "--precision", "fp16-master", "--optimizer-kind", "fused",
                                      "--offload-optimizer", "cpu", "--batch-size", "4", "--clip-norm"]),
        ("ds.json", ["--gpus", "8", "--precision", "bf16-master"], ["--strategy", "deepspeed-2", "--gpus", "8", "--precision", "bf16-master",
                     "--optimizer-kind", "fused", "--offload-optimizer", "cpu", "--batch-size", "4", "--clip-norm"]),
        ("accelerate.yaml", ["--batch-size", "2"], ["--strategy", "fsdp-full-shard", "--gpus", "4", "--precision", "amp-bf16", "--reduce-dtype",
                             "compute", "--batch-size", "2"]),
        ("fsdp.yaml", ["--scale-to-ranks", "2"], ["--strategy", "fsdp-full-shard", "--gpus", "2", "--precision", "amp-fp16", "--checkpointing",
                       "full", "--reentrant", "--device", "cpu"]),
    ],
)  # fmt: skip
def test_a_file_is_the_options_it_stands_for(run: Run, file: str, words: list[str], options: list[str]) -> None:
    told = run("estimate", "gpt2", "--config", file, *words, "--save-plan", "told.json", "--format", "json")
    said = run("estimate", "gpt2", *options, "--save-plan", "said.json", "--format", "json")
    assert (told.exit_code, said.exit_code) == (0, 0), told.stderr + said.stderr
    assert Plan.load("told.json") == Plan.load("said.json")
    assert told.stdout == said.stdout


def test_what_was_not_taken_as_it_stands_goes_to_stderr(run: Run) -> None:
    done = run("estimate", "gpt2", "--config", "ds.json", "--gpus", "8", "--format", "json")
    json.loads(done.stdout)
    assert all(line.startswith("memcalc: ds.json: ") for line in done.stderr.splitlines())
    assert "offload_param cpu is ignored" in done.stderr


def test_an_idle_key_is_named(run: Run) -> None:
    tree = json.loads(TUTORIAL)
    tree["zero_optimization"]["stage3_max_live_parameters"] = 5
    Path("idle.json").write_text(json.dumps(tree))
    done = run("estimate", "gpt2", "--config", "idle.json")
    assert "idle.json: max live parameters 5 changes nothing: it is for deepspeed-3" in done.stderr


def test_no_option_of_launch_stands_twice() -> None:
    spelled = [name for param in app.get_command(None, "launch").params for name in param.opts]  # type: ignore[union-attr,arg-type]
    assert len(spelled) == len(set(spelled))
    assert {"--precision", "--nodes", "--config", "--schedule", "--checkpoint-every", "--checkpointing"} <= set(spelled)


def test_a_scaled_file_is_launched(run: Run, stub: Callable[[str], None]) -> None:
    stub("(out / 'words.json').write_text(json.dumps(sys.argv)); sys.exit(3)")
    done = run("launch", "gpt2-tiny", "--config", "fsdp.yaml", "--scale-to-ranks", "2", "--seq-len", "32")
    assert done.exit_code == 1, done.stderr
    assert "8 -> 2 ranks, layout tensor 2 -> 1, device cuda -> cpu" in done.stderr
    plan = Plan.load("checkpoints/plan.json")
    assert (plan.ranks, plan.strategy, plan.precision, plan.tokens) == (2, "fsdp-full-shard", "amp-fp16", 32)
    words = json.loads(Path("checkpoints/words.json").read_text())
    assert words[words.index("--checkpoint-every") + 1] == "1000"


def test_options_of_the_run_win_over_the_file(run: Run, stub: Callable[[str], None]) -> None:
    stub("(out / 'words.json').write_text(json.dumps(sys.argv)); sys.exit(3)")
    words = ["--scale-to-ranks", "2", "--out", "mine", "--checkpoint-every", "7"]
    assert run("launch", "gpt2-tiny", "--config", "fsdp.yaml", *words).exit_code == 1
    given = json.loads(Path("mine/words.json").read_text())
    assert given[given.index("--checkpoint-every") + 1] == "7"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--out", "run"], "give PLAN.json, as recommend --save-plan writes it, or a MODEL with --config FILE"),
        (["plan.json", "--out", "run", "--gpus", "2"], "plan.json says the whole plan; leave out --gpus"),
        (["plan.json", "--out", "run", "--scale-to-ranks", "2"], "--scale-to-ranks scales what a launch file says"),
        (["gtp2-tiny", "--config", "fsdp.yaml"], "unknown model 'gtp2-tiny'; did you mean 'gpt2-tiny'?"),
        (["gpt2-tiny", "--config", "accelerate.yaml"], "--out DIR is missing"),
        (
            ["gpt2-tiny", "--config", "accelerate.yaml", "--out", "run"],
            "the plan needs 4 GPUs, this machine has no GPU",
        ),
    ],
)
def test_launching_a_file_that_cannot_run_here(run: Run, words: list[str], message: str) -> None:
    done = run("launch", *words)
    assert done.exit_code == 2
    assert message in done.stderr.splitlines()[-1]
    assert not Path("run").exists()


def test_the_block_class_of_a_config_is_known(run: Run, tmp_path: Path) -> None:
    tiny = tmp_path / "mine"
    tiny.mkdir()
    (tiny / "config.json").write_text(json.dumps({"model_type": "llama", "num_hidden_layers": 1, "vocab_size": 64}))
    wraps = ACCELERATE_FSDP_2.replace(
        "fsdp_config:", "fsdp_config:\n  fsdp_transformer_layer_cls_to_wrap: LlamaDecoderLayer"
    )
    Path("wraps.yaml").write_text(wraps)
    done = run("estimate", str(tiny), "--config", "wraps.yaml", "--seq-len", "64", "--batch-size", "1")
    assert done.exit_code == 0, done.output
    assert "is not known" not in done.stderr
    Path("wraps.yaml").write_text(wraps.replace("LlamaDecoderLayer", "GPT2Block"))
    done = run("estimate", str(tiny), "--config", "wraps.yaml", "--seq-len", "64", "--batch-size", "1")
    assert done.exit_code == 2 and "its blocks are LlamaDecoderLayer" in done.stderr


@pytest.mark.parametrize("kind", ["fsdp", "deepspeed", "accelerate", "torchrun", "sbatch"])
def test_a_recommended_plan_is_written_and_estimated_again(run: Run, kind: str) -> None:
    strategy = (
        ["--strategy", "deepspeed-2", "--precision", "bf16-master"]
        if kind == "deepspeed"
        else ["--strategy", "fsdp-full-shard"]
    )
    words = ["recommend", "gpt2", "--gpus", "8", "--gpu", "a100-80gb", *strategy, "--emit", kind, "made"]
    done = run(*words)
    assert done.exit_code == 0, done.stderr
    plan = Plan.load("made/plan.json")
    (file,) = [path for path in Path("made").iterdir() if path.name != "plan.json"]
    assert f"wrote {file} and made/plan.json" in done.stderr
    again = run(*words)
    assert again.exit_code == 2
    assert f"{file}, made/plan.json are there already; add --replace" in again.stderr
    assert run(*words, "--replace").exit_code == 0
    if kind in ("torchrun", "sbatch"):
        assert subprocess.run(["bash", "-n", str(file)], check=False).returncode == 0
        return
    beside = ["--batch-size", str(plan.micro_batch)] if kind != "deepspeed" else ["--gpus", "8"]
    if plan.loss.chunks:  # no launch file says how the training script takes its loss
        beside += ["--loss-chunks", str(plan.loss.chunks), "--chunk-head"]
    told = run("estimate", "gpt2", "--gpu", "a100-80gb", "--config", str(file), *beside, "--save-plan", "told.json")
    assert told.exit_code == 0, told.stderr
    assert Plan.load("told.json") == plan


def test_what_cannot_be_written_leaves_nothing(run: Run) -> None:
    words = ["recommend", "gpt2", "--gpus", "8", "--gpu", "a100-80gb", "--strategy", "ddp"]
    done = run(*words, "--emit", "fsdp", "made")
    assert done.exit_code == 2
    assert "the fsdp file cannot say strategy ddp" in done.stderr
    assert not Path("made").exists()
    assert "unknown format 'fdsp'; did you mean 'fsdp'?" in run(*words, "--emit", "fdsp", "made").stderr
    assert "--replace belongs to --emit" in run(*words, "--replace").stderr
    Path("taken").write_text("")
    assert "taken cannot be made" in run(*words, "--emit", "accelerate", "taken").stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--only", "deepspeed", "--emit", "fsdp"],
         "--emit fsdp: the fsdp file cannot say strategy deepspeed-0; it has: fsdp-full-shard, fsdp-no-shard; take --emit "
         "deepspeed or accelerate"),
        (["--precision", "bf16", "--emit", "fsdp"], "--emit fsdp: the fsdp file cannot say precision bf16; it has: amp-fp16"),
        (["--optimizer", "adafactor", "--emit", "deepspeed"], "--emit deepspeed: a DeepSpeed file cannot say optimizer adafactor"),
        (["--checkpointing", "every-2", "--emit", "accelerate"], "--emit accelerate: accelerate cannot say a checkpoint every 2"),
    ],
)  # fmt: skip
def test_what_no_plan_of_a_search_can_say_is_found_before_it(
    run: Run, words: list[str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules["memcalc.recommend"], "recommend", lambda *args, **options: pytest.fail("searched"))
    done = run("recommend", "gpt2", "--gpus", "8", "--gpu", "a100-80gb", *words, "made")
    assert (done.exit_code, done.stdout) == (2, "")
    assert message in done.stderr
    assert not Path("made").exists()


@pytest.mark.parametrize("kind", FORMATS)
def test_only_what_the_file_can_say_is_searched(kind: str) -> None:
    """All of it, and nothing else: exactly the plans that are then written."""
    base = Plan(
        model=MODELS["gpt2"], tokens=1024, micro_batch=1, ranks=8, strategy="ddp", gpu="a100-80gb", precision="amp-bf16"
    )
    few: dict[str, Any] = {
        "tensors": (1, 2),
        "pipelines": (1, 2),
        "checkpoints": (0, 1, 2),
        "kinds": ("foreach",),
        "losses": (Loss(),),
    }
    job = search(base, strategies=[row.name for row in STRATEGIES.values()], **few)
    found, names = narrowed(job, kind, named=True)
    assert set(names) == {row.name for row in STRATEGIES.values() if FORMATS[kind].takes(row)}
    able = []
    for each in structures(job):
        with contextlib.suppress(PlanError):
            text_of(each.plan, kind, Training())
            able.append(each)
    assert list(structures(found)) == able
    usual = search(base, **few)
    assert narrowed(usual, kind, named=False)[1] == tuple(
        name for name in names if name in usual.strategies or kind == "deepspeed"
    )


def test_the_scripts_say_nodes_and_ranks() -> None:
    plan = Plan(
        model=MODELS["gpt2"],
        tokens=64,
        micro_batch=1,
        strategy="ddp",
        ranks=8,
        nodes=2,
        allocator="expandable_segments:True",
    )
    text = sbatch(plan, Training(steps=7))
    for part in (
        "#SBATCH --nodes=2",
        "#SBATCH --gpus-per-node=4",
        "srun memcalc launch",
        "--steps 7",
        '--nodes 2 --rdzv "$head":"$port"',
    ):
        assert part in text
    with pytest.raises(PlanError, match="for one machine, take --emit sbatch"):
        torchrun(plan, Training())
    text = torchrun(dataclasses.replace(plan, nodes=1), Training(steps=7))
    for part in (
        "--nproc-per-node 8",
        '-m trainers "$here"/plan.json "$out" --steps 7',
        "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
        'python="${PYTHON:-python}"\n',
        'exec "$python" -m torch.distributed.run --standalone ',
    ):
        assert part in text
