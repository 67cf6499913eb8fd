"""What plans need, as far as a search asks: bytes on the device, a bound that needs no ledger, and the largest micro
batch that fits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache, partial

from memcalc.adapters import Adapter
from memcalc.errors import InputError, PlanError
from memcalc.estimate import estimate, host_bytes
from memcalc.frozen import Frozen
from memcalc.ledger import play
from memcalc.loss import Loss
from memcalc.models import FAMILIES, Model
from memcalc.optimizers import OPTIMIZERS
from memcalc.outside import outside
from memcalc.plan import Plan
from memcalc.precision import DTYPE_BYTES
from memcalc.recorder import granularity
from memcalc.reserved import most_reserved
from memcalc.stages import stage, telling
from memcalc.timeline import Skeleton, Timeline

__all__ = [
    "PROCESS_BYTES", "Depth", "Group", "depth_of", "exactly_needed", "needed_bytes", "peak_of", "state_bound", "timeline_of",
]  # fmt: skip

PROCESS_BYTES = 500 * 2**20
"""RAM of a Python process before its first tensor: 300 MiB with torch, its profiler, FSDP and checkpointing
imported (measured, CPU wheel of torch 2.13 on Linux); gloo's buffers and the batches of the data loader come on top."""

PLAYED = 256
"""Ledgers kept for another look."""


SHALLOW = (3, 4)
"""Checkpoints of a stage in the two ledgers that a deep model's bound is drawn through."""

DEEP = 12
"""Checkpoints of a stage from which on a bound through the two pays."""


def needed_bytes(plan: Plan, peak: int) -> int:
    """The high end of what one rank takes by an allocated peak: of its GPU, or on a CPU of the machine's RAM."""
    if plan.device == "cpu":
        return host_bytes(plan, peak) + PROCESS_BYTES
    return most_reserved(plan, peak) + outside(plan, plan.gpu_row).high


def exactly_needed(plan: Plan, peak: int) -> int:
    """The same with the allocator replayed, which may need more than the published share that serves the search."""
    return needed_bytes(plan, peak) if plan.device == "cpu" else _replayed(plan)


@lru_cache(maxsize=PLAYED)
def _replayed(plan: Plan) -> int:
    return estimate(plan).device.high


def peak_of(plan: Plan) -> int:
    """Allocated peak of a plan in bytes, of a ledger that is shared with its like. Raises PlanError past 4 EiB."""
    return max(_peak_of_stage(plan, index) for index in _stages(plan))


def _stages(plan: Plan) -> list[int]:
    """Those of which one is the fullest; without a pipeline stage 0."""
    return [each.index for each in telling(plan)]


def _peak_of_stage(plan: Plan, index: int) -> int:
    return _bones(plan, index).peaks([plan.micro_batch])[0]


def _bones(plan: Plan, index: int) -> Skeleton:
    """One stage's ledger. Only the last stage of a pipeline takes the loss, so the others share one for all its forms."""
    if plan.loss.chunk_head and index < plan.layout.pipeline - 1:
        plan = replace(plan, loss=Loss(vocab_multiple=plan.loss.vocab_multiple))
    return _played(_shared(plan), index)


@lru_cache(maxsize=PLAYED)
def _played(plan: Plan, index: int) -> Skeleton:
    return play(plan, stage(plan, index))


def _shared(plan: Plan) -> Plan:
    """The plan that stands for all with its ledger: of another micro batch, and where nothing is divided over the ranks
    that hold the same weights, of two of these."""
    row = plan.strategy_row
    whole = not (row.shards_optimizer or row.shards_parameters or row.one_process or row.zero_stage is not None)
    ranks = 2 * plan.layout.model_parallel if whole and plan.data_parallel > 2 else plan.ranks
    return replace(
        plan, micro_batch=1 if plan.micro_batch else 0, ranks=ranks, nodes=plan.nodes if ranks == plan.ranks else 1
    )


@lru_cache(maxsize=16)
def _sizes(model: Model, adapter: Adapter, frozen: Frozen, optimizer: str, dtype: str) -> tuple[int, int, int]:
    """Elements of all parameters, of the trained ones, and bytes of the optimizer's states of these."""
    weights = frozen.weights(adapter.weights(FAMILIES[model.family].weights(model), model.heads))
    trained = [each for each in weights if each.trainable]
    states = sum(sum(OPTIMIZERS[optimizer].state_bytes(each, dtype)) for each in trained)
    return sum(each.numel for each in weights), sum(each.numel for each in trained), states


def state_bound(plan: Plan) -> int:
    """Bytes that a rank holds at the least when the optimizer steps, without a ledger: an equal share of parameters,
    gradients and states. 0 where something else than the strategy decides where they are.

    >>> from memcalc.models import MODELS
    >>> plan = Plan(model=MODELS["gpt2"], tokens=8, micro_batch=1, ranks=8, strategy="zero-1")
    >>> state_bound(plan) == (4 + 4 + 8 // 8) * 124_439_808
    True
    """
    if plan.offload.on or plan.adapter != Adapter() or plan.update.in_backward or plan.compute.offload_activations:
        return 0
    whole, trained, states = _sizes(plan.model, plan.adapter, plan.frozen, plan.optimizer, plan.precision_row.weights)
    row, width, shards = plan.strategy_row, DTYPE_BYTES[plan.precision_row.weights], plan.shards
    parts = plan.layout.tensor * plan.layout.pipeline
    held = width * whole // (shards if row.shards_parameters else 1)
    held += width * trained // (shards if row.shards_gradients or row.shards_parameters else 1)
    held += states // (shards if row.shards_optimizer else 1)
    return held // (parts * max(plan.layout.expert, 1))


