"""What a recommendation is asked to choose from: the open choices of a job, one field for each."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from memcalc.adapters import Adapter
from memcalc.checkpointing import Checkpointing
from memcalc.errors import InputError, PlanError, UnknownNameError
from memcalc.estimate import usable_bytes
from memcalc.hardware import NODE_GPUS
from memcalc.loss import Loss
from memcalc.plan import Plan
from memcalc.strategies import STRATEGIES

__all__ = [
    "CHUNKS", "MICRO_BATCHES", "NODE_GPUS", "WITHOUT", "Search", "activations_known", "default_precisions", "gpu_counts",
    "pure_precision", "search", "strategy_names",
]  # fmt: skip

RAM_SHARE = 0.9
"""Part of a machine's RAM that ranks on its CPUs may fill; the rest is for the system and the data's page cache."""

TENSOR_CORES = (7, 0)
"""Compute capability from which 16-bit matrix products are several times faster (CUDA C++ Programming Guide)."""

MICRO_BATCHES = tuple(sorted({base << k for k in range(11) for base in (1, 3)} - {3 << 10, 3 << 9}))
"""Micro batches tried where no global batch is given: 2**k and 3 * 2**k, up to 1024."""

MOST_MICRO_BATCH = 2**16
"""Largest divisor of a global batch that is tried; past it more accumulation costs next to nothing."""

CHUNKS = 8
"""Parts of the tokens the loss is cut into, as torchtune and torchtitan do (num_output_chunks)."""

EVERY = (2,)
"""Blocks that one checkpoint spans, beside all blocks one by one: fewer are kept, and more is alive while one runs again."""

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
    offloads: tuple[bool, ...]
    """Whether parameters and optimizer states wait in the host's memory; looked at only where nothing fits without."""
    micro_batches: tuple[int, ...]
    accumulation: int | None = None
    """Micro batches per step where that is said; else one, and of a pipeline enough to fill it."""
    global_batch: int | None = None
    """Samples per optimizer step over all ranks; accumulation follows."""
    runnable: bool = False
    """Only plans that ``trainers/`` can run."""

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
        strategies=tuple(_plain(nodes) if strategies is None else strategies),
        tensors=tuple(_tensors(base, per_node) if tensors is None else tensors),
        pipelines=tuple(_pipelines(base) if pipelines is None else pipelines),
        checkpoints=tuple(_checkpoints(base) if checkpoints is None else checkpoints),
        policies=tuple((_policies(base) if checkpoints is None else ()) if policies is None else policies),
        precisions=tuple(default_precisions(base) if precisions is None else precisions),
        kinds=tuple(_kinds(base) if kinds is None else kinds),
        losses=tuple(_losses(base) if losses is None else losses),
        offloads=tuple(_offloads(base) if offloads is None else offloads),
        micro_batches=tuple(_micro_batches(base, counts, global_batch) if micro_batches is None else micro_batches),
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


def gpu_counts(most: int, per_node: int = NODE_GPUS) -> tuple[int, ...]:
    """Numbers of GPUs worth trying up to ``most``: any on one machine, then whole machines in growing steps. What is
    tried for fewer is tried for more, so that more can only be faster.

    >>> gpu_counts(6), gpu_counts(100)[8:]
    ((1, 2, 3, 4, 5, 6), (16, 24, 32, 40, 48, 56, 64, 80, 96))
    """
    machines = sorted({count << k for k in range(most.bit_length()) for count in range(1, 9)})
    return (
        *range(1, min(most, per_node) + 1),
        *(count * per_node for count in machines if per_node < count * per_node <= most),
    )


def default_precisions(base: Plan) -> tuple[str, ...]:
    """The recipe tried where none is given; see ``search``.

    Frozen weights are held in 16 bit where the adapters beside them are float32, as PEFT trains a model that was loaded
    so (peft/tuners/tuners_utils.py, autocast_adapter_dtype). Beside quantised ones all else is float32
    (peft/utils/other.py, prepare_model_for_kbit_training).
    """
    adapter = base.adapter
    if adapter.freezes and adapter.dtype == "float32" and adapter.quantize == "none":
        usual = default_precisions(replace(base, adapter=Adapter()))[0]
        return ({"amp-bf16": "bf16", "amp-fp16": "fp16"}.get(usual, usual),)
    gpu = base.gpu_row
    if base.device == "cpu":
        return ("fp32",)
    if gpu is None or gpu.bfloat16:
        return ("amp-bf16",)
    return ("amp-fp16",) if (gpu.capability or (0, 0)) >= TENSOR_CORES else ("fp32",)


