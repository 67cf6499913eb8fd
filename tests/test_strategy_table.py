"""``memcalc strategies``: the bytes that strategies send by closed forms, and lines that are estimates of one job."""

from __future__ import annotations

import csv
import io
import json
from dataclasses import replace
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given, settings

from memcalc.adapters import Adapter
from memcalc.cli.app import app
from memcalc.cli.strategies import _show
from memcalc.cli.summary import summary
from memcalc.estimate import estimate, holding_gpus
from memcalc.fsdp import Fsdp
from memcalc.hardware import GPUS
from memcalc.models import MODELS, Model
from memcalc.plan import Plan
from memcalc.rank_hardware import hardware_of
from memcalc.strategies import STRATEGIES
from memcalc.strategy_table import recipes, strategy_table
from memcalc.throughput import step_time
from memcalc.traffic import collectives, sent_bytes
from tests.plans import plans
from tests.test_module import PLAN as OWN

BILLION = Model(name="all in blocks", family="size", parameters=10**9, layers=10)


def sent(strategy: str, precision: str = "bf16", **fields: Any) -> float:
    """In copies of the model in 16 bit, without the ring's (N-1)/N."""
    plan = Plan(model=BILLION, ranks=8, strategy=strategy, precision=precision, **fields)
    return sent_bytes(plan) / (2 * 10**9 * 7 / 8)


@pytest.mark.parametrize(
    ("strategy", "precision", "accumulation", "copies"),
    [
        # Rajbhandari et al. 2020, section 7: data parallel 2, stages 1 and 2 the same, stage 3 half as much again.
        ("ddp", "bf16", 1, 2), ("deepspeed-0", "bf16-master", 1, 2), ("deepspeed-1", "bf16-master", 1, 2),
        ("deepspeed-2", "bf16-master", 1, 2), ("deepspeed-3", "bf16-master", 1, 3), ("fsdp-full-shard", "bf16", 1, 3),
        ("fsdp-shard-grad-op", "bf16", 1, 2),
        # Four micro batches: stage 2 and 3 reduce in each (DeepSpeed engine.py, allreduce_gradients), FSDP gathers in each.
        ("ddp", "bf16", 4, 2), ("deepspeed-1", "bf16-master", 4, 2), ("deepspeed-2", "bf16-master", 4, 5),
        ("deepspeed-3", "bf16-master", 4, 12), ("fsdp-full-shard", "bf16", 4, 9),
        # float32 gradients of autocast and of Megatron count twice; nn.DataParallel copies and sums every time.
        ("ddp", "amp-bf16", 1, 4), ("fsdp-full-shard", "amp-bf16", 1, 4), ("megatron-ddp", "bf16-master", 1, 4),
        ("data-parallel", "bf16", 1, 2), ("data-parallel", "bf16", 4, 8), ("zero-1", "bf16", 1, 3),
    ],
)  # fmt: skip
def test_bytes_sent_in_copies_of_the_model(strategy: str, precision: str, accumulation: int, copies: int) -> None:
    if precision == "bf16-master" and strategy.startswith("megatron"):
        model = next(m for m in MODELS.values() if m.family == "megatron")
        plan = Plan(model=model, tokens=model.context, micro_batch=1, ranks=8, strategy=strategy, precision=precision)
        weights = sum(weight.numel for weight in plan.weights)
        assert sent_bytes(plan) == round(copies * 2 * weights * 7 / 8)
        return
    assert sent(strategy, precision, accumulation=accumulation) == pytest.approx(copies, rel=1e-9)


def test_fsdp_that_reduces_in_every_micro_batch_sends_more() -> None:
    each = sent("fsdp-full-shard", accumulation=4, fsdp=Fsdp(sync_every_micro_batch=True))
    assert each == pytest.approx(12, rel=1e-9)


def test_hybrid_shards_within_the_machine_and_sums_shards_between() -> None:
    plan = Plan(model=BILLION, ranks=16, nodes=2, strategy="fsdp-hybrid-shard", precision="bf16", gpu="h100-80gb")
    inside = [each for each in collectives(plan) if each.inside]
    (between,) = [each for each in collectives(plan) if not each.inside]
    assert sum(each.sent for each in inside) == 3 * 2 * 10**9 * 7 / 8
    assert (between.operation, between.ranks, between.sent) == ("all-reduce", 2, 2 * 10**9 / 8)
    link = replace(hardware_of(plan), hops=0.0)
    assert link.inside > link.link / 8
    expected = sum(each.sent for each in inside) / link.inside + between.sent / (link.link / 8)  # eight groups share it
    assert step_time(plan, link).communication == pytest.approx(expected)
    slow, whole = replace(link, link=25e9), replace(plan, strategy="fsdp-full-shard")
    assert step_time(plan, slow).communication < step_time(whole, slow).communication / 2


