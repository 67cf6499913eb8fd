"""What FSDP does on streams of its own, in a rehearsal as in the ledger: the same blocks in the same order."""

from __future__ import annotations

import pytest

from memcalc.fsdp import Fsdp
from memcalc.ledger import ledger
from memcalc.plan import Plan
from memcalc.reserved import run
from memcalc.streams import WAITING, stream_of
from memcalc.timeline import Timeline
from tests.trainers.rehearsed import planned
from trainers.rehearsal import rehearse


def aside(plan: Plan, timeline: Timeline) -> list[tuple[int, int]]:
    """(stream, bytes) of all that is made and freed beside the computation's own stream, from construction to two steps."""
    streams, size = stream_of(plan, timeline.names), len(timeline.names)
    return [(streams[ident % size], delta) for ident, delta in run(plan, timeline) if ident % size in streams]


def waits(plan: Plan, timeline: Timeline) -> int:
    """Frees that wait for another stream: where the program lets go stands one of 0 bytes."""
    names = timeline.names
    return sum(not delta and names[ident % len(names)].endswith(WAITING) for ident, delta in run(plan, timeline))


@pytest.mark.parametrize(
    ("strategy", "version", "precision"),
    [
        ("fsdp-full-shard", "2", "amp-bf16"),
        ("fsdp-shard-grad-op", "1", "amp-bf16"),
        ("fsdp-full-shard", "1", "fp32"),
        ("fsdp-shard-grad-op", "2", "fp32"),
    ],
)
def test_the_ledger_and_a_rehearsal_do_the_same_beside_the_computation(
    strategy: str, version: str, precision: str
) -> None:
    fields = {"strategy": strategy, "ranks": 8, "fsdp": Fsdp(version=version), "checkpoint_every": 1}
    plan = planned("llama", device="cuda", precision=precision, **fields)
    found = rehearse(plan).timeline
    assert found is not None
    expected = aside(plan, ledger(plan))
    assert aside(plan, found) == expected
    assert {stream for stream, _ in expected} == {
        ("2", "amp-bf16"): {1, 2}, ("2", "fp32"): {1, 2}, ("1", "amp-bf16"): {1, 2, 3}, ("1", "fp32"): {2, 3},
    }[version, precision]  # fmt: skip
    assert waits(plan, found) == waits(plan, ledger(plan))
    assert (waits(plan, found) > 0) == (version == "1"), (
        "which alone tells the allocator what another stream still reads"
    )