def pure_precision(base: Plan) -> str:
    """The recipe with 16-bit weights that the hardware computes fast."""
    return "fp16" if default_precisions(base)[0].endswith("fp16") else "bf16"


def activations_known(base: Plan) -> bool:
    """False for a model of which only the parameter count is known: nothing says what its layers keep."""
    return base.model.family != "size" or bool(base.model.layer_bytes or (base.model.features and base.model.layers))


def _plain(nodes: int) -> list[str]:
    """Strategies of torch alone; hybrid ones where there is more than one machine to keep a copy on."""
    return [row.name for row in STRATEGIES.values() if row.plain and (nodes > 1 or not row.replicates)]


def _tensors(base: Plan, per_node: int) -> tuple[int, ...]:
    """Powers of two that divide the heads and lie within a machine: beyond it tensor parallel collapses."""
    model, layout = base.model, base.layout
    if layout.tensor > 1 or base.device == "cpu" or not base.family.divides or base.adapter.freezes:
        return (layout.tensor,)
    degrees = [1 << k for k in range(per_node.bit_length())]
    return tuple(n for n in degrees if n <= per_node and not (model.heads % n or model.kv_heads % n or model.ffn % n))


def _pipelines(base: Plan) -> tuple[int, ...]:
    """Powers of two with at least two blocks a stage."""
    family, layout = base.family, base.layout
    one_sequence = family.reads == "tokens" and not (family.encodes or family.unplayed)
    if layout.pipeline > 1 or base.device == "cpu" or not one_sequence or base.adapter.freezes:
        return (layout.pipeline,)
    return tuple(1 << k for k in range(max(base.model.blocks // 2, 1).bit_length()))


def _checkpoints(base: Plan) -> tuple[int, ...]:
    if not (activations_known(base) and base.model.blocks):
        return (0,)
    return (0, 1, *(every for every in EVERY if every < base.model.blocks))


def _policies(base: Plan) -> tuple[str, ...]:
    known = activations_known(base) and base.model.blocks and base.model.heads
    skips = base.family.unplayed or base.family.encodes or base.reentrant or base.checkpointing != Checkpointing()
    return ("matrix-products",) if known and not skips else ()


def _kinds(base: Plan) -> tuple[str, ...]:
    """The usual way first; one kernel for all where the optimizer has it."""
    usual = base.optimizer_kind
    return (usual, "fused") if usual == "foreach" and "fused" in base.optimizer_row.kinds else (usual,)


def _losses(base: Plan) -> tuple[Loss, ...]:
    whole = base.loss == Loss() and not base.keep_logits and base.device == "cuda"
    if not (whole and base.tokens >= CHUNKS and base.model.says_words and not base.family.unplayed):
        return (base.loss,)
    return (base.loss, Loss(chunks=CHUNKS, chunk_head=True))


def _offloads(base: Plan) -> tuple[bool, ...]:
    if base.offload.on:
        return (True,)
    return (False,) if base.device == "cpu" or base.adapter.freezes or base.family.opaque else (False, True)


def _micro_batches(base: Plan, ranks: Sequence[int], global_batch: int | None) -> Sequence[int]:
    if base.model.family == "size" and (base.model.layer_bytes or not base.model.features):
        return [base.micro_batch]  # what a layer keeps was stated for this micro batch, or is not known at all
    if global_batch is None:
        return MICRO_BATCHES
    if base.layout.model_parallel == 1 and not any(global_batch % count == 0 for count in ranks):
        near = max(global_batch // ranks[0], 1) * ranks[0]
        raise PlanError(
            f"global batch {global_batch} does not divide over {ranks[0]} ranks; take {near} or {near + ranks[0]}"
        )
    return [size for size in range(1, min(global_batch, MOST_MICRO_BATCH) + 1) if global_batch % size == 0]
