"""The fifteen ranking facts and the counter-examples, each a pair of runs; what the time model misses says why."""

from __future__ import annotations

from dataclasses import replace

import pytest

from memcalc.bench.throughput.claims import CLAIMS, MISSES, Claim, held
from tests.published_speeds import known

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
