"""Inverse questions: exact to one step, and as a linear scan would answer."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from memcalc.cli.app import app
from memcalc.cli.kinds import Share
from memcalc.errors import InputError
from memcalc.estimate import estimate
from memcalc.hardware import GPUS
from memcalc.models import MODELS, Model
from memcalc.plan import Plan
from memcalc.solve import QUANTITIES, solve
from tests.drawn_models import gpt2s, llamas

TINY = Plan(model=MODELS["gpt2-tiny"], tokens=64, micro_batch=1, precision="amp-bf16", gpu="t4")


def scanned(plan: Plan, name: str, limit: int, most: int) -> int | None:
    """The last of the first so many values before one that does not fit; of GPUs the first that does."""
    asked, found = QUANTITIES[name], None
    for value in asked.values(plan)[:most]:
        fits = estimate(asked.change(plan, value)).device.high <= limit
        if fits and asked.fewest:
            return value
        if not fits and not asked.fewest:
            return found
        found = value if fits else found
    return found


@given(
    st.one_of(gpt2s(), llamas()),
    st.sampled_from(["micro-batch", "seq-len", "layers", "gpus"]),
    st.sampled_from(["ddp", "fsdp-full-shard", "zero-1"]),
    st.integers(0, 1),
    st.floats(0.0, 1.0),
)
@settings(max_examples=25, deadline=None)
def test_it_answers_as_a_linear_scan(model: Model, name: str, strategy: str, every: int, share: float) -> None:
    tokens = model.context - model.position_offset
    plan = Plan(
        model=model,
        tokens=tokens,
        micro_batch=1,
        ranks=2,
        strategy=strategy,
        checkpoint_every=every,
        gpu="t4",
        precision="amp-bf16",
    )
    asked = QUANTITIES[name]
    values = asked.values(plan)[:12]
    ends = sorted(estimate(asked.change(plan, value)).device.high for value in (values[0], values[-1]))
    limit = ends[0] + int(share * (ends[1] - ends[0])) - (1 if asked.fewest else 0)
    expected = scanned(plan, name, limit, 40)
    found = solve(plan, name, limit)
    if expected is None:
        assert found.value is None or found.value not in asked.values(plan)[:40]
    else:
        assert found.value == expected


@pytest.mark.parametrize("name", ["micro-batch", "layers"])
def test_one_step_more_does_not_fit(name: str) -> None:
    limit = GPUS["t4"].usable_bytes // (20 if name == "layers" else 1)  # 2000 layers of it fit a whole card
    found = solve(TINY, name, limit)
    assert found.value is not None and found.beyond is not None
    asked = found.quantity
    assert found.plan == asked.change(TINY, found.value)
    assert found.needed == estimate(found.plan).device.high <= limit
    assert found.beyond == estimate(asked.change(TINY, found.value + 1)).device.high > limit


def test_the_most_parameters_to_one() -> None:
    plan = Plan(model=Model(name="x", family="size", parameters=1), optimizer="adam", gpu="t4")
    limit = GPUS["t4"].usable_bytes
    found = solve(plan, "params", limit)
    assert found.value is not None and found.beyond is not None
    assert found.needed <= limit < found.beyond
    assert found.tried < 40


def test_gpus_that_divide_nothing_do_not_help() -> None:
    big = replace(TINY, model=MODELS["gpt2-xl"], ranks=2, strategy="ddp")
    assert solve(big, "gpus", GPUS["t4"].usable_bytes).value is None
    few = solve(replace(big, strategy="fsdp-full-shard"), "gpus", GPUS["t4"].usable_bytes)
    assert few.value is not None and few.value > 1 and few.beyond is not None and few.beyond > few.limit


@pytest.mark.parametrize(
    ("plan", "name", "said"),
    [
        (TINY, "params", "ask for layers"),
        (Plan(model=Model(name="x", family="size", parameters=9), gpu="t4"), "micro-batch", "no shape of its samples"),
        (replace(TINY, gpu=None, device="cpu", optimizer_kind="for-loop"), "gpus", "share one machine's RAM"),
        (Plan(model=MODELS["resnet-50"], micro_batch=1, gpu="t4"), "seq-len", "reads no tokens"),
    ],
)  # fmt: skip
def test_what_cannot_be_asked(plan: Plan, name: str, said: str) -> None:
    with pytest.raises(InputError, match=said):
        solve(plan, name, 10**10)


def test_sizes_that_round_alike_are_given_to_the_byte() -> None:
    line = CliRunner().invoke(app, ["solve", "--for", "params", "--gpu", "t4", "--strategy", "single"]).output
    needed, limit, beyond = (int(size.replace(",", "")) for size in re.findall(r"([0-9,]+) B\b", line))
    assert needed <= limit < beyond
    assert f"one step more would need up to {beyond:,} B;" in line
    few = CliRunner().invoke(app, ["solve", "llama-3-70b", "--for", "gpus", "--gpu", "t4", "--strategy", "ddp"])
    assert few.exit_code == 1
    assert "none up to 4,096 GPUs will do: ddp needs" in few.stderr


@pytest.mark.parametrize(
    ("text", "free"),
    [
        ("10%", 100), ("1e-9%", 1), ("-0", 0), ("0", 0), ("0%", 0), ("-0%", 0), ("0 GiB", 0), ("99.5%", 995), ("1kB", 1000),
    ],
)  # fmt: skip
def test_what_is_kept_free(text: str, free: int) -> None:
    assert Share().read(text, "--keep-free").of(1000) == free


@pytest.mark.parametrize("text", ["nan", "inf", "5%%", "-1GiB", "0.5", "%", "nan%", "-1%", "100%", "1e99%", ""])
def test_what_cannot_be_kept_free_names_both_ways(text: str) -> None:
    with pytest.raises(InputError, match=r"^--keep-free .*(%.*size)"):
        Share().read(text, "--keep-free")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("t5-base --for seq-len --gpu t4", r"[0-9],[0-9]{3} tokens per sample; .*; one step more would need"),
        ("gpt2-tiny --for seq-len --gpu t4", r"128 tokens per sample; .*; gpt2-tiny has 128 positions: for more add --context N;"),
        ("mlp-tiny --for micro-batch --gpu h100", "1,048,576 samples per GPU; .*; 1,048,576 samples are the most that solve tries;"),
        ("gpt2-tiny --for gpus --gpu t4", "1 GPU; "),
        ("gpt2 --for gpus --gpu t4 --tensor-parallel 2 --pipeline-parallel 3 --accumulation 3", "6 GPUs; "),
        ("gpt2 --for gpus --gpu t4 --nodes 3", "3 GPUs; "),
        ("gpt2 --for gpus --gpu t4 --strategy fsdp-hybrid-shard --replicas 5", "5 GPUs; "),
    ],
)  # fmt: skip
def test_an_end_is_named_and_ranks_come_in_multiples(words: str, said: str) -> None:
    done = CliRunner().invoke(app, ["solve", *words.split()])
    assert done.exit_code == 0, done.output
    assert re.match(f"(largest|fewest) [a-z-]+: {said}", done.output), done.output


def test_layers_go_as_far_as_a_plan_takes() -> None:
    layers = QUANTITIES["layers"]
    assert layers.values(TINY)[-1] == 10_000
    assert layers.change(TINY, 10_000).model.layers == 10_000
    assert layers.end(TINY) == "10,000 layers are the most that memcalc takes"


@pytest.mark.parametrize(
    ("words", "option"),
    [("gpt2 --for layers --layers 3", "--layers"), ("--for params --params 1b", "--params"), ("gpt2 --for gpus --gpus 2", "--gpus"),
     ("gpt2 --for micro-batch --batch-size 2", "--batch-size"), ("gpt2 --for seq-len --seq-len 2", "--seq-len")],
)  # fmt: skip
def test_what_is_asked_for_is_not_said(words: str, option: str) -> None:
    done = CliRunner().invoke(app, ["solve", *words.split(), "--gpu", "t4"])
    assert done.exit_code == 2
    assert done.output.endswith(f" asks for what {option} says; leave one out\n")
