"""The best plan for a job: try the candidates, drop what does not fit, order the rest by time per sample.

    Search ── candidates ──► fits? ──► order by time, ties to the simpler plan ──► Recommendation

One skeleton of the ledger serves all micro batches of a structure, so thousands of plans take a second.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from memcalc.errors import PlanError
from memcalc.estimate import estimate, host_bytes
from memcalc.hardware import GPUS
from memcalc.ledger import ledger, peaks
from memcalc.loss import Loss
from memcalc.outside import outside
from memcalc.plan import Plan
from memcalc.reasons import why
from memcalc.reserved import most_reserved
from memcalc.search import RAM_SHARE, Search, pure_precision, search, structures
from memcalc.strategies import STRATEGIES
from memcalc.throughput import StepTime, step_time

__all__ = [
    "TIE", "Candidate", "Choice", "Recommendation", "Refusal", "best", "candidates", "next_plan", "recommend", "remedies",
]  # fmt: skip

TIE = 0.03
"""Plans this close in predicted time count as equal: one layout measured twice differs by 2.8 % (110.48 and
113.54 s, bigscience chronicles of tr11-176B), so a smaller lead is noise."""

LESS = 0.10
"""After running out of memory the next plan has to need at least this much less than the one that failed."""

LEANEST = "fsdp-full-shard"
"""The strategy that needs least memory per rank."""

MOST_GPUS = 1024
"""GPUs that are suggested at most."""

CHUNKS = 8
"""Parts of the tokens a remedy cuts the loss into, as torchtune and torchtitan do (num_output_chunks)."""

SHOWN = 12
"""Structures that do not fit of which the breaking term is worked out."""

PROCESS_BYTES = 500 * 2**20
"""RAM of a Python process before its first tensor: 300 MiB with torch, its profiler, FSDP and checkpointing
imported (measured, CPU wheel of torch 2.13 on Linux); gloo's buffers and the batches of the data loader come on top."""


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
    """Bytes of the capacity left at the high end."""
    time: StepTime
    speed: float
    """Samples per second relative to the fastest plan that fits, at most 1."""
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Refusal:
    """A structure of which not even the smallest micro batch fits, and the term that breaks it."""

    plan: Plan
    peak: int
    needed: int
    missing: int
    """Bytes over the capacity."""
    moment: str
    category: str
    category_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Recommendation:
    """The first few plans in order, and what was dropped. ``plans`` is empty when nothing fits."""

    search: Search
    plans: tuple[Choice, ...]
    refused: tuple[Refusal, ...]
    """One per structure that does not fit, the closest first."""
    tried: int
    """Candidate plans looked at."""


def candidates(job: Search) -> Iterator[Candidate]:
    """Every plan of the search that makes sense, fitting or not."""
    for plans in structures(job):
        yield from _evaluate(plans)


def _evaluate(plans: Sequence[Plan]) -> list[Candidate]:
    """Candidates of one structure. Rounds of accumulation after the third only repeat themselves in the ledger."""
    found = []
    for rounds in sorted({min(plan.accumulation, 3) for plan in plans}):
        same = [plan for plan in plans if min(plan.accumulation, 3) == rounds]
        for plan, peak in zip(same, peaks(same[0], [plan.micro_batch for plan in same]), strict=True):
            found.append(Candidate(plan=plan, peak=peak, needed=needed_bytes(plan, peak), time=step_time(plan)))
    return found


def needed_bytes(plan: Plan, peak: int) -> int:
    """The high end of what one rank takes: of its GPU, or on a CPU of the machine's RAM."""
    if plan.device == "cpu":
        return host_bytes(plan, peak) + PROCESS_BYTES
    return most_reserved(plan, peak) + outside(plan, plan.gpu_row).high


def replayed(found: Candidate) -> Candidate:
    """The same with the allocator replayed, which may need more than the published share that serves the search."""
    if found.plan.device == "cpu":
        return found
    return replace(found, needed=estimate(found.plan).device.high)


def simplicity(plan: Plan) -> tuple[int, ...]:
    """Smaller is simpler: the plainer strategy, no checkpointing, no accumulation, the smaller batch."""
    return (
        list(STRATEGIES).index(plan.strategy),
        plan.ranks,
        plan.checkpoint_every,
        plan.accumulation,
        plan.micro_batch,
    )


def best(found: Iterable[Candidate]) -> Candidate:
    """The simplest of those within TIE of the fastest."""
    found = list(found)
    limit = (1 + TIE) * min(c.time.seconds_per_sample for c in found)
    return min((c for c in found if c.time.seconds_per_sample <= limit), key=lambda c: simplicity(c.plan))


def structure(plan: Plan) -> tuple[str, int, int, str]:
    """What stays the same while the micro batch varies."""
    return (plan.strategy, plan.ranks, plan.checkpoint_every, plan.precision)


def recommend(base: Plan | Search, *, top: int = 5, **choices: object) -> Recommendation:
    """The best plans of a job, one per structure; ``choices`` are those of ``search``. Raises InputError.

    >>> from memcalc.models import MODELS
    >>> found = recommend(Plan(model=MODELS["gpt2"], tokens=1024, micro_batch=1, ranks=8, strategy="ddp", gpu="a100-80gb"))
    >>> found.plans[0].plan.strategy, found.plans[0].headroom > 0
    ('ddp', True)
    """
    job = base if isinstance(base, Search) else search(base, **choices)  # type: ignore[arg-type]
    found = list(candidates(job))
    if not found:
        raise PlanError(f"no micro batch divides global batch {job.global_batch} over {job.base.ranks} ranks")
    left = fitting = [c for c in found if c.needed <= job.limit(c.plan)]
    picked: list[Candidate] = []
    while left and len(picked) < top:
        chosen = replayed(best(left))
        if chosen.needed > job.limit(chosen.plan):
            fitting, left = ([c for c in part if c.plan != chosen.plan] for part in (fitting, left))
            continue
        picked.append(chosen)
        left = [c for c in left if structure(c.plan) != structure(chosen.plan)]
    works = {structure(c.plan) for c in fitting}
    return Recommendation(
        search=job,
        plans=tuple(_choice(job, c, fitting, found) for c in picked),
        refused=tuple(_refusals(job, [c for c in found if structure(c.plan) not in works])),
        tried=len(found),
    )


