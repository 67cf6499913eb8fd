"""The plans that the open choices of a search make, by structures: plans of one structure differ in the micro batch only,
and in the accumulation that follows from it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import product

from memcalc.checkpointing import Checkpointing
from memcalc.errors import PlanError
from memcalc.fsdp import Fsdp
from memcalc.layout import Layout
from memcalc.offload import Offload
from memcalc.peaks import REPEATS
from memcalc.plan import Plan
from memcalc.search import Search
from memcalc.strategies import STRATEGIES
from memcalc.strategy_table import recipes

__all__ = ["FILL", "Structure", "in_the_way", "simplicity", "structures"]

FILL = 4
"""Micro batches per stage of a pipeline where the accumulation is open: from there on the bubble is small (Huang et al.
2019, GPipe, section 3.2: M >= 4 K)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Structure:
    """Plans that differ in the micro batch only."""

    plan: Plan
    """At the first micro batch."""
    micro_batches: tuple[int, ...]
    accumulations: tuple[int, ...]
    """One for each micro batch."""

    def at(self, index: int) -> Plan:
        """One of the plans."""
        return replace(self.plan, micro_batch=self.micro_batches[index], accumulation=self.accumulations[index])

    def smallest(self) -> Plan:
        """The plan of the smallest micro batch, which needs least unless it accumulates for it."""
        return self.at(min(range(len(self.micro_batches)), key=self.micro_batches.__getitem__))

    def rounds(self, index: int) -> int:
        """Plans of a structure with as many rounds share a ledger."""
        count = self.accumulations[index]
        return count if self.plan.layout.pipeline > 1 else min(count, REPEATS)


def simplicity(plan: Plan) -> tuple[int, ...]:
    """Smaller is simpler: a plan that runs here, the plainer strategy, fewer ranks, nothing divided further, nothing
    computed again, the usual forms, no accumulation, the smaller batch."""
    return (
        bool(plan.untrained),
        list(STRATEGIES).index(plan.strategy) if plan.data_parallel > 1 else 0,
        plan.layout.model_parallel,
        plan.ranks,
        plan.offload.on,
        plan.checkpoint_every,
        plan.checkpointing != Checkpointing(),
        plan.loss.chunks,
        plan.optimizer_kind == "fused",
        plan.fsdp.replicas,
        plan.fsdp.sync_every_micro_batch,
        plan.accumulation,
        plan.micro_batch,
    )


def structures(job: Search) -> Iterator[Structure]:
    """Every structure whose choices can stand together."""
    for plan, batches in _combinations(job):
        if isinstance(plan, PlanError) or (job.runnable and plan.untrained):
            continue
        if job.allows is None or job.allows(plan):
            yield Structure(
                plan=plan,
                micro_batches=tuple(size for size, _ in batches),
                accumulations=tuple(count for _, count in batches),
            )


def in_the_way(job: Search) -> str:
    """Why choices cannot stand together, in the words of the first that cannot; blank where nothing says so."""
    for plan, _ in _combinations(job):
        if isinstance(plan, PlanError):
            return str(plan)
        if job.runnable and plan.untrained:
            return f"memcalc cannot train {plan.untrained}"
    return ""


