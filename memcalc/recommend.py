"""The best plan for a job, the runner-up, the one that needs fewest GPUs, and what does not fit by which term.

    Search ── structures ──► the fastest that fits, ties to the simpler ──► Recommendation

``memcalc/choosing.py`` finds the fastest plans that fit without a ledger for most of the others.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from memcalc.choosing import TIE, Field, Key, Looked, row_key
from memcalc.closest import closest
from memcalc.collector import uncollected
from memcalc.errors import PlanError
from memcalc.fitting import exactly_needed, needed_bytes
from memcalc.hardware import smallest_card
from memcalc.peaks import fullest_of, peak_of
from memcalc.plan import Plan
from memcalc.reasons import Known, why
from memcalc.search import RAM_SHARE, Search, search
from memcalc.strategies import STRATEGIES
from memcalc.structures import Structure, in_the_way, simplicity, structures
from memcalc.throughput import StepTime, crowded, step_time

__all__ = [
    "TIE", "Candidate", "Change", "Choice", "Recommendation", "Refusal", "candidates", "needed_bytes", "next_plan", "recommend",
]  # fmt: skip

LESS = 0.10
"""After running out of memory the next plan has to need at least this much less than the one that failed."""

SHOWN = 12
"""Structures that do not fit of which the breaking term is worked out."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """One plan of the search with what it is predicted to take."""

    plan: Plan
    peak: int
    """Allocated peak in bytes."""
    needed: int
    """High end of what the device (or, on a CPU, the process) uses, in bytes."""
    time: StepTime


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """A recommended plan."""

    plan: Plan
    peak: int
    needed: int
    headroom: int
    """Bytes of what may be used that are left at the high end."""
    time: StepTime
    speed: float
    """Samples per second relative to the fastest plan that fits, at most 1."""
    reason: str

    def gpu_hours(self, tokens: int) -> tuple[float, float]:
        """What a training of so many tokens takes, over all ranks, by both ends of the time of a step."""
        steps = tokens / (self.time.samples * self.time.tokens)
        return steps * self.time.low * self.plan.ranks / 3600, steps * self.time.high * self.plan.ranks / 3600


@dataclass(frozen=True, kw_only=True, slots=True)
class Refusal:
    """A structure of which not even the smallest micro batch fits, and the term that breaks it."""

    plan: Plan
    peak: int
    needed: int
    missing: int
    """Bytes over the capacity, at the least: a replay of the allocator, which the search spares, may need more."""
    moment: str
    category: str
    category_bytes: int
    has_others: bool
    """Whether the same strategy on as many ranks fits in another form, or may: what is slower than the answer is not looked at."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """A plan that is faster than the first and does not fit: how much is missing."""

    plan: Plan
    missing: int
    """Bytes per rank."""
    speed: float
    """Samples per second against the first plan, above 1."""
    card: str | None
    """The smallest card of the catalog, of the same maker, that has so much; None where none has, or on CPU cores."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Recommendation:
    """The first few plans in order, and what was dropped. ``plans`` is empty when nothing fits."""

    search: Search
    plans: tuple[Choice, ...]
    fewest: Choice | None
    """The fastest plan on as few GPUs as will do, of those searched."""
    change: Change | None
    """What more memory would make possible; None where nothing that is looked at is faster than the first plan."""
    refused: tuple[Refusal, ...]
    """One per row that does not fit, the closest first; of those that their states break, each strategy's leanest."""
    tried: int
    """Candidate plans that were counted."""
    looked: Looked


def candidates(job: Search) -> Iterator[Candidate]:
    """Every plan of the search that makes sense, fitting or not, one by one: what a search must agree with."""
    for each in structures(job):
        yield from (_candidate(each, index) for index in range(len(each.micro_batches)))


def _candidate(each: Structure, index: int) -> Candidate:
    plan = each.at(index)
    peak = peak_of(replace(plan, accumulation=each.rounds(index)))
    return Candidate(plan=plan, peak=peak, needed=needed_bytes(plan, peak), time=step_time(plan))


