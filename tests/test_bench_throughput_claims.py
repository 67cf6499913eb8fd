"""The fifteen ranking facts and the counter-examples, each a pair of runs; what the time model misses says why."""

from __future__ import annotations

from dataclasses import replace

import pytest

from memcalc.bench.throughput.claims import CLAIMS, MISSES, Claim, held
from memcalc.bench.throughput.plans import run_of
from memcalc.estimate import estimate
from memcalc.offload import Offload
from memcalc.throughput import crowded, step_time
from tests.published_speeds import known, plan_of

NAMES = [claim.name for claim in CLAIMS]


def _marked(claim: Claim) -> object:
    reason = MISSES.get(claim.name)
    return pytest.param(claim, id=claim.name, marks=pytest.mark.xfail(strict=True, reason=reason) if reason else ())


@pytest.mark.parametrize("claim", [_marked(claim) for claim in CLAIMS])
def test_a_ranking_fact(claim: Claim) -> None:
    found = held(claim, known())
    assert found.right, f"{claim.says}: measured {claim.ratio}, predicted {found.ratio or found.skipped}"


def test_every_fact_is_asked_about() -> None:
    assert len(set(NAMES)) == len(NAMES)
    assert {claim.fact for claim in CLAIMS} == {*map(str, range(1, 16)), "counter"}
    assert set(MISSES) <= set(NAMES)
    assert all(len(reason) > 20 for reason in MISSES.values())


def test_a_claim_turned_round_does_not_hold() -> None:
    """What is asked can fail: of a claim that holds, the opposite does not."""
    orders = [claim for claim in CLAIMS if not claim.tie and claim.name not in MISSES]
    assert orders
    for claim in orders[::6]:
        assert not held(replace(claim, fast=claim.slow, slow=claim.fast), known()).right
    unknown = held(replace(CLAIMS[0], fast="no-such-row"), known())
    assert (unknown.ratio, unknown.skipped, unknown.right) == (None, "no such row", False)


def test_accumulation_widens_the_lead_of_ddp() -> None:
    """Fact 2: FSDP gathers for every micro batch, DDP sums once."""
    leads = []
    for times in ("1", "8", "32"):
        cells = {"micro_batch_per_gpu": "1", "grad_accum": times, "global_batch": "", "seq_len": "512"}
        plans = [plan_of(strategy=strategy, **cells) for strategy in ("ddp8", "fsdp_full_shard8")]
        ddp, fsdp = (step_time(plan).total for plan in plans)
        leads.append(fsdp / ddp)
    assert leads == sorted(leads)
    assert leads[-1] > leads[0] + 0.01


def test_tp2_pp6_of_181b_is_not_said_to_fit() -> None:
    """Fact 10: it went out of memory with 1 and with 2 samples; TP4 PP6 with 2 took 57 GB."""
    plans = [run_of(known()[name]).plan for name in ("bs176-049", "bs176-050", "bs176-047")]
    verdicts = [estimate(plan).verdict for plan in plans if plan is not None]
    assert len(verdicts) == 3
    assert "fits" not in verdicts[:2]
    assert verdicts[2] != "does-not-fit"


def test_offload_is_never_faster_than_the_same_plan_without() -> None:
    """Fact 14."""
    away = [run_of(row) for row in known().values() if row["offload"].startswith("cpu")]
    plans = [run.plan for run in away if run.plan is not None]
    assert len(plans) > 5
    for plan in plans:
        assert step_time(replace(plan, offload=Offload())).total < step_time(plan).total


def test_a_card_that_is_nearly_full_is_slower() -> None:
    """Fact 12: with 91 % of the card reserved 7.0 samples/s, with 98 % 6.2 (OpenTau #273)."""
    assert crowded(0.91) == 1.0
    assert 1.05 < crowded(0.98) / crowded(0.91) < 7.0 / 4.9
