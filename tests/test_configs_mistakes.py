"""Launch files that are wrong: one line each, with the file and the key, and exit code 2."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from memcalc.cli.app import app
from memcalc.configs import read
from memcalc.configs.batch import Batch
from memcalc.errors import MemcalcError, PlanError
from tests.launch_files import ACCELERATE_FSDP_1, FSDP, TUTORIAL

Run = Callable[..., Result]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """``run("ds.json", text, "gpt2")`` estimates with a file of that text."""
    monkeypatch.chdir(tmp_path)

    def estimate(name: str, text: str, *words: str) -> Result:
        Path(name).write_text(text)
        return CliRunner().invoke(app, ["estimate", "--config", name, *(words or ("gpt2-tiny",))])

    return estimate


def fsdp(key: str, value: str) -> tuple[str, str]:
    lines = [line for line in FSDP.splitlines() if f" {key}:" not in line]
    return "run.yaml", "\n".join([*lines, f"  {key}: {value}"])


def zero(**keys: object) -> tuple[str, str]:
    return "ds.json", json.dumps({"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 2, **keys}})


def top(**keys: object) -> tuple[str, str]:
    return "ds.json", json.dumps({"train_micro_batch_size_per_gpu": 1, **keys})


MISTAKES = [
    (fsdp("world_size", "0"), "run.yaml: fsdp_config.world_size 0 must be at least 1"),
    (fsdp("world_size", "-8"), "fsdp_config.world_size -8 must be at least 1"),
    (fsdp("world_size", "2.5"), "fsdp_config.world_size 2.5 is not a whole number"),
    (fsdp("world_size", "'8'"), "world_size '8' is not a number; it is text: write it without quotes"),
    (fsdp("fp16", "maybe"), "fsdp_config.fp16 'maybe' is not true or false"),
    (fsdp("device", "tpu"), "fsdp_config.device 'tpu' is none of: cuda, cpu"),
    (fsdp("local_rank", "8"), "local_rank 8 is not below world_size 8"),
    (fsdp("sharding_strategy", "FULL_SHARD"), "accelerate's YAML, which begins with distributed_type: FSDP and says it fsdp_sharding_strategy"),
    (fsdp("fsdp_offload_params", "true"), "fsdp_config.fsdp_offload_params is a key of accelerate's YAML, which begins with"),
    (fsdp("wrld_size", "8"), "unknown key 'fsdp_config.wrld_size'; did you mean fsdp_config.world_size?"),
    (fsdp("offload_params", "false\n  offload_optimizer_state: true"), "stands twice"),
    (fsdp("fp16", "!!python/object/apply:os.system ['true']"), "has the tag 'tag:yaml.org,2002:python/object"),
    (fsdp("fp16", "!!binary aGk="), "has the tag"),
    (("run.yaml", "fsdp_config: &a\n  world_size: 2\nmore: *a\n"), "is used again by an alias"),
    (("run.yaml", "a: &a [x, x]\nb: &b [*a, *a]\nc: [*b, *b]\n"), "is used again by an alias"),
    (("run.yaml", "base: &b {world_size: 2}\nfsdp_config:\n  <<: *b\n"), "line 3"),
    (("run.yaml", "fsdp_config: {a: 1\n"), "run.yaml is not valid YAML: line 2"),
    (("run.yaml", "--- {}\n--- {}\n"), "is not valid YAML"),
    (("run.yaml", "[" * 5000), "run.yaml is not valid YAML"),
    (("run.yaml", ""), "run.yaml is empty"),
    (("run.yaml", "a: 1" + " " * 2**20), "has more than 1 MiB"),
    (("run.yaml", "fsdp_config: 3\n"), "fsdp_config is 3, which is not a block of keys"),
    (("run.yaml", "fsdp_config:\n  1: 2\n"), "the key 1 in fsdp_config. is not text; put it in quotes"),
    (("run.yaml", "- 1\n"), "is no launch file that memcalc reads; it reads an fsdp_config block"),
    (("run.yaml", "model_type: gpt2\n"), "it is the config of a model"),
    (("run.yaml", "fsdp_config:\n  world_size: " + "9" * 5000), "run.yaml is not valid YAML: a number in it cannot be read"),
    (("args.json", '{"output_dir": "o", "bf16": true, "gradient_accumulation_steps": 4, "deepspeed": "ds.json"}'),
     "args.json is a file of arguments for Hugging Face's Trainer, no launch file: give the DeepSpeed file it names, --config 'ds.json', and"),
    (("args.json", '{"output_dir": "o", "fsdp": "full_shard auto_wrap", "fsdp_config": {"activation_checkpointing": true}}'),
     "give accelerate's YAML (distributed_type: FSDP"),
    (("args.json", '{"output_dir": "o", "deepspeed": {"zero_optimization": {"stage": 3}}}'), "write its block deepspeed into a file of its own"),
    (("factory.yaml", "model_name_or_path: a/b\nstage: sft\nfinetuning_type: lora\nbf16: true\n"),
     "factory.yaml is a file of LLaMA-Factory's arguments, no launch file: it says no strategy; give what it says as options"),
    (("factory.yaml", "finetuning_type: full\ndeepspeed: examples/ds_z3.json\n"), "--config 'examples/ds_z3.json'"),
    (("fsdp.json", '{"transformer_layer_cls_to_wrap": ["GPT2Block"], "activation_checkpointing": true}'),
     "is the fsdp_config of Hugging Face's Trainer (transformer_layer_cls_to_wrap): memcalc reads accelerate's YAML"),
    (("run.yaml", "fsdp_config:\n  transformer_layer_cls_to_wrap: GPT2Block\n"), "begins with distributed_type: FSDP and says it fsdp_transformer_layer_cls_to_wrap"),
    (("plan.json", '{"memcalc_plan": 1}'), "it is a plan of memcalc; give it to --plan"),
    (("ds.json", '{"train_batch_size": 1, "train_batch_size": 2}'), "the key 'train_batch_size' stands twice"),
    (("ds.json", '{"train_batch_size": NaN}'), "NaN is not a number JSON knows"),
    (("ds.json", '{"train_batch_size": 1'), "ds.json is not valid JSON"),
    (top(optimzer={}), "unknown key 'optimzer'; did you mean optimizer?"),
    (top(train_batch_size=-32), "train_batch_size -32 must be at least 1"),
    (top(train_batch_size=True), "train_batch_size True is not a number"),
    (top(gradient_accumulation_steps="Auto"), "gradient_accumulation_steps 'Auto' is not a number"),
    (top(fp16={"enabled": True}, bf16={"enabled": True}), "fp16 and bf16 are both enabled"),
    (top(amp={"enabled": True}), "amp {'enabled': True}: is Apex"),
    (top(zero_optimization=True), "a form DeepSpeed gave up"),
    (top(optimizer={"type": "OneBitAdam"}), "unknown optimizer.type 'OneBitAdam'; did you mean"),
    (top(optimizer={"type": "Adam", "params": {"momentum": 0.9}}), "optimizer.params.momentum is no parameter of Adam"),
    (top(optimizer={"type": "AdamW", "params": {"betas": 0.9}}), "optimizer.params.betas 0.9 is not a list of numbers"),
    (top(data_types={"grad_accum_dtype": "bf16"}), "grad_accum_dtype bf16 is neither float32 nor what fp32 trains in"),
    (zero(stage=4), "zero_optimization.stage 4 does not exist"),
    (zero(stage="two"), "zero_optimization.stage 'two' is not a number"),
    (zero(reduce_bucket_size=0), "zero_optimization.reduce_bucket_size 0 must be at least 1"),
    (zero(reduce_bucket_size=1.5), "reduce_bucket_size 1.5 is not a whole number"),
    (zero(reduce_buckt_size=5), "did you mean zero_optimization.reduce_bucket_size?"),
    (zero(offload_optimizer={"device": "disk"}), "device 'disk' is none of: none, cpu, nvme"),
    (zero(stage=3, offload_param={"device": "nvme"}), "offload_param to nvme needs nvme_path"),
    (zero(zero_quantized_weights=True), "zero_quantized_weights True: changes what DeepSpeed holds"),
    (zero(mics_shard_size=8), "was removed from DeepSpeed"),
    (("run.yaml", ACCELERATE_FSDP_1.replace("type: FSDP", "type: FSPD")), "unknown distributed_type 'FSPD'; did you mean 'FSDP'?"),
    (("run.yaml", ACCELERATE_FSDP_1.replace("FULL_SHARD", "FULL")), "fsdp_sharding_strategy 'FULL' is none of: FULL_SHARD"),
    (("run.yaml", ACCELERATE_FSDP_1.replace("'bf16'", "fp8")), "mixed_precision 'fp8' is none of"),
    (("run.yaml", ACCELERATE_FSDP_1.replace("processes: 2", "processes: two")), "num_processes 'two' is not a number"),
    (("run.yaml", "distributed_type: MEGATRON_LM\n"), "unknown distributed_type 'MEGATRON_LM'"),
]  # fmt: skip


@pytest.mark.parametrize(("file", "message"), MISTAKES, ids=[message for _, message in MISTAKES])
def test_a_mistake_is_one_line(run: Run, file: tuple[str, str], message: str) -> None:
    done = run(*file)
    assert (done.exit_code, done.stdout) == (2, "")
    (line,) = [line for line in done.stderr.splitlines() if message in line]
    assert line.startswith("memcalc: ") and file[0] in line
    assert len(done.stderr.splitlines()[-1]) < 700


def test_yaml_without_pyyaml_says_what_to_install(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "yaml", None)
    done = run("run.yaml", FSDP)
    assert done.exit_code == 2
    assert "run.yaml is YAML, which needs PyYAML: pip install pyyaml" in done.stderr
    assert run("ds.json", TUTORIAL).exit_code == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--config", "gone.json", "gpt2"], "gone.json does not exist"),
        (["--config", ".", "gpt2"], ". is a folder"),
        (["--config", "ds.json"], "give a model, one of"),
        (["--scale-to-ranks", "2", "gpt2"], "--scale-to-ranks scales what a launch file says; give one with --config"),
        (["--config", "ds.json", "--plan", "plan.json"], "--plan plan.json and --config ds.json both say"),
        (
            ["--config", "ds.json", "gpt2", "--gpus", "7"],
            "train batch 32 does not divide over accumulation 1 x 7 ranks",
        ),
        (["--config", "ds.json", "gpt2", "--gpus", "2", "--scale-to-ranks", "4"], "contradict each other"),
        (["--config", "ds.json", "gpt2", "--bucket-mb", "5"], "--bucket-mb is for DDP's buckets"),
    ],
)
def test_what_stands_beside_a_file_is_checked(run: Run, words: list[str], message: str) -> None:
    Path("ds.json").write_text(TUTORIAL)
    done = CliRunner().invoke(app, ["estimate", *words])
    assert (done.exit_code, done.stdout) == (2, "")
    assert message in done.stderr.splitlines()[-1]


@pytest.mark.parametrize(
    ("batch", "ranks", "cures"),
    [
        # bigcode-project/starcoder issue 41: DeepSpeed saw one rank where eight were started.
        (Batch(train=256, micro=4, accumulation=8), 1, ("train batch 32", "accumulation 64", "micro batch 32", "8 GPUs")),
        # sahil280114/codealpaca issue 14: an accumulation of 4 was given, the file said 1.
        (Batch(train=256, micro=8, accumulation=1), 8, ("train batch 64", "accumulation 4", "micro batch 32", "32 GPUs")),
        # OpenRLHF/OpenRLHF issue 346: 7 ranks.
        (Batch(train=256, micro=2, accumulation=18), 7, ("train batch 252",)),
        (Batch(train=256, micro=2), 7, ("train batch 252 or 266", "8 GPUs")),
    ],
)  # fmt: skip
def test_a_batch_that_does_not_divide_is_refused_with_what_would(
    batch: Batch, ranks: int, cures: tuple[str, ...]
) -> None:
    """deepspeedai/DeepSpeed issues 17, 3228 and 6914: train batch is not micro batch x accumulation x world size."""
    with pytest.raises(PlanError) as caught:
        batch.settled(ranks, "ds.json")
    for cure in cures:
        assert cure in str(caught.value).partition("what would do: ")[2]


@given(micro=st.integers(1, 9), rounds=st.integers(1, 9), ranks=st.integers(1, 9), missing=st.sampled_from(["train", "micro", "accumulation", ""]))  # fmt: skip
def test_any_one_number_of_a_batch_follows_from_the_others(micro: int, rounds: int, ranks: int, missing: str) -> None:
    whole = {"train": micro * rounds * ranks, "micro": micro, "accumulation": rounds}
    given = {name: value for name, value in whole.items() if name != missing}
    assert Batch(**given).settled(ranks, "f") == Batch(**whole)
    assert Batch(**whole).ranks() == ranks


@given(train=st.integers(1, 500), micro=st.integers(1, 20), ranks=st.integers(1, 20))
def test_what_would_do_does(train: int, micro: int, ranks: int) -> None:
    try:
        found = Batch(train=train, micro=micro).settled(ranks, "f")
    except PlanError as error:
        trains, _, gpus = str(error).partition("what would do: train batch ")[2].partition(", or ")
        for cure in trains.split(" or "):
            assert Batch(train=int(cure), micro=micro).settled(ranks, "f").train == int(cure)
        if gpus:
            Batch(train=train, micro=micro).settled(int(gpus.split()[0]), "f")
        return
    assert found.train == train == (found.micro or 0) * (found.accumulation or 0) * ranks


LEAVES = st.one_of(st.none(), st.booleans(), st.integers(-5, 10**20), st.floats(), st.text(max_size=5), st.sampled_from(["auto", "cpu", "nvme"]))  # fmt: skip
WORDS = st.sampled_from([
    "zero_optimization", "stage", "offload_param", "device", "fp16", "enabled", "optimizer", "type", "params", "fsdp_config",
    "distributed_type", "world_size", "fsdp_version", "deepspeed_config", "zero_stage", "gpu_ids", "train_batch_size", "x",
])  # fmt: skip
TREES = st.recursive(LEAVES, lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(WORDS, inner, max_size=5)), max_leaves=12)  # fmt: skip


@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(tree=st.dictionaries(WORDS, TREES, max_size=5))
def test_any_tree_is_read_or_refused_in_one_line(tmp_path: Path, tree: dict[str, object]) -> None:
    path = tmp_path / "any.json"
    path.write_text(json.dumps(tree))
    try:
        read(path)
    except MemcalcError as error:
        assert "\n" not in str(error)


@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    text=st.text(alphabet="ab:&*!<>|-[]{}'\"#%\n\t 0.~@`\x00é", max_size=40), name=st.sampled_from(["a.yaml", "a.json"])
)
def test_any_text_is_read_or_refused_in_one_line(tmp_path: Path, text: str, name: str) -> None:
    path = tmp_path / name
    path.write_text(text, encoding="utf-8", newline="")
    try:
        read(path)
    except MemcalcError as error:
        assert "\n" not in str(error)