def recommend(base: Plan | Search, *, top: int = 5, **choices: object) -> Recommendation:
    """The best plans of a job, one per row; ``choices`` are those of ``search``. Raises InputError.

    >>> from memcalc.models import MODELS
    >>> found = recommend(Plan(model=MODELS["gpt2"], tokens=1024, micro_batch=1, ranks=8, strategy="ddp", gpu="a100-80gb"))
    >>> found.plans[0].plan.strategy, found.plans[0].headroom > 0
    ('ddp', True)
    """
    job = base if isinstance(base, Search) else search(base, **choices)  # type: ignore[arg-type]
    if len(set(job.offloads)) > 1:  # states that cross the bus every step are a last resort
        without = recommend(replace(job, offloads=(False,)), top=top)
        if without.plans:
            return replace(without, search=job)
        with contextlib.suppress(PlanError):  # no strategy among them can offload
            found = recommend(replace(job, offloads=(True,)), top=top)
            return found if found.plans else replace(without, search=job, tried=without.tried + found.tried)
        return replace(without, search=job)
    with uncollected():
        return _recommended(job, top)


def _recommended(job: Search, top: int) -> Recommendation:
    field = Field(job)
    if not len(field.seconds):
        asked = "" if job.global_batch is None else f": no micro batch divides global batch {job.global_batch}"
        reason = in_the_way(job)
        over = f"over {' or '.join(map(str, job.ranks))} ranks" + f": {reason}" * bool(reason)
        raise PlanError(f"no plan can be made of these choices{asked} {over}")
    picked = list(_picks(field, np.ones(len(field.seconds), bool), top))
    fastest = field.fastest(np.ones(len(field.seconds), bool)) if picked else None
    best = float("inf") if fastest is None else float(field.seconds[fastest])
    known = Known(field)
    few = _fewest(field) if picked else None
    return Recommendation(
        search=job,
        plans=tuple(_choice(field, entry, best, known) for entry in picked),
        fewest=None if few is None else _choice(field, few, best, known),
        change=_change(field, picked[0]) if picked else None,
        refused=tuple(_refusals(field)),
        tried=len(field.seconds),
        looked=field.looked(),
    )


def _picks(field: Field, among: NDArray[np.bool_], top: int) -> Iterator[int]:
    """The best plans of so many rows in order. The replay of the allocator has the last word on each."""
    tie = TIE
    while top:
        entry = field.pick(among, tie)
        if entry is None:
            return
        if not _surely_fits(field, entry):
            continue
        yield entry
        tie = 0.0  # the runner-up is the fastest of the others
        among = among & (field.row[field.owner] != field.row[field.owner[entry]])
        top -= 1


def _surely_fits(field: Field, entry: int) -> bool:
    plan = field.plan(entry)
    if plan.device == "cpu" or exactly_needed(plan, 0, field.job.limit(plan)) <= field.job.limit(plan):
        return True
    field.refuse(entry)
    return False


def _fewest(field: Field) -> int | None:
    """The best plan on the fewest ranks that will do."""
    ranks = np.array([each.plan.ranks for each in field.structures])[field.owner]
    for count in sorted(set(field.job.ranks)):
        entry = next(_picks(field, ranks == count, 1), None)
        if entry is not None:
            return entry
    return None


def _choice(field: Field, entry: int, fastest: float, known: Known) -> Choice:
    plan = field.plan(entry)
    peak, time = peak_of(plan), step_time(plan)
    needed = exactly_needed(plan, peak, field.job.limit(plan))
    if plan.device == "cuda":  # at the high end of its memory it may be slowed by the allocator
        time = replace(time, high=time.high * crowded(needed / field.job.capacity))
    return Choice(
        plan=plan, peak=peak, needed=needed, headroom=field.job.limit(plan) - needed, time=time,
        speed=fastest / float(field.seconds[entry]), reason=why(plan, known),
    )  # fmt: skip


