"""What a recommendation is asked to choose from: the open choices of a job, one field for each."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from memcalc import open_choices
from memcalc.errors import InputError, PlanError, UnknownNameError
from memcalc.estimate import usable_bytes
from memcalc.loss import Loss
from memcalc.plan import Plan
from memcalc.strategies import STRATEGIES

__all__ = ["GROUPS", "RAM_SHARE", "WITHOUT", "Search", "search", "strategy_names"]

RAM_SHARE = 0.9
"""Part of a machine's RAM that ranks on its CPUs may fill; the rest is for the system and the data's page cache."""

ENGINES = ("torch", "deepspeed", "megatron")
GROUPS = (*ENGINES, "all")
"""Groups of strategies that may be named together: the engines that run them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Search:
    """What is asked, and the choices that are open. ``search`` fills in what is not said."""

    base: Plan
    """Says what is not searched: model, tokens, optimizer, device, GPU."""
    capacity: int
    """Bytes of one GPU; for plans on CPUs the RAM that all ranks share."""
    keep_free: int = 0
    """Bytes of them that shall stay free."""
    ranks: tuple[int, ...]
    per_node: int
    """Ranks of one machine."""
    strategies: tuple[str, ...]
    tensors: tuple[int, ...]
    """Degrees of tensor parallel."""
    pipelines: tuple[int, ...]
    """Degrees of pipeline parallel."""
    checkpoints: tuple[int, ...]
    policies: tuple[str, ...]
    """Ways to checkpoint each block selectively, beside ``checkpoints``."""
    precisions: tuple[str, ...]
    kinds: tuple[str, ...]
    """How the optimizer's step walks the parameters."""
    losses: tuple[Loss, ...]
    syncs: tuple[bool, ...]
    """Whether FSDP reduces gradients after every micro batch; nothing to choose where a step has one, or in a pipeline."""
    offloads: tuple[bool, ...]
    """Whether parameters and optimizer states wait in the host's memory; looked at only where nothing fits without."""
    micro_batches: tuple[int, ...]
    accumulation: int | None = None
    """Micro batches per step where that is said; else one, and of a pipeline enough to fill it."""
    global_batch: int | None = None
    """Samples per optimizer step over all ranks; accumulation follows."""
    runnable: bool = False
    """Only plans that ``trainers/`` can run."""
    allows: Callable[[Plan], bool] | None = None
    """Only plans of which this holds, where it is given: it may not depend on how many samples there are."""

    def limit(self, plan: Plan) -> int:
        """Bytes one rank of a plan may use."""
        room = self.capacity - self.keep_free
        return int(room * RAM_SHARE) // plan.ranks if plan.device == "cpu" else room

    def nodes(self, ranks: int) -> int:
        """Machines that so many ranks fill."""
        return -(-ranks // self.per_node)


def search(
    base: Plan,
    *,
    capacity: int | None = None,
    keep_free: int = 0,
    ranks: Sequence[int] | None = None,
    per_node: int | None = None,
    strategies: Sequence[str] | None = None,
    tensors: Sequence[int] | None = None,
    pipelines: Sequence[int] | None = None,
    checkpoints: Sequence[int] | None = None,
    policies: Sequence[str] | None = None,
    precisions: Sequence[str] | None = None,
    kinds: Sequence[str] | None = None,
    losses: Sequence[Loss] | None = None,
    syncs: Sequence[bool] | None = None,
    offloads: Sequence[bool] | None = None,
    micro_batches: Sequence[int] | None = None,
    accumulation: int | None = None,
    global_batch: int | None = None,
    without: Iterable[str] = (),
    runnable: bool = False,
) -> Search:
    """The open choices of a job; an argument that is given is the whole choice, and so are degrees of tensor and pipeline
    parallel, a form of the loss, offload and a way to checkpoint selectively that the base has. ``without`` takes strategies, their groups and the names of ``WITHOUT`` away again. Raises InputError.

    Weights stay in float32 unless asked otherwise: a GPU with bfloat16 gets amp-bf16, an older one with tensor
    cores amp-fp16, a CPU fp32. Pure 16-bit training changes what is learned, so it is never chosen unasked; frozen
    weights beside float32 adapters are not trained, and are held in 16 bit.
    """
    if base.model.module.factory:
        raise PlanError(
            f"what {base.model.name} keeps is known from a rehearsal of each plan only, too slow to search among hundreds: "
            "compare some with memcalc estimate --module, by --strategy, --checkpointing and --batch-size"
        )
    if capacity is None:
        row = base.gpu_row if base.device == "cuda" else None
        if row is None:
            raise InputError("say how much memory there is: a GPU by name, or capacity in bytes")
        capacity = usable_bytes(base, row)
    if not 0 <= keep_free < capacity:
        raise InputError(f"{keep_free:,} B cannot be kept free of {capacity:,} B")
    counts = (base.ranks,) if ranks is None else tuple(ranks)
    per_node = base.ranks // base.nodes if per_node is None else per_node
    nodes = -(-max(counts) // per_node)
    rounds = base.accumulation if accumulation is None and base.accumulation > 1 else accumulation
    job = Search(
        base=base,
        capacity=capacity,
        keep_free=keep_free,
        ranks=counts,
        per_node=per_node,
        strategies=tuple(open_choices.plain(nodes) if strategies is None else strategies),
        tensors=tuple(open_choices.tensors(base, per_node) if tensors is None else tensors),
        pipelines=tuple(open_choices.pipelines(base) if pipelines is None else pipelines),
        checkpoints=tuple(open_choices.checkpoints(base) if checkpoints is None else checkpoints),
        policies=tuple((open_choices.policies(base) if checkpoints is None else ()) if policies is None else policies),
        precisions=tuple(open_choices.default_precisions(base) if precisions is None else precisions),
        kinds=tuple(open_choices.kinds(base) if kinds is None else kinds),
        losses=tuple(open_choices.losses(base) if losses is None else losses),
        syncs=tuple(open_choices.syncs(base) if syncs is None else syncs),
        offloads=tuple(open_choices.offloads(base) if offloads is None else offloads),
        micro_batches=tuple(
            open_choices.micro_batches(base, counts, global_batch) if micro_batches is None else micro_batches
        ),
        accumulation=rounds,
        global_batch=global_batch,
        runnable=runnable,
    )
    return _less(job, tuple(without))


def _less(job: Search, without: Sequence[str]) -> Search:
    for name in without:
        if name in WITHOUT:
            job = replace(job, **WITHOUT[name](job))
        elif name in STRATEGIES or name in GROUPS:
            gone = strategy_names([name])
            job = replace(job, strategies=tuple(each for each in job.strategies if each not in gone))
        else:
            raise UnknownNameError("choice", name, [*WITHOUT, *STRATEGIES, *GROUPS])
    if not job.strategies:
        said = f"--without {','.join(without)} leaves no strategy" if without else "no strategy is left"
        raise InputError(f"{said} to choose from; name others with --only")
    return job


WITHOUT: dict[str, Callable[[Search], dict[str, Any]]] = {
    "tensor-parallel": lambda job: {"tensors": (job.base.layout.tensor,)},
    "pipeline-parallel": lambda job: {"pipelines": (job.base.layout.pipeline,)},
    "checkpointing": lambda job: {"checkpoints": (job.base.checkpoint_every,), "policies": ()},
    "selective": lambda job: {"policies": ()},
    "every-n": lambda job: {"checkpoints": tuple(each for each in job.checkpoints if each < 2)},
    "fused": lambda job: {"kinds": (job.base.optimizer_kind,)},
    "chunked-loss": lambda job: {"losses": (job.base.loss,)},
    "sync-every-micro-batch": lambda job: {"syncs": (False,)},
    "offload": lambda job: {"offloads": (False,)},
}
"""Choices that can be closed, by name."""


def strategy_names(words: Iterable[str]) -> list[str]:
    """Strategies by name, or all of an engine's. Raises UnknownNameError.

    >>> strategy_names(["ddp", "megatron"])
    ['ddp', 'megatron-ddp', 'megatron-distributed']
    """
    found: list[str] = []
    for word in words:
        if word == "all":
            found += list(STRATEGIES)
        elif word in ENGINES:
            found += [row.name for row in STRATEGIES.values() if row.engine == word and not row.one_process]
        elif word in STRATEGIES:
            found.append(STRATEGIES[word].name)
        else:
            raise UnknownNameError("strategy", word, [*STRATEGIES, *GROUPS])
    return list(dict.fromkeys(found))
