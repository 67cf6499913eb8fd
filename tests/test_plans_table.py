"""The table of ``memcalc recommend``: as wide as the terminal, and nothing lost that is not said to be."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memcalc.cli.plans_table import also, hours, plans_table
from memcalc.loss import Loss
from memcalc.models import MODELS
from memcalc.plan import Plan

PLAN = Plan(
    model=MODELS["gpt2"], tokens=64, micro_batch=12, ranks=8, strategy="ddp", precision="amp-bf16", gpu="h100-80gb"
)
PLANS = (
    PLAN,
    replace(PLAN, strategy="fsdp-hybrid-shard-grad-op", nodes=2, accumulation=4, optimizer_kind="fused"),
    replace(PLAN, precision="fp32", loss=Loss(chunks=8, chunk_head=True), checkpoint_every=2),
)


def choice(plan: Plan) -> Any:
    time = SimpleNamespace(low=0.895, high=1.29, tokens_per_second=125_136.0, mfu=0.52)
    return SimpleNamespace(
        plan=plan,
        peak=69_621_000_000,
        headroom=2_103_000_000,
        time=time,
        speed=0.98,
        gpu_hours=lambda tokens: (tokens / 2e9, tokens / 1e9),
    )


@given(st.lists(st.sampled_from(PLANS), min_size=1, max_size=4), st.sampled_from([0, 3 * 10**11]), st.integers(1, 260))
def test_a_narrower_terminal_has_fewer_columns_and_never_other_plans(plans: list[Plan], tokens: int, room: int) -> None:
    choices = [choice(plan) for plan in plans]
    endless, nothing = plans_table(choices, tokens, "table", None)
    text, missing = plans_table(choices, tokens, "table", room)
    assert nothing == []
    assert len(text.splitlines()) == len(endless.splitlines()) == len(plans) + 2
    assert all(
        row.split()[:2] == [str(n), plan.strategy]
        for n, (row, plan) in enumerate(zip(text.splitlines()[2:], plans, strict=True), 1)
    )
    assert all(name not in text.splitlines()[0].split() for name in missing)
    if max(map(len, endless.splitlines())) <= room:
        assert text == endless
    if room >= 120:
        assert max(map(len, text.splitlines())) <= room
    wider, fewer = plans_table(choices, tokens, "table", room + 1)
    assert len(wider.splitlines()[0]) >= len(text.splitlines()[0]) and set(fewer) <= set(missing)


@pytest.mark.parametrize("room", [None, 10])
def test_markdown_has_all_columns(room: int | None) -> None:
    head = plans_table([choice(PLAN)], 1, "markdown", None)[0].splitlines()[0]
    names = ["", "strategy", "ranks", "checkpointing", "precision", "micro batch", "accumulation", "also", "peak",
             "headroom", "step", "tokens/s", "MFU", "speed", "GPU-hours"]  # fmt: skip
    assert [cell.strip() for cell in head.strip("|").split("|")] == names


def test_gpu_hours_are_a_range_as_a_step_is() -> None:
    assert hours(choice(PLAN), 340_000 * 10**9) == "170,000 to 340,000"
    assert hours(choice(PLAN), 10**8) == "0"


def test_what_has_no_column_stands_in_the_sentences() -> None:
    assert also(PLANS[1]) == "fused" and also(PLANS[2]) == "chunked loss" and also(PLAN) == "-"
    text, missing = plans_table([choice(plan) for plan in PLANS], 0, "table", 100)
    assert missing[0] == "also" and "fused" not in text and "12 x 4" in text
