"""What one rank sends in an optimizer step, collective by collective.

In a ring of N ranks an all-reduce of M bytes sends 2 (N-1)/N M from each, a gather, a reduce-scatter and a broadcast
(N-1)/N M (Rajbhandari et al. 2020, ZeRO, section 7; NCCL's rings). Tensor, context, pipeline and expert parallel are not counted.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from memcalc.models import FAMILIES, Model
from memcalc.parallel import ROOT_UNIT, shard_units
from memcalc.plan import Plan
from memcalc.precision import DTYPE_BYTES

__all__ = ["Collective", "collectives", "sent_bytes", "units"]

_PASSES = {"all-reduce": 2, "all-gather": 1, "reduce-scatter": 1, "broadcast": 1, "reduce": 1}
FLOAT = DTYPE_BYTES["float32"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Collective:
    """One kind of collective of a step."""

    what: str
    operation: str
    """A key of the ring's passes: all-reduce, all-gather, reduce-scatter, broadcast or reduce."""
    bytes: int
    """The whole tensor, over all ranks of the group, of all its calls in the step together."""
    ranks: int
    """Of its group."""
    hideable: bool = True
    """Runs while the step computes."""
    inside: bool = False
    """Its group lies within a machine although the ranks do not."""

    @property
    def sent(self) -> float:
        """Bytes that one rank sends."""
        return _PASSES[self.operation] * self.bytes * (self.ranks - 1) / self.ranks


@lru_cache(maxsize=64)
def units(model: Model, every: int) -> tuple[int, int]:
    """(parameters of the root unit, number of units): the root is gathered once for forward and backward."""
    found = shard_units(FAMILIES[model.family].weights(model), every)
    return sum(w.numel for w in found[ROOT_UNIT]), len(found)


def sent_bytes(plan: Plan) -> int:
    """All that one rank sends in a step.

    >>> from memcalc.models import Model
    >>> billion = Model(name="1e9", family="size", parameters=10**9, layers=10)
    >>> [sent_bytes(Plan(model=billion, ranks=8, strategy=name)) for name in ("ddp", "fsdp-full-shard")]
    [7000000000, 10500000000]
    """
    return round(sum(each.sent for each in collectives(plan)))


def collectives(plan: Plan) -> list[Collective]:
    """What is sent in one optimizer step; nothing on one rank."""
    if plan.ranks == 1:
        return []
    row = plan.strategy_row
    if row.one_process:
        return list(_one_process(plan))
    if row.gathers:
        return list(_fully_sharded(plan))
    if row.zero_stage is not None:
        return list(_deepspeed(plan))
    return list(_megatron(plan) if row.main_grads else _replicated(plan))


def _sizes(plan: Plan) -> tuple[int, int]:
    """Parameters that are trained, and all of them."""
    weights = plan.weights
    return sum(w.numel for w in weights if w.trainable), sum(w.numel for w in weights)


def _replicated(plan: Plan) -> Iterator[Collective]:
    """DDP once a step, in the last micro batch (no_sync); gradients have the weights' dtype."""
    trained, _ = _sizes(plan)
    size = trained * DTYPE_BYTES[plan.precision_row.weights]
    yield Collective(what="gradients", operation="all-reduce", bytes=size, ranks=plan.ranks)
    if plan.strategy_row.shards_optimizer:
        # ZeroRedundancyOptimizer, _sync_params: when nothing is left to hide behind.
        yield Collective(
            what="updated weights", operation="broadcast", bytes=size, ranks=plan.ranks, hideable=False
        )  # fmt: skip


def _one_process(plan: Plan) -> Iterator[Collective]:
    """nn.DataParallel copies the module in every forward (``replicate``) and sums gradients in every backward; its
    outputs, which the first GPU collects, come on top."""
    trained, whole = _sizes(plan)
    width, times = DTYPE_BYTES[plan.precision_row.weights], plan.accumulation
    yield Collective(
        what="weights", operation="broadcast", bytes=times * whole * width, ranks=plan.ranks, hideable=False
    )
    yield Collective(
        what="gradients", operation="reduce", bytes=times * trained * width, ranks=plan.ranks, hideable=False
    )


def _fully_sharded(plan: Plan) -> Iterator[Collective]:
    """FSDP gathers in every micro batch, and reduces in the last one unless told otherwise."""
    trained, whole = _sizes(plan)
    low, full = DTYPE_BYTES[plan.precision_row.compute], DTYPE_BYTES[plan.reduce_dtype]
    syncs = plan.accumulation if plan.fsdp.sync_every_micro_batch else 1
    size = plan.accumulation * low
    copies = plan.ranks // plan.shards
    inside = copies > 1 and plan.shards <= plan.ranks // plan.nodes
    yield Collective(
        what="weights for forward", operation="all-gather", bytes=size * whole, ranks=plan.shards, inside=inside
    )  # fmt: skip
    if plan.strategy_row.reshards:
        root, _ = units(plan.model, max(plan.checkpoint_every, 1))
        yield Collective(
            what="weights for backward", operation="all-gather", bytes=size * (whole - root), ranks=plan.shards, inside=inside
        )  # fmt: skip
    yield Collective(
        what="gradients", operation="reduce-scatter", bytes=syncs * trained * full, ranks=plan.shards, inside=inside
    )  # fmt: skip
    if copies > 1:
        part = syncs * trained * full // plan.shards
        yield Collective(what="gradients of replicas", operation="all-reduce", bytes=part, ranks=copies)


def _deepspeed(plan: Plan) -> Iterator[Collective]:
    """engine.py, ``allreduce_gradients``: stages 0 and 1 at the boundary of accumulation, 2 and 3 in every micro batch; in
    the 16-bit dtype of training (``communication_data_type``). Stages 1 and 2 gather the updated weights."""
    trained, whole = _sizes(plan)
    stage, low = plan.strategy_row.zero_stage or 0, DTYPE_BYTES[plan.precision_row.weights]
    times = plan.accumulation if stage >= 2 else 1
    if stage == 3:
        size = plan.accumulation * low * whole
        yield Collective(what="weights for forward", operation="all-gather", bytes=size, ranks=plan.shards)
        yield Collective(what="weights for backward", operation="all-gather", bytes=size, ranks=plan.shards)
    operation = "reduce-scatter" if stage and plan.deepspeed.reduce_scatter else "all-reduce"
    yield Collective(what="gradients", operation=operation, bytes=times * low * trained, ranks=plan.shards)
    if stage in (1, 2):
        yield Collective(
            what="updated weights", operation="all-gather", bytes=low * trained, ranks=plan.shards, hideable=False
        )  # fmt: skip


def _megatron(plan: Plan) -> Iterator[Collective]:
    """core/distributed/param_and_grad_buffer.py: float32 main gradients; the distributed optimizer gathers 16-bit weights."""
    trained, _ = _sizes(plan)
    if not plan.strategy_row.shards_optimizer:
        yield Collective(what="gradients", operation="all-reduce", bytes=FLOAT * trained, ranks=plan.ranks)
        return
    low = DTYPE_BYTES[plan.precision_row.weights]
    yield Collective(what="gradients", operation="reduce-scatter", bytes=FLOAT * trained, ranks=plan.ranks)
    yield Collective(
        what="updated weights", operation="all-gather", bytes=low * trained, ranks=plan.ranks, hideable=False
    )