def _combinations(job: Search) -> Iterator[tuple[Plan | PlanError, list[tuple[int, int]]]]:
    """Every combination of choices as a plan at its first micro batch, or as the reason why there is none."""
    choices = list(_choices(job))
    for ranks, tensor, pipeline in product(job.ranks, job.tensors, job.pipelines):
        nodes, layout = job.nodes(ranks), _layout(job, tensor, pipeline)
        if ranks % nodes or ranks % layout.model_parallel:
            continue
        batches = _batches(job, ranks // layout.model_parallel, layout)
        if not batches:
            continue
        for strategy, fsdp in _divisions(job, ranks, nodes, layout):
            other = fsdp.sync_every_micro_batch and not job.base.fsdp.sync_every_micro_batch
            some = [each for each in batches if each[1] > 1] if other else batches
            for choice in choices if some else ():
                where = {"ranks": ranks, "nodes": nodes, "layout": layout, "strategy": strategy, "fsdp": fsdp}
                yield _plan(job, some[0], **where, **choice), some


def _layout(job: Search, tensor: int, pipeline: int) -> Layout:
    """Ranks arranged so; tokens are divided with the products, which sends as much and keeps less (Korthikanti et al.
    2022, section 4.2.2)."""
    base = job.base.layout
    if (tensor, pipeline) == (base.tensor, base.pipeline):
        return base
    divides = tensor > 1 and job.base.tokens % (tensor * base.context) == 0
    return replace(base, tensor=tensor, pipeline=pipeline, sequence=divides)


def _batches(job: Search, data: int, layout: Layout) -> list[tuple[int, int]]:
    """Micro batches and the accumulation of each, over so many ranks that work on samples of their own."""
    if job.global_batch is None:
        count = job.accumulation or (FILL * layout.pipeline if layout.pipeline > 1 else 1)
        return [(size, count) for size in job.micro_batches]
    found = []
    for size in job.micro_batches:
        count, left = divmod(job.global_batch, size * data)
        if count and not left:
            found.append((size, count))
    return found


def _divisions(job: Search, ranks: int, nodes: int, layout: Layout) -> Iterator[tuple[str, Fsdp]]:
    """Strategies that can be on so many ranks, hybrid ones once for each number of copies, and all that gather once for
    each way to reduce gradients."""
    data, base = ranks // layout.model_parallel, job.base.fsdp
    for name in job.strategies:
        row = STRATEGIES[name]
        if row.parallel if data == 1 and "single" in job.strategies else data > 1 and not row.parallel:
            continue
        fsdp = base if row.gathers else Fsdp()
        copies: Iterable[int] = (base.replicas,) if row.gathers else (0,)
        if row.replicates and not base.replicas:
            counts = sorted({nodes // 2, nodes, 2 * nodes, 4 * nodes})
            copies = (count for count in counts if 1 < count < data and not data % count)
        syncs = job.syncs if row.gathers and layout.pipeline == 1 else (fsdp.sync_every_micro_batch,)
        for count, sync in product(copies, syncs):
            yield name, replace(fsdp, replicas=count, sync_every_micro_batch=sync)


def _choices(job: Search) -> Iterator[dict[str, object]]:
    """What else differs: fields of the plan."""
    base = job.base
    recomputed = [(every, base.checkpointing if every else Checkpointing()) for every in job.checkpoints]
    recomputed += [(1, Checkpointing(policy=policy)) for policy in job.policies]
    for (every, how), precision, kind, loss, away in product(
        recomputed, job.precisions, job.kinds, job.losses, job.offloads
    ):
        offload = (base.offload if base.offload.on else Offload(optimizer="cpu")) if away else Offload()
        yield {
            "checkpoint_every": every, "checkpointing": how, "reentrant": base.reentrant and every > 0,
            "precision": precision, "optimizer_kind": kind, "loss": loss, "offload": offload,
        }  # fmt: skip


def _plan(job: Search, batch: tuple[int, int], **fields: object) -> Plan | PlanError:
    """The plan, or why choices cannot stand together, such as Adafactor on shards."""
    row, offload = STRATEGIES[str(fields["strategy"])], fields["offload"]
    if row.engine != "torch":
        precision, adapter = str(fields["precision"]), job.base.adapter
        if adapter.freezes and adapter.dtype == "float32":  # such an engine updates adapters through float32 masters
            fields["adapter"] = replace(adapter, dtype="weights")
            precision = f"{precision}-master" if precision in ("bf16", "fp16") else precision
        fields["precision"] = recipes(precision)[-1]
    if isinstance(offload, Offload) and offload.on and not job.base.offload.on and (row.gathers or row.zero_stage == 3):
        fields["offload"] = Offload(optimizer="cpu", parameters="cpu")
    try:
        return replace(job.base, micro_batch=batch[0], accumulation=batch[1], **fields)  # type: ignore[arg-type]
    except PlanError as error:
        return error