def timeline_of(plan: Plan) -> Timeline:
    """The timeline of the fullest stage, of a ledger that is shared with its like."""
    stages = [_bones(plan, index) for index in _stages(plan)]
    return max(stages, key=lambda bones: bones.peaks([plan.micro_batch])[0]).at(plan.micro_batch)


@dataclass(frozen=True, slots=True)
class Depth:
    """A bound on the peak of a deep model from two shallow ones: the peak is the most of sums that grow evenly with the
    layers, so it is convex in them, and a line through two points lies below it further on."""

    shallow: tuple[Plan, Plan]
    steps: int
    """Layers beyond the deeper of the two, counted in its distance from the other."""
    rounding: int
    """Bytes by which the deeper one may be more than its layers make it: tensors that hold parts of many layers are rounded
    up to whole blocks once, which a line would draw out."""

    def peak(self, micro_batch: int) -> int:
        """Bytes that the peak is at the least, on the first stage of a pipeline and so on the fullest."""
        low, high = (_peak_of_stage(replace(plan, micro_batch=micro_batch), 0) for plan in self.shallow)
        return high - self.rounding + self.steps * (high - self.rounding - low)


def depth_of(plan: Plan) -> Depth | None:
    """The bound of a plan, where it is a bound and cheaper than the ledger itself.

    ZeroRedundancyOptimizer hands out whole tensors and DeepSpeed's buckets are of all layers together: neither grows evenly.
    Nor does a mixture of experts some of whose layers are dense, nor what is known by its size alone.
    """
    row, layout, model = plan.strategy_row, plan.layout, plan.model
    span = max(plan.checkpoint_every, 1) * layout.pipeline * layout.chunks * plan.checkpointing.one_in
    even = row.engine == "torch" and not row.one_process and row.shards_optimizer == row.shards_parameters
    even = (
        even
        and plan.adapter == Adapter()
        and plan.frozen == Frozen()
        and not model.dense_layers
        and model.family != "size"
        and not (layout.first_layers or layout.last_layers)
    )
    if not even or model.layers != model.blocks or model.layers // span < DEEP:
        return None
    try:
        low, high = (replace(plan, model=replace(model, layers=count * span)) for count in SHALLOW)
    except InputError:  # a family of which layers alone cannot be changed
        return None
    return Depth((low, high), model.layers // span - SHALLOW[1], _rounding(high))


def _rounding(plan: Plan) -> int:
    """Blocks of tensors that span layers: DDP's buckets, the first of them smaller, and the norms that are stacked to clip."""
    trained, width = _sizes(plan.model, plan.adapter, plan.frozen, plan.optimizer, plan.precision_row.weights)[1], 4
    return granularity(plan.device) * (3 + width * trained // (plan.bucket_mb * 2**20))


def _peak_at(plan: Plan, index: int, less: int, micro_batch: int) -> int:
    return _peak_of_stage(replace(plan, micro_batch=micro_batch), index) - less


@dataclass(slots=True)
class Group:
    """Plans of one structure that share a ledger, by rising micro batch. What fits is found when it is asked for."""

    structure: Plan
    rounds: int
    """Micro batches of a step that the ledger plays."""
    micro_batches: list[int]
    limit: int
    largest: int | None = None
    """Index of the largest micro batch that fits; -1 when none does, None while nobody has asked."""
    most: int | None = None
    """No micro batch beyond this index fits, as far as is known."""
    bounded: bool = False
    """``bound`` has been asked."""
    played: bool = False
    """The ledger itself was needed."""

    @property
    def plan(self) -> Plan:
        """The plan whose ledger serves all: made when it is asked for, as most are never looked at."""
        return replace(self.structure, micro_batch=self.micro_batches[0], accumulation=self.rounds)

    def bound(self) -> int:
        """No micro batch beyond this index fits, told without the ledger."""
        self.bounded = True
        depth = depth_of(self.plan)
        return self.cap(len(self.micro_batches) - 1 if depth is None else self._bisect(depth.peak))

    def cap(self, index: int) -> int:
        """It is known that no micro batch beyond this index fits; the least that is known so."""
        self.most = index if self.most is None else min(index, self.most)
        if self.most < 0:
            self.largest = -1
        return self.most

    def fit(self) -> int:
        """The largest micro batch that fits, by bisection: a larger one never needs less. Stage by stage, as one that is too
        full settles it."""
        if self.largest is None:
            self.played = True
            self.largest = self._by_stages(0)
        return self.largest

    def at_most_unfused(self) -> int:
        """The same of the plan whose optimizer is not fused, at the most: its temporaries come on top, and all that it is
        spared are the fused one's step counters on the device."""
        plan = self.plan
        counters = granularity(plan.device) * sum(weight.trainable for weight in plan.weights)
        if self.played:
            return self._by_stages(counters)
        depth = depth_of(plan)
        return len(self.micro_batches) - 1 if depth is None else self._bisect(lambda size: depth.peak(size) - counters)

    def _by_stages(self, less: int) -> int:
        plan = self.plan
        found = len(self.micro_batches) - 1 if self.most is None or less else self.most
        for index in _stages(plan):
            if found < 0:
                break
            peak = partial(_peak_at, plan, index, less)
            found = found if self._fits(peak, self.micro_batches[found]) else self._bisect(peak, found)
        return found

    def _bisect(self, peak: Callable[[int], int], too_large: int | None = None) -> int:
        low, high = -1, len(self.micro_batches) if too_large is None else too_large
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self._fits(peak, self.micro_batches[middle]) else (low, middle)
        return low

    def _fits(self, peak: Callable[[int], int], micro_batch: int) -> bool:
        try:
            return needed_bytes(self.structure, peak(micro_batch)) <= self.limit
        except PlanError:  # past 4 EiB
            return False
