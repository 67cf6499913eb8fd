"""What would make a job fit that does not: each change alone, in the words of the command line."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace

from memcalc.errors import PlanError
from memcalc.fitting import needed_bytes
from memcalc.hardware import GPUS
from memcalc.loss import Loss
from memcalc.open_choices import CHUNKS, default_precisions, pure_precision
from memcalc.optimizers import OPTIMIZERS
from memcalc.peaks import peak_of
from memcalc.plan import Plan
from memcalc.search import Search
from memcalc.strategies import STRATEGIES
from memcalc.structures import structures

__all__ = ["remedies"]

LEANEST = "fsdp-full-shard"
"""The strategy that needs least memory per rank."""

MOST_GPUS = 1024
"""GPUs that are suggested at most."""

SHORTEST = 128
"""Tokens that a sequence is shortened to at the least."""

QUANTISED = "nf4-double"
"""How frozen weights are stored that shall take less: QLoRA's form (Dettmers et al. 2023, section 3)."""

LEANER = ("adamw-8bit", "adafactor", "sgd")
"""Optimizers with smaller states, the one that learns most alike first."""


def remedies(job: Search) -> list[str]:
    """Each change alone that would do, starting from the plan of a search that divides and recomputes most."""
    plan, limit = _leanest(job), job.limit
    found = [words for words, other in _changes(plan, job) if _needed(other) <= limit(other)]
    for lengths in [_shorter(plan)]:
        at = bisect_left(lengths, True, key=lambda other: _needed(other) <= limit(other))
        found += [f"--seq-len {lengths[at].tokens}"] if at < len(lengths) else []
    if plan.device == "cpu":
        return found
    counts = [plan.ranks << k for k in range(1, 11) if plan.ranks << k <= MOST_GPUS]
    strategy = LEANEST if plan.strategy == "single" else plan.strategy
    divided = [replace(plan, ranks=count, strategy=strategy) for count in counts]
    at = bisect_left(divided, True, key=lambda other: _needed(other) <= limit(other))
    found += [f"--gpus {divided[at].ranks}"] if at < len(divided) else []
    peak = peak_of(plan)
    for gpu in sorted(GPUS.values(), key=lambda gpu: gpu.usable_bytes):
        room = gpu.usable_bytes - job.keep_free
        if gpu.usable_bytes > job.capacity and needed_bytes(replace(plan, gpu=gpu.name), peak) <= room:
            return [*found, f"--gpu {gpu.name}"]
    return found


def _needed(plan: Plan) -> int:
    return needed_bytes(plan, peak_of(plan))


def _leanest(job: Search) -> Plan:
    """The plan of a search that divides most and recomputes most, in its usual forms and at the smallest micro batch."""
    order = list(STRATEGIES)
    plans = [
        each.smallest() for each in structures(replace(job, losses=job.losses[:1], kinds=job.kinds[:1], policies=()))
    ]
    plain = [plan for plan in plans if plan.layout == job.base.layout] or plans

    def divides(plan: Plan) -> tuple[int, int, bool, int]:
        return plan.ranks, order.index(plan.strategy), plan.checkpoint_every > 0, -plan.checkpoint_every

    return max(plain, key=divides)


def _shorter(plan: Plan) -> list[Plan]:
    """The same with half of the tokens, and half of these, and so on."""
    lengths = []
    while plan.tokens > SHORTEST:
        plan = replace(plan, tokens=plan.tokens // 2)
        lengths.append(plan)
    return lengths


def _changes(plan: Plan, job: Search) -> Iterator[tuple[str, Plan]]:
    if plan.micro_batch > 1:
        yield "--batch-size 1", replace(plan, micro_batch=1)
    if not plan.checkpoint_every and plan.model.blocks:
        yield "--checkpointing full", replace(plan, checkpoint_every=1)
    if plan.strategy_row.gathers and plan.accumulation > 1 and plan.layout.pipeline == 1:
        yield "--sync-every-micro-batch", replace(plan, fsdp=replace(plan.fsdp, sync_every_micro_batch=True))
    if plan.ranks > 1 and plan.strategy != LEANEST:
        yield f"--strategy {LEANEST}", replace(plan, strategy=LEANEST)
    if plan.optimizer_kind != "fused" and "fused" in plan.optimizer_row.kinds:
        yield "--optimizer-kind fused", replace(plan, optimizer_kind="fused")
    if plan.loss == Loss() and not plan.keep_logits and plan.tokens >= CHUNKS:
        yield f"--loss-chunks {CHUNKS} --chunk-head", replace(plan, loss=Loss(chunks=CHUNKS, chunk_head=True))
    if plan.device == "cuda" and not {"bf16", "fp16"} & set(job.precisions):
        yield "--allow-pure-16bit", replace(plan, precision=pure_precision(plan))
    if plan.adapter.freezes and plan.adapter.quantize == "none":
        with suppress(PlanError):  # FSDP 1 and DeepSpeed hold no quantised weights
            quantised = replace(plan, adapter=replace(plan.adapter, quantize=QUANTISED))
            yield f"--quantize {QUANTISED}", replace(quantised, precision=default_precisions(quantised)[0])
    for name in LEANER:
        try:
            yield (
                f"--optimizer {name}",
                replace(plan, optimizer=name, optimizer_kind=OPTIMIZERS[name].usual_kind(plan.device)),
            )
        except PlanError:  # Adafactor cannot update shards
            continue
