"""Rehearsals beside what they stand for: real runs on the CPU, torch's own tracker, and the ledger."""

from __future__ import annotations

import pytest
import torch
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker

from memcalc.fsdp import Fsdp
from memcalc.layout import Layout
from memcalc.ledger import ledger
from memcalc.plan import Plan
from memcalc.rehearsal import run_apart, unrehearsed
from memcalc.reserved import replayed
from memcalc.reserved import run as run_of
from memcalc.strategies import STRATEGIES
from memcalc.timeline import CATEGORIES
from tests.trainers.rehearsed import SMALL, planned
from tests.trainers.runs import Job, Result, plan, run, some
from trainers.backends import prepare
from trainers.checkpointing import checkpoint_blocks
from trainers.models import build, criterion
from trainers.rehearsal import private, rehearse
from trainers.rehearsal.run import world

ONE = some(
    {
        "checkpointing": plan(checkpoint_every=1),
        "bf16": plan(precision="bf16"),
        "amp, dropout": plan(precision="amp-bf16", dropout=0.1),
        "convolutions": planned("resnet"),
        "fp32": plan(),
        "accumulation": plan(accumulation=2),
    }
)
TWO = some(
    {
        "ddp": plan(ranks=2, strategy="ddp"),
        "zero-1": plan(ranks=2, strategy="zero-1"),
        "fsdp-full-shard amp": plan(ranks=2, strategy="fsdp-full-shard", precision="amp-bf16"),
        "fsdp-full-shard": plan(ranks=2, strategy="fsdp-full-shard"),
        "fsdp-full-shard checkpointing": plan(ranks=2, strategy="fsdp-full-shard", checkpoint_every=1),
        "fsdp-no-shard": plan(ranks=2, strategy="fsdp-no-shard"),
        "fsdp-shard-grad-op": plan(ranks=2, strategy="fsdp-shard-grad-op"),
        "fsdp-hybrid-shard": plan(ranks=2, strategy="fsdp-hybrid-shard", fsdp=Fsdp(replicas=2)),
        "fsdp 1 shard-grad-op": plan(ranks=2, strategy="fsdp-shard-grad-op", fsdp=Fsdp(version="1")),
        "fsdp 1": plan(ranks=2, strategy="fsdp-full-shard", fsdp=Fsdp(version="1")),
    }
)


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Result]:
    """Every plan run for real, in two process groups."""
    jobs = {name: Job(each, measure_steps=3) for name, each in (ONE | TWO).items()}
    folder = tmp_path_factory.mktemp("measured")
    found = run({name: jobs[name] for name in ONE}, 1, folder)
    return found | run({name: jobs[name] for name in TWO}, 2, folder)


@pytest.mark.parametrize("name", [*ONE, *TWO])
def test_a_rehearsal_takes_what_the_cpu_allocator_gave(name: str, measured: dict[str, Result]) -> None:
    """The rank's own numbers within a thousandth, in each moment and of each state."""
    plan, real = (ONE | TWO)[name], measured[name].ranks[0]
    found = rehearse(plan)
    assert found.allocated_peak == pytest.approx(real.allocated_peak, rel=1e-3)
    assert found.moment == real.moment
    for moment, size in real.by_moment.items():
        # oneDNN's scratch memory for 16-bit products is no tensor: up to half a MiB, on top of what there is.
        scratch = 2**19 if plan.precision_row.compute != "float32" else 0
        assert -1e-3 * size <= size - found.by_moment[moment] <= max(1e-3 * size, scratch), moment
    assert (found.parameters, found.gradients) == (real.parameters, real.gradients)
    assert found.optimizer == real.optimizer


@pytest.mark.parametrize(
    ("strategy", "fields"),
    [
        ("fsdp-full-shard", {}),
        ("fsdp-shard-grad-op", {}),
        ("fsdp-full-shard", {"checkpoint_every": 1}),
        ("fsdp-full-shard", {"precision": "amp-bf16"}),
    ],
    ids=str,
)
def test_a_rehearsal_takes_what_fsdpmemtracker_counts(strategy: str, fields: dict[str, object]) -> None:
    plan = planned("gpt2", strategy=strategy, ranks=8, optimizer_kind="for-loop", **fields)
    assert rehearse(plan).allocated_peak == pytest.approx(tracked(plan), rel=1e-3)


def tracked(plan: Plan) -> int:
    """The most torch.distributed._tools.fsdp2_mem_tracker.FSDPMemTracker sees in a second step."""
    with world(0, plan.ranks, torch.device("cpu")) as process:
        model = build(plan)
        checkpoint_blocks(model, plan)
        with private.fake_mode():
            prepared = prepare(model, plan, process.mesh, 0)
            inputs, targets = (torch.zeros(plan.micro_batch, plan.tokens, dtype=torch.int64) for _ in range(2))
            tracker = FSDPMemTracker(prepared.model, prepared.optimizer)
            tracker.track_inputs((inputs, targets))
            with tracker:
                for step in range(2):
                    loss = criterion(plan)(prepared.model(inputs), targets)
                    loss.backward()
                    del loss
                    prepared.optimizer.step()
                    prepared.optimizer.zero_grad()
                    if not step:
                        tracker.reset_mod_stats()
            snapshot = tracker.get_tracker_snapshot("peak")
    return int(snapshot[torch.device("cpu")]["Total"])