def _change(field: Field, first: int) -> Change | None:
    """The plan faster than the first, beyond a tie, that misses its limit by least, of those that were looked at."""
    faster = np.flatnonzero((field.seconds * (1 + TIE) < field.seconds[first]) & ~field.possible())
    entries: list[int] = []
    for group in sorted(set(field.group[faster].tolist())):
        here = faster[field.group[faster] == group]
        if field.groups[group].looked:
            entries.append(int(here[np.argmin(field.place[here])]))
    plans = [field.plan(entry) for entry in entries]
    found = next(closest(("", plan, field.job.limit(plan), False) for plan in plans), None)
    if found is None:
        return None
    missing, entry, plan = found[0], entries[found[1]], plans[found[1]]
    if missing <= 0:  # the replay refused it
        missing = exactly_needed(plan, 0) - field.job.limit(plan)
    return Change(
        plan=plan, missing=missing, speed=float(field.seconds[first] / field.seconds[entry]),
        card=smallest_card(plan.gpu_row, field.job.capacity + missing) if plan.device == "cuda" else None,
    )  # fmt: skip


def _refusals(field: Field) -> Iterator[Refusal]:
    """The closest structure of each row of which nothing fits."""
    alive = set(field.owner[field.possible()].tolist())
    fits = {int(field.row[owner]) for owner in alive}
    asked: list[int] = [n for n in range(len(field.structures)) if int(field.row[n]) not in fits]

    def refused() -> Iterator[tuple[Key, Plan, int, bool]]:
        for number in asked:
            plan, by_states = field.structures[number].smallest(), number in field.by_states
            yield (plan.strategy, plan.ranks) if by_states else row_key(plan), plan, 0, by_states

    others = {(field.structures[n].plan.strategy, field.structures[n].plan.ranks) for n in alive}
    places = (place for _, place in islice(closest(refused()), SHOWN))
    found = [_refusal(field, asked[place], others) for place in places]
    return iter(sorted(found, key=lambda each: (each.needed, simplicity(each.plan))))


def _refusal(field: Field, number: int, others: set[tuple[str, int]]) -> Refusal:
    plan = field.structures[number].smallest()
    peak = fullest_of(plan)
    needed = needed_bytes(plan, peak.bytes)
    if needed <= field.job.limit(plan):  # refused by the replay alone
        needed = exactly_needed(plan, peak.bytes)
    category = max(peak.by_category, key=lambda name: peak.by_category[name])
    return Refusal(
        plan=plan, peak=peak.bytes, needed=needed, missing=needed - field.job.limit(plan),
        moment=peak.moment, category=category, category_bytes=peak.by_category[category],
        has_others=(plan.strategy, plan.ranks) in others,
    )  # fmt: skip


def next_plan(plan: Plan, capacity: int) -> Plan | None:
    """After ``plan`` ran out of memory: the best plan of the same job that fits, needs clearly less, and can be run.

    ``capacity`` is in bytes for one rank. Model, ranks and their layout, precision, optimizer and global batch stay as
    they are. None when there is no such plan.
    """
    if capacity < 1 or plan.model.module.factory:  # whose plans are known from a rehearsal of each only
        return None
    limit = min(capacity, int((1 - LESS) * needed_bytes(plan, peak_of(plan))))
    job = search(
        plan,
        capacity=int(limit * plan.ranks / RAM_SHARE) if plan.device == "cpu" else limit,
        strategies=[row.name for row in STRATEGIES.values() if row.plain]
        if plan.strategy_row.plain
        else [plan.strategy],
        tensors=[plan.layout.tensor],
        pipelines=[plan.layout.pipeline],
        precisions=[plan.precision],
        kinds=[plan.optimizer_kind],
        checkpoints=sorted({0, 1, plan.checkpoint_every}),
        offloads=[plan.offload.on],
        global_batch=plan.global_batch or None,
        runnable=not plan.untrained,
    )
    found = recommend(job, top=1).plans
    return found[0].plan if found else None
