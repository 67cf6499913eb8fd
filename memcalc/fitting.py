"""What plans need, as far as a search asks: bytes on the device, a bound that needs no ledger, and the largest micro
batch that fits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache

from memcalc.adapters import Adapter
from memcalc.climb import climb
from memcalc.errors import PlanError
from memcalc.estimate import host_bytes
from memcalc.frozen import Frozen
from memcalc.ledger import skeleton
from memcalc.models import FAMILIES, Model
from memcalc.optimizers import OPTIMIZERS
from memcalc.outside import outside
from memcalc.peaks import outline, stages_of
from memcalc.plan import Plan
from memcalc.precision import DTYPE_BYTES
from memcalc.reserved import highest, most_reserved, replayed

__all__ = ["PROCESS_BYTES", "Group", "exactly_needed", "needed_bytes", "state_bound"]

PROCESS_BYTES = 500 * 2**20
"""RAM of a Python process before its first tensor: 300 MiB with torch, its profiler, FSDP and checkpointing
imported (measured, CPU wheel of torch 2.13 on Linux); gloo's buffers and the batches of the data loader come on top."""

REPLAYED = 256
"""Replays kept for another look."""


def needed_bytes(plan: Plan, peak: int) -> int:
    """The high end of what one rank takes by an allocated peak: of its GPU, or on a CPU of the machine's RAM."""
    if plan.device == "cpu":
        return host_bytes(plan, peak) + PROCESS_BYTES
    return most_reserved(plan, peak) + outside(plan, plan.gpu_row).high


def exactly_needed(plan: Plan, peak: int, limit: int | None = None) -> int:
    """The same with the allocator replayed, which may need more than the published share that serves the search.

    With a ``limit`` what is more than it may be more still: the replay ends there.
    """
    return needed_bytes(plan, peak) if plan.device == "cpu" else _replayed(plan, limit)


@lru_cache(maxsize=REPLAYED)
def _replayed(plan: Plan, limit: int | None) -> int:
    """The high end of ``estimate(plan).device``."""
    timeline, rest = skeleton(plan).at(plan.micro_batch), outside(plan, plan.gpu_row)
    found = replayed(plan, timeline, enough=None if limit is None else limit - rest.high)
    return highest(plan, timeline.peak().bytes, found.peak_reserved) + rest.high


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


@dataclass(slots=True)
class Group:
    """Plans of one structure that share their ledgers, by rising micro batch. What fits is found when it is asked for."""

    structure: Plan
    rounds: int
    """Micro batches of a step that the ledger plays."""
    micro_batches: list[int]
    limit: int
    largest: int | None = None
    """Index of the largest micro batch that fits; -1 when none does, None while that is not known."""
    climbed: bool = False
    """Its first forward passes were looked at."""
    looked: int = 0
    """Stages of its pipeline that were looked at, of those that may be the fullest."""

    def look(self, at_most: int) -> int:
        """Look a step further: at what the first forward passes leave, then stage by stage.

        No micro batch beyond ``at_most`` fits; of what is returned that is known then. A larger one never needs less.
        """
        plan = replace(self.structure, micro_batch=self.micro_batches[0], accumulation=self.rounds)
        if not self.climbed:
            self.climbed = True
            bound = climb(plan)
            found = at_most if bound is None else self._bisect(bound.least, at_most)
        else:
            stages = stages_of(plan)
            found = self._bisect(outline(plan, stages[self.looked]).peak, at_most)
            self.looked += 1
            if self.looked == len(stages):
                self.largest = found
        if found < 0:
            self.largest = found
        return found

    def _bisect(self, peak: Callable[[int], int], at_most: int) -> int:
        low, high = -1, at_most + 1
        while high - low > 1:
            middle = at_most if high > at_most else (low + high) // 2
            low, high = (middle, high) if self._fits(peak, self.micro_batches[middle]) else (low, middle)
        return low

    def _fits(self, peak: Callable[[int], int], micro_batch: int) -> bool:
        try:
            return needed_bytes(self.structure, peak(micro_batch)) <= self.limit
        except PlanError:  # past 4 EiB
            return False