def _choice(job: Search, c: Candidate, fitting: Sequence[Candidate], found: Sequence[Candidate]) -> Choice:
    fastest = min(other.time.seconds_per_sample for other in fitting)
    return Choice(
        plan=c.plan,
        peak=c.peak,
        needed=c.needed,
        headroom=job.limit(c.plan) - c.needed,
        time=c.time,
        speed=fastest / c.time.seconds_per_sample,
        reason=why(c.plan, [other.plan for other in fitting], [other.plan for other in found]),
    )


def _refusals(job: Search, failing: Sequence[Candidate]) -> list[Refusal]:
    smallest: dict[tuple[str, int, int, str], Candidate] = {}
    for c in failing:
        kept = smallest.setdefault(structure(c.plan), c)
        if c.needed < kept.needed:
            smallest[structure(c.plan)] = c
    refused = []

    def closest(c: Candidate) -> tuple[object, ...]:
        return c.needed, simplicity(c.plan)

    for c in sorted(map(replayed, sorted(smallest.values(), key=closest)[:SHOWN]), key=closest):
        peak = ledger(c.plan).peak()
        category = max(peak.by_category, key=lambda name: peak.by_category[name])
        refused.append(Refusal(
            plan=c.plan, peak=c.peak, needed=c.needed, missing=c.needed - job.limit(c.plan),
            moment=peak.moment, category=category, category_bytes=peak.by_category[category],
        ))  # fmt: skip
    return refused


def next_plan(plan: Plan, capacity: int) -> Plan | None:
    """After ``plan`` ran out of memory: the best plan of the same job that fits and needs clearly less.

    ``capacity`` is in bytes for one rank. Model, ranks, precision, optimizer and global batch stay as they are.
    None when there is no such plan.
    """
    if capacity < 1 or plan.model.module.factory:  # whose plans are known from a rehearsal of each only
        return None
    needed = needed_bytes(plan, ledger(plan).peak().bytes)
    limit = min(capacity, int((1 - LESS) * needed))
    job = search(
        plan,
        capacity=int(limit * plan.ranks / RAM_SHARE) if plan.device == "cpu" else limit,
        precisions=[plan.precision],
        checkpoints=sorted({0, 1, plan.checkpoint_every}),
        global_batch=plan.global_batch or None,
    )
    found = recommend(job, top=1).plans
    return found[0].plan if found else None


def remedies(job: Search) -> list[str]:
    """What would make a job fit that does not: each change alone, in the words of the command line."""
    plan, limit = _leanest(job), job.limit
    found = [words for words, other in _changes(plan, job) if _needed(other) <= limit(other)]
    if plan.device == "cpu":
        return found
    counts = [plan.ranks << k for k in range(1, 11) if plan.ranks << k <= MOST_GPUS]
    strategy = LEANEST if plan.strategy == "single" else plan.strategy
    divided = [replace(plan, ranks=count, strategy=strategy) for count in counts]
    at = bisect_left(divided, True, key=lambda other: _needed(other) <= limit(other))
    found += [f"--gpus {divided[at].ranks}"] if at < len(divided) else []
    peak = ledger(plan).peak().bytes
    for gpu in sorted(GPUS.values(), key=lambda gpu: gpu.usable_bytes):
        if gpu.usable_bytes > job.capacity and needed_bytes(replace(plan, gpu=gpu.name), peak) <= gpu.usable_bytes:
            return [*found, f"--gpu {gpu.name}"]
    return found


def _needed(plan: Plan) -> int:
    return needed_bytes(plan, ledger(plan).peak().bytes)


def _leanest(job: Search) -> Plan:
    """The plan of a search that divides most and recomputes most, at the smallest micro batch."""
    plans = [min(plans, key=lambda plan: plan.micro_batch) for plans in structures(job)]
    order = list(STRATEGIES)
    return max(plans, key=lambda plan: (plan.ranks, order.index(plan.strategy), plan.checkpoint_every > 0))


def _changes(plan: Plan, job: Search) -> Iterator[tuple[str, Plan]]:
    if plan.micro_batch > 1:
        yield "--batch-size 1", replace(plan, micro_batch=1)
    if not plan.checkpoint_every and plan.model.blocks:
        yield "--checkpointing full", replace(plan, checkpoint_every=1)
    if plan.ranks > 1 and plan.strategy != LEANEST:
        yield f"--strategy {LEANEST}", replace(plan, strategy=LEANEST)
    if plan.optimizer_kind != "fused" and "fused" in plan.optimizer_row.kinds:
        yield "--optimizer-kind fused", replace(plan, optimizer_kind="fused")
    if plan.loss == Loss() and not plan.keep_logits and plan.tokens >= CHUNKS:
        yield f"--loss-chunks {CHUNKS} --chunk-head", replace(plan, loss=Loss(chunks=CHUNKS, chunk_head=True))
    if plan.device == "cuda" and not {"bf16", "fp16"} & set(job.precisions):
        yield "--allow-pure-16bit", replace(plan, precision=pure_precision(plan))
    if plan.tokens > 128:
        yield f"--seq-len {plan.tokens // 2}", replace(plan, tokens=plan.tokens // 2)
