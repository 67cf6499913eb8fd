"""What a recommendation is asked to choose from: the open choices of a job, and the plans they make."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

from memcalc.errors import InputError, PlanError
from memcalc.estimate import usable_bytes
from memcalc.plan import Plan
from memcalc.strategies import STRATEGIES

__all__ = [
    "MICRO_BATCHES",
    "Search",
    "activations_known",
    "default_precisions",
    "pure_precision",
    "search",
    "structures",
]

RAM_SHARE = 0.9
"""Part of a machine's RAM that ranks on its CPUs may fill; the rest is for the system and the data's page cache."""

TENSOR_CORES = (7, 0)
"""Compute capability from which 16-bit matrix products are several times faster (CUDA C++ Programming Guide)."""

MICRO_BATCHES = tuple(sorted({base << k for k in range(11) for base in (1, 3)} - {3 << 10, 3 << 9}))
"""Micro batches tried where no global batch is given: 2**k and 3 * 2**k, up to 1024."""

MOST_MICRO_BATCH = 2**16
"""Largest divisor of a global batch that is tried; past it more accumulation costs next to nothing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Search:
    """What is asked, and the choices that are open. ``search`` fills in what is not said."""

    base: Plan
    """Says what is not searched: model, tokens, optimizer, device, GPU."""
    capacity: int
    """Bytes of one GPU; for plans on CPUs the RAM that all ranks share."""
    ranks: tuple[int, ...]
    strategies: tuple[str, ...]
    checkpoints: tuple[int, ...]
    precisions: tuple[str, ...]
    micro_batches: tuple[int, ...]
    global_batch: int | None = None
    """Samples per optimizer step over all ranks; accumulation follows. None keeps the base's accumulation."""

    def limit(self, plan: Plan) -> int:
        """Bytes one rank of a plan may use."""
        return int(self.capacity * RAM_SHARE) // plan.ranks if plan.device == "cpu" else self.capacity


def search(
    base: Plan,
    *,
    capacity: int | None = None,
    ranks: Sequence[int] | None = None,
    strategies: Sequence[str] | None = None,
    checkpoints: Sequence[int] | None = None,
    precisions: Sequence[str] | None = None,
    micro_batches: Sequence[int] | None = None,
    global_batch: int | None = None,
) -> Search:
    """The open choices of a job; an argument that is given is the whole choice. Raises InputError.

    Weights stay in float32 unless asked otherwise: a GPU with bfloat16 gets amp-bf16, an older one with tensor
    cores amp-fp16, a CPU fp32. Pure 16-bit training changes what is learned, so it is never chosen unasked.
    """
    if base.model.module.factory:
        raise PlanError(
            f"what {base.model.name} keeps is known from a rehearsal of each plan only, too slow to search among hundreds: "
            "compare some with memcalc estimate --module, by --strategy, --checkpointing and --batch-size"
        )
    if base.layout.model_parallel * base.layout.expert > 1:
        raise PlanError(
            "a recommendation is among strategies on equal ranks; leave out tensor, context, pipeline and expert parallel, "
            "and estimate such plans one by one"
        )
    if capacity is None:
        row = base.gpu_row if base.device == "cuda" else None
        if row is None:
            raise InputError("say how much memory there is: a GPU by name, or capacity in bytes")
        capacity = usable_bytes(base, row)
    counts = (base.ranks,) if ranks is None else tuple(ranks)
    return Search(
        base=base,
        capacity=capacity,
        ranks=counts,
        strategies=tuple(_runnable() if strategies is None else strategies),
        checkpoints=tuple(_checkpoints(base) if checkpoints is None else checkpoints),
        precisions=tuple(default_precisions(base) if precisions is None else precisions),
        micro_batches=tuple(_micro_batches(base, counts, global_batch) if micro_batches is None else micro_batches),
        global_batch=global_batch,
    )


def default_precisions(base: Plan) -> tuple[str, ...]:
    """The recipe tried where none is given; see ``search``."""
    gpu = base.gpu_row
    if base.device == "cpu":
        return ("fp32",)
    if gpu is None or gpu.bfloat16:
        return ("amp-bf16",)
    return ("amp-fp16",) if (gpu.capability or (0, 0)) >= TENSOR_CORES else ("fp32",)


def pure_precision(base: Plan) -> str:
    """The recipe with 16-bit weights that the hardware computes fast."""
    return "fp16" if default_precisions(base) == ("amp-fp16",) else "bf16"


def activations_known(base: Plan) -> bool:
    """False for a model of which only the parameter count is known: nothing says what its layers keep."""
    return base.model.family != "size" or bool(base.model.layer_bytes or (base.model.features and base.model.layers))


def _runnable() -> list[str]:
    """Strategies that ``--launch`` can run."""
    return [row.name for row in STRATEGIES.values() if row.plain and not row.replicates]


def _checkpoints(base: Plan) -> tuple[int, ...]:
    return (0, 1) if activations_known(base) and base.model.blocks else (0,)


def _micro_batches(base: Plan, ranks: Sequence[int], global_batch: int | None) -> Sequence[int]:
    if base.model.family == "size" and (base.model.layer_bytes or not base.model.features):
        return [base.micro_batch]  # what a layer keeps was stated for this micro batch, or is not known at all
    if global_batch is None:
        return MICRO_BATCHES
    if not any(global_batch % count == 0 for count in ranks):
        near = max(global_batch // ranks[0], 1) * ranks[0]
        raise PlanError(
            f"global batch {global_batch} does not divide over {ranks[0]} ranks; take {near} or {near + ranks[0]}"
        )
    return [size for size in range(1, min(global_batch, MOST_MICRO_BATCH) + 1) if global_batch % size == 0]


def structures(job: Search) -> Iterator[list[Plan]]:
    """Plans that differ in the micro batch only (and in the accumulation that follows from it)."""
    for ranks, strategy, every, precision in product(job.ranks, job.strategies, job.checkpoints, job.precisions):
        parallel = STRATEGIES[strategy].parallel
        if parallel if ranks == 1 and "single" in job.strategies else ranks > 1 and not parallel:
            continue
        plans = []
        for micro_batch in job.micro_batches:
            accumulation = job.base.accumulation
            if job.global_batch is not None:
                accumulation, left = divmod(job.global_batch, micro_batch * ranks)
                if left or not accumulation:
                    continue
            try:
                plans.append(replace(
                    job.base, ranks=ranks, strategy=strategy, checkpoint_every=every, precision=precision,
                    micro_batch=micro_batch, accumulation=accumulation, reentrant=job.base.reentrant and every > 0,
                ))  # fmt: skip
            except PlanError:  # choices that cannot stand together, such as Adafactor on shards
                break
        if plans:
            yield plans
