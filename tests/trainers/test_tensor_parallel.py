"""Tensor and sequence parallel for real: two ranks on the CPU, held against the ledger, and against one rank's losses."""

from __future__ import annotations

from pathlib import Path

import pytest

from memcalc.layout import Layout
from memcalc.ledger import ledger
from memcalc.models import Model
from memcalc.plan import Plan
from tests.trainers.runs import Job, run

LLAMA = Model(
    name="tensor-llama", family="llama", layers=4, hidden=128, heads=4, kv_heads=2, ffn=384, vocab=1000, context=128
)  # fmt: skip
DIVIDED = {
    "tensor": {"layout": Layout(tensor=2)},
    "sequence": {"layout": Layout(tensor=2, sequence=True)},
    "sequence-checkpoint": {"layout": Layout(tensor=2, sequence=True), "checkpoint_every": 1},
    "tensor-bf16": {"layout": Layout(tensor=2), "precision": "bf16"},
}


def planned(ranks: int, **changes: object) -> Plan:
    return Plan(model=LLAMA, tokens=128, micro_batch=4, device="cpu", ranks=ranks, **changes)  # type: ignore[arg-type]


def test_what_trainers_cannot_divide_is_said() -> None:
    assert planned(2, layout=Layout(tensor=2)).untrained == ""
    assert planned(2, layout=Layout(context=2), attention="flash").untrained == "with context parallel"
    assert "take single, ddp or FSDP 2" in planned(4, layout=Layout(tensor=2), strategy="zero-1").untrained
    assert planned(4, layout=Layout(tensor=2), strategy="ddp").untrained == ""
    assert planned(4, layout=Layout(tensor=2), strategy="fsdp-full-shard").untrained == ""


def test_two_ranks_hold_what_the_ledger_says_and_learn_what_one_does(tmp_path: Path) -> None:
    """Within a thousandth: gathering, scattering and summing the stream are all that torch does besides."""
    options = (("clip", 0.0),)
    jobs = {
        name: Job(plan=planned(2, **changes), measure_steps=3, options=options) for name, changes in DIVIDED.items()
    }
    found = run(jobs, 2, tmp_path)
    alone = run({"alone": Job(plan=planned(1), options=options)}, 1, tmp_path)["alone"]
    for name, job in jobs.items():
        estimated = ledger(job.plan).peak()
        for rank in found[name].ranks:
            assert estimated.bytes == pytest.approx(rank.allocated_peak, rel=1e-3), name
            assert estimated.by_moment["forward"] == pytest.approx(rank.by_moment["forward"], rel=2e-2), name
        if name in ("tensor", "sequence"):
            assert found[name].losses == pytest.approx(alone.losses, rel=1e-4)
            assert found[name].evaluation == pytest.approx(alone.evaluation, rel=1e-4)