def test_frozen_weights_are_gathered_and_never_reduced() -> None:
    plan = Plan(
        model=MODELS["llama-3-8b"], tokens=512, micro_batch=1, ranks=8, strategy="ddp", adapter=Adapter(kind="lora")
    )
    trained = sum(weight.numel for weight in plan.weights if weight.trainable)
    assert sent_bytes(plan) == round(2 * 4 * trained * 7 / 8) < 10**9
    sharded = {each.what: each for each in collectives(replace(plan, strategy="fsdp-full-shard"))}
    assert sharded["gradients"].bytes == 4 * trained
    assert sharded["weights for forward"].bytes > 4 * 8 * 10**9


@given(plans())
@settings(max_examples=60, deadline=None)
def test_one_rank_sends_nothing_and_more_never_less_than_the_gradients(plan: Plan) -> None:
    found = collectives(plan)
    assert all(each.sent >= 0 and each.ranks >= 1 for each in found)
    trained = sum(weight.numel for weight in plan.weights if weight.trainable)
    if plan.ranks == 1:
        assert found == []
    elif plan.layout.model_parallel > 1:
        assert any("parallel" in each.what or "stages" in each.what for each in found)
    else:
        assert any(each.what == "gradients" and each.bytes >= 2 * trained for each in found)


JOB = Plan(model=MODELS["gpt2"], tokens=1024, micro_batch=4, ranks=8, strategy="ddp")


def table(job: Plan, *names: str) -> Any:
    def plan(strategy: str, precision: str) -> Plan:
        return replace(job, strategy=strategy, precision=precision)

    return strategy_table(plan, recipes("amp-bf16"), names or None)


def test_every_line_is_the_estimate_of_its_plan_and_its_card_the_smallest() -> None:
    lines, refused = table(JOB)
    names = [each.plan.strategy for each in lines] + [each.strategy for each in refused]
    assert sorted(names) == sorted(row.name for row in STRATEGIES.values() if row.parallel)
    assert {each.strategy for each in refused} == {"fsdp-hybrid-shard", "fsdp-hybrid-shard-grad-op"}
    for each in lines:
        found = estimate(each.plan)
        assert (each.peak, each.by_category, each.device) == (
            found.peak.bytes,
            found.peak.by_category,
            found.device.high,
        )
        assert sum(each.by_category.values()) == each.peak <= sum(each.most.values())
        assert all(each.most[name] >= size for name, size in each.by_category.items())
        if each.plan.strategy == "zero-1":
            continue  # whole tensors go to ranks, and one of them is the embedding
        share = 8 if each.plan.strategy_row.shards_optimizer else 1
        states = 12 if each.plan.strategy_row.masters else 8
        assert each.most["optimizer"] == pytest.approx(states * 124439808 / share, rel=0.05)
        sure = [gpu for gpu, held in holding_gpus(each.plan, found.reserved) if held and gpu.bfloat16]
        assert each.smallest == sure[0].name
        assert GPUS[each.smallest].usable_bytes == min(gpu.usable_bytes for gpu in sure)
        assert each.plan.precision == ("bf16-master" if each.plan.strategy_row.masters else "amp-bf16")
        assert each.bound == (each.plan.strategy_row.engine != "torch" or each.plan.strategy == "data-parallel")


def test_the_usual_ranking_holds_where_states_decide() -> None:
    """DDP needs the most, ZeRO and FSDP in stages less, the fullest sharding the least; what is sent goes the other way."""
    job = replace(JOB, model=MODELS["gpt2-large"], micro_batch=1, checkpoint_every=1)
    lines, _ = table(job, "ddp", "zero-1", "fsdp-shard-grad-op", "fsdp-full-shard")
    peaks = [each.peak for each in lines]
    assert peaks == sorted(peaks, reverse=True)
    lines, _ = table(job, *(f"deepspeed-{stage}" for stage in range(4)))
    peaks, volumes = [each.peak for each in lines], [each.sent for each in lines]
    assert peaks[0] > 2 * max(peaks[1:]) and volumes == sorted(volumes)


def invoke(*words: str) -> Any:
    return CliRunner().invoke(app, ["strategies", *words])


WHY = "strategy ddp cannot offload; deepspeed-1 to deepspeed-3 and fsdp-full-shard can"


