"""A bound on the peak that takes a part of what the peak takes: forward passes alone, which plans share."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from memcalc.adapters import Adapter
from memcalc.alike import Outline
from memcalc.errors import InputError
from memcalc.frozen import Frozen
from memcalc.layout import Layout
from memcalc.loss import Loss
from memcalc.models import FAMILIES, Model
from memcalc.optimizers import OPTIMIZERS
from memcalc.passes import first_passes, in_parts
from memcalc.peaks import shared
from memcalc.plan import Plan
from memcalc.precision import DTYPE_BYTES
from memcalc.schedules import ahead
from memcalc.stages import placed, stage_weights
from memcalc.tensor_parallel import split_model

__all__ = ["Climb", "climb"]


@dataclass(frozen=True, slots=True)
class Climb:
    """What the first stage holds when its first backward pass is about to begin: no more than its peak."""

    held: int
    """Bytes that are there between steps, at the least."""
    passes: tuple[Outline, ...]
    """The first forward pass, and where there are several another one, like all that come after it."""
    flights: int
    """Forward passes before the first backward pass."""

    def least(self, micro_batch: int) -> int:
        """Bytes that the peak is at the least. Raises PlanError past 4 EiB."""
        most, level = self.passes[0].rise(micro_batch)
        for other in self.passes[1:]:
            rise, left = other.rise(micro_batch)
            most = max(most, level + (self.flights - 2) * left + rise)
        return self.held + most


def climb(plan: Plan) -> Climb | None:
    """The bound of a plan, which takes a part of what its peak takes; None where there is none."""
    layout = plan.layout
    if not in_parts(plan) or layout.schedule == "interleaved":
        return None
    flights = 1
    if layout.pipeline > 1:
        flights = min(ahead(layout.schedule, 0, layout.pipeline, plan.accumulation) + 1, plan.accumulation)
    alike = shared(plan)
    tokens = plan.family.reads == "tokens"  # blocks of others may each take something else
    if tokens and layout.pipeline > 2 and not (layout.ends or layout.first_layers or layout.last_layers):
        shorter = _with_two_stages(alike)
        alike = shorter or alike
    return Climb(_held(plan), first_passes(alike, min(flights, 2)), flights)


def _with_two_stages(plan: Plan) -> Plan | None:
    """A pipeline of two stages of which the first has as many layers as here, and the same shards."""
    layout, layers = plan.layout, placed(plan.model.blocks, plan.layout, 0).blocks
    each = plan.ranks // layout.pipeline
    try:
        return replace(
            plan, model=replace(plan.model, layers=2 * layers), layout=replace(layout, pipeline=2), ranks=2 * each,
            nodes=1, fsdp=replace(plan.fsdp, replicas=plan.fsdp.groups(plan)) if plan.strategy_row.replicates else plan.fsdp,
            accumulation=2, loss=Loss(vocab_multiple=plan.loss.vocab_multiple),
        )  # fmt: skip
    except InputError:
        return None


def _held(plan: Plan) -> int:
    """Parameters and optimizer states of the first stage, of which a rank has an equal share at the least."""
    if plan.offload.on or plan.adapter != Adapter() or plan.compute.offload_activations or plan.family.opaque:
        return 0
    row, dtype = plan.strategy_row, plan.precision_row.weights
    weights, states = _stage_sizes(plan.model, plan.frozen, plan.optimizer, dtype, plan.layout)
    return DTYPE_BYTES[dtype] * weights // (plan.shards if row.shards_parameters else 1) + states // (
        plan.shards if row.shards_optimizer else 1
    )


@lru_cache(maxsize=64)
def _stage_sizes(model: Model, frozen: Frozen, optimizer: str, dtype: str, layout: Layout) -> tuple[int, int]:
    """Parameters of the first stage of a pipeline on one rank, and bytes of the optimizer's states of the trained ones."""
    weights = frozen.weights(FAMILIES[model.family].weights(split_model(model, layout)))
    weights = stage_weights(weights, placed(model.blocks, layout, 0), model.tied)
    trained = [each for each in weights if each.trainable]
    return sum(each.numel for each in weights), sum(
        sum(OPTIMIZERS[optimizer].state_bytes(each, dtype)) for each in trained
    )