FAMILIES = {f"{family} {precision}": (family, precision) for family in SMALL for precision in ("fp32", "bf16")}
CORNERS = {
    f"{family} {name}": (family, fields)
    for family in SMALL
    for name, fields in {
        "fsdp amp": {"strategy": "fsdp-full-shard", "ranks": 4, "precision": "amp-bf16"},
        "amp": {"precision": "amp-bf16"},
        "checkpointing": {"checkpoint_every": 1},
        "on the cpu": {"device": "cpu"},
    }.items()
}


@pytest.mark.parametrize("name", FAMILIES)
def test_the_ledger_agrees_for_every_family(name: str) -> None:
    family, precision = FAMILIES[name]
    agree(planned(family, precision=precision, device="cuda"))


@pytest.mark.parametrize("name", some(CORNERS))
def test_the_ledger_agrees_in_the_corners(name: str) -> None:
    family, fields = CORNERS[name]
    agree(planned(family, **{"device": "cuda", **fields}))


@pytest.mark.parametrize("strategy", ["fsdp-full-shard", "fsdp-shard-grad-op"])
def test_nothing_is_as_large_as_all_ranks_together(strategy: str) -> None:
    """Whole weights exist one at a time while shards are filled; what DTensor works out on shapes is no memory."""
    found = rehearse(planned("llama", strategy=strategy, ranks=64, device="cuda", micro_batch=1, tokens=8))
    largest = 4 * 1000 * 128
    assert found.init_peak is not None
    assert found.init_peak <= found.allocated_peak + largest


@pytest.mark.parametrize("sequence", [False, True])
def test_tensor_parallel_agrees_at_the_peak(sequence: bool) -> None:
    """What DTensor does on one rank is seen piece by piece, and its collectives give back what they were given."""
    plan = planned("llama", ranks=2, layout=Layout(tensor=2, sequence=sequence), device="cuda", precision="bf16")
    found, formulas = rehearse(plan), ledger(plan).steady()
    assert formulas.bytes == pytest.approx(found.allocated_peak, rel=1e-2)
    assert formulas.by_moment["forward"] == pytest.approx(found.by_moment["forward"], rel=1e-2)


def agree(plan: Plan) -> None:
    """Within a percent at the peak and in every moment; of the efficient kernel's backward in float32 the ledger, which
    serves all micro batches, counts the most splits that any has: 200 tiles of 64 x 64 each for keys and values."""
    found, formulas = rehearse(plan), ledger(plan).steady()
    splits = 2 * 4 * 200 * 64 * 64 if plan.kernel == "efficient" and plan.precision == "fp32" else 0
    for name, size in {**found.by_moment, "peak": found.allocated_peak}.items():
        said = formulas.bytes if name == "peak" else formulas.by_moment[name]
        more = splits if name in ("peak", "backward") else 0
        assert 0.99 * size <= said <= 1.01 * size + more, name


REHEARSABLE = {
    f"{row.name}{' with kept gradients' * (not kept)}": {"strategy": row.name, "set_to_none": kept}
    for row in STRATEGIES.values()
    for kept in (True, False)
    if not (row.one_process or row.engine) and (kept or row.buckets)
}  # fmt: skip


@pytest.mark.parametrize("name", REHEARSABLE)
def test_what_a_rehearsed_step_for_gpus_frees_was_allocated(name: str) -> None:
    """So that the caching allocator's replay comes out, whatever a step replaces: DDP rebuilds its buckets in the second."""
    row = STRATEGIES[REHEARSABLE[name]["strategy"]]
    fsdp = Fsdp(replicas=2) if row.replicates else Fsdp()
    plan = planned("gpt2", device="cuda", ranks=2 if row.parallel else 1, fsdp=fsdp, **REHEARSABLE[name])
    assert not unrehearsed(plan)
    # Two meshes of groups of replicas do not go together in one process.
    timeline = (run_apart if row.replicates else rehearse)(plan).timeline
    assert timeline is not None
    found, kept = replayed(plan, timeline), CATEGORIES.index("optimizer")
    assert timeline.peak().bytes <= found.peak_allocated <= 1.01 * timeline.peak().bytes
    states = {ident for ident, kind in zip(timeline.ident, timeline.category, strict=True) if kind == kept}
    moved = [ident % len(timeline.names) for ident, size in run_of(plan, timeline) if size > 0]
    assert states and all(moved.count(ident) == 1 for ident in states), "the optimizer's states are made once"