def test_on_the_command_line() -> None:
    words = ("gpt2", "--gpus", "4", "--gpu", "h100")
    table = invoke(*words)
    assert table.exit_code == 0, table.output
    assert "gpt2 (124,439,808 parameters), adamw, 4 GPUs, h100-80gb, 1 sample of 1024 tokens on each" in table.output
    assert "fsdp-hybrid-shard: one group of ranks is fsdp-full-shard" in table.output
    found = json.loads(invoke(*words, "--format", "json").output)
    ddp = found["strategies"][0]
    assert ddp["sent_bytes"] == 2 * 4 * 124439808 * 3 // 4 == sum(each["sent"] for each in ddp["collectives"])
    assert (
        ddp["verdict"] == "fits"
        and max(each["relative_speed"] for each in found["strategies"] if not each["speed_is_upper_bound"]) == 1
    )
    offloaded = json.loads(invoke(*words, "--offload-optimizer", "cpu", "--format", "json").output)
    assert [each["strategy"] for each in offloaded["strategies"]] == ["deepspeed-1", "deepspeed-2", "deepspeed-3"]
    assert {each["relative_speed"] for each in offloaded["strategies"]} == {None}
    assert {"strategy": "ddp", "why": WHY} in offloaded["refused"]
    few = (*words, "--offload-optimizer", "cpu", "--format")
    rows = list(csv.DictReader(io.StringIO(invoke(*few, "csv").output)))
    assert [int(row["sent_bytes"]) for row in rows] == [each["sent_bytes"] for each in offloaded["strategies"]]
    assert "| deepspeed-1" in invoke(*few, "markdown").output


def test_without_a_model_it_lists_the_strategies() -> None:
    listed = json.loads(invoke("--format", "json").output)
    assert [row["strategy"] for row in listed] == list(STRATEGIES)
    assert {row["strategy"] for row in listed if row["runs here"] == "yes"} == {
        r.name for r in STRATEGIES.values() if r.backend
    }


def test_no_card_is_sure_where_activations_are_not_known() -> None:
    """Under-estimating is worse than saying nothing: the cell is left out, no card is named, and a note says why."""
    found = json.loads(invoke("--params", "7b", "--gpus", "8", "--adam", "--format", "json").output)["strategies"]
    assert {each["smallest_card"] for each in found} == {each["activations_bytes"] for each in found} == {None}
    assert {each["verdict"] for each in found} == {"unknown"}
    text = invoke("--params", "7b", "--gpus", "8", "--adam").output
    assert "no shape was given: allocated and device are without them, and no card is said to hold it" in text
    assert "  zero-1: whole tensors are handed to ranks, and of a model known by its size one tensor is known" in text
    rows = [line.split() for line in text.splitlines() if line.startswith(("ddp", "deepspeed-2", "fsdp-full"))]
    assert len(rows) == 3 and {(row[5], row[-1]) for row in rows} == {("-", "-")}
    known = ("--params", "7b", "--gpus", "8", "--layers", "32", "--input-shape", "4096", "--format", "json")
    sized = json.loads(invoke(*known).output)["strategies"]
    assert all(each["activations_bytes"] and each["smallest_card"] for each in sized if "fsdp" in each["strategy"])


def test_no_card_is_sure_for_a_module_that_was_not_rehearsed() -> None:
    job = replace(OWN, ranks=2, strategy="ddp")
    lines, _ = strategy_table(
        lambda strategy, precision: replace(job, strategy=strategy, precision=precision), ["fp32"], ["ddp"]
    )
    assert not lines[0].counted and lines[0].smallest is None
    assert "run a module's code for them, and this table does not" in _show(lines[0].plan, lines, [], "table")


@pytest.mark.parametrize("strategy", ["zero-1", "deepspeed-1", "deepspeed-2", "deepspeed-3"])
def test_what_is_divided_by_tensors_of_a_size_is_an_upper_bound(strategy: str) -> None:
    size = Model(name="a size", family="size", parameters=7 * 10**9)
    plan = Plan(model=size, ranks=8, strategy=strategy, precision="fp32", gpu="t4")
    found = estimate(plan)
    assert found.device.low > GPUS["t4"].usable_bytes and found.verdict == "unknown"
    said = [line for line in found.assumptions if "one tensor is known" in line and "--layers" in line]
    assert len(said) == 1
    assert "GPUs that hold it as far as it is counted, even undivided:" in summary(
        estimate(replace(plan, gpu=None)), "table"
    )
    known = estimate(replace(plan, model=replace(size, layers=32)))
    assert known.peak.bytes < found.peak.bytes
    assert not any("one tensor is known" in line for line in known.assumptions)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["gpt2"], "--gpus N, at least 2"),
        (["gpt2", "--gpus", "8", "--strategy", "ddp"], "memcalc strategies compares all of them; for ddp alone"),
        (["gpt2", "--gpus", "8", "--tensor-parallel", "2"], "leave tensor, context, pipeline and expert parallel out"),
        (["--gpus", "8"], "give a model"),
        (["gpt3", "--gpus", "8"], "did you mean 'gpt2'"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_cannot_be_compared(words: list[str], said: str) -> None:
    result = invoke(*words)
    assert result.exit_code == 2 and said in result.output and result.output.count("\n") == 1
