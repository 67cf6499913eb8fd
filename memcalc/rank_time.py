"""The time of one micro batch and of the update on one rank, from what ``memcalc.work`` and ``memcalc.traffic`` count."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any

import numpy as np

from memcalc.coefficients import Values
from memcalc.links import seconds
from memcalc.models import FAMILIES, Model
from memcalc.optimizers import OPTIMIZERS
from memcalc.plan import Plan
from memcalc.precision import DTYPE_BYTES
from memcalc.rank_hardware import Hardware
from memcalc.tensor_parallel import split_model
from memcalc.traffic import SAMPLE, Collective, terms, units
from memcalc.work import OPERATIONS, StageWork, Sums, model_flops, stages_of

__all__ = ["Structure", "micro_batch", "structure", "update"]

FLOAT = DTYPE_BYTES["float32"]


@dataclass(frozen=True, kw_only=True)
class Structure:
    """All that does not depend on the micro batch, the accumulation, or a coefficient."""

    distinct: tuple[StageWork, ...]
    """Stages of the pipeline, of equal ones the first."""
    counts: tuple[int, ...]
    """How many stages are like it."""
    collectives: tuple[Collective, ...]
    neighbours: int
    """Ranks in a machine."""
    attention: tuple[float, float, float]
    """Of one sample on one rank, over all blocks: FLOPs in forward, FLOPs in backward, elements of written-out scores."""
    operations: float
    """Started by one block in forward."""
    units: int
    """Of FSDP, on one stage."""
    state_bytes: float
    """Optimizer states of one trained parameter."""
    trainable: int
    """Parameters of the fullest stage that are trained, before strategies divide them."""
    tensors: int
    one_by_one: str
    """The coefficient of what handles weights one by one once a step; blank where nothing does."""
    model_flops: float

    @property
    def stages(self) -> int:
        return sum(self.counts)

    def seconds(self, hardware: Hardware, v: Values) -> list[tuple[Collective, float, float]]:
        """Each collective with its seconds for bytes and for calls."""
        return [(each, *seconds(each, hardware, self.neighbours, v)) for each in self.collectives]


class _Key:
    """A plan without what a structure does not depend on."""

    __slots__ = ("_key", "plan")

    def __init__(self, plan: Plan) -> None:
        self.plan, self._key = plan, tuple(getattr(plan, name) for name in _STRUCTURAL)

    def __hash__(self) -> int:
        return hash(self._key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Key) and self._key == other._key


_STRUCTURAL = tuple(f.name for f in fields(Plan) if f.name not in ("micro_batch", "accumulation"))


def structure(plan: Plan) -> Structure:
    return _structure(_Key(plan))


@lru_cache(maxsize=4096)
def _structure(key: _Key) -> Structure:
    plan = key.plan
    stages = stages_of(plan)
    counts: dict[StageWork, int] = {}
    for each in stages:
        counts[each] = counts.get(each, 0) + 1
    part = split_model(plan.model, plan.layout)
    fullest = max(stages, key=lambda each: each.parameters)
    units_ = units(part, max(plan.checkpoint_every, 1))[1] if plan.strategy_row.backend.startswith("fsdp") else 0
    return Structure(
        distinct=tuple(counts),
        counts=tuple(counts.values()),
        collectives=tuple(terms(plan, stages)),
        neighbours=max(plan.ranks // plan.nodes, 1),
        attention=_attention(plan, part),
        operations=OPERATIONS.get(plan.model.family, 14) + 6 * part.experts * (not plan.model.stacked),
        units=-(-units_ // plan.layout.pipeline),
        state_bytes=_state_bytes(plan.model, plan.optimizer, _updated_dtype(plan)),
        trainable=max(each.trainable for each in stages),
        tensors=fullest.tensors,
        one_by_one="broadcast-seconds" if plan.ranks > 1 and plan.strategy == "zero-1" else "",
        model_flops=model_flops(plan),
    )


def _updated_dtype(plan: Plan) -> str:
    return "float32" if plan.precision_row.master else plan.precision_row.weights


@lru_cache(maxsize=64)
def _state_bytes(model: Model, optimizer: str, dtype: str) -> float:
    weights = FAMILIES[model.family].weights(model)
    states = sum(sum(OPTIMIZERS[optimizer].state_bytes(w, dtype)) for w in weights)
    return states / max(sum(w.numel for w in weights), 1)


def _attention(plan: Plan, part: Model) -> tuple[float, float, float]:
    """Four FLOPs for each pair of query and key and element of the heads' width in forward, half where the kernel skips what
    a causal mask hides. Fused kernels compute scores again in backward: 2.5 times as much (Dao 2023, FlashAttention-2,
    section 3.1), others twice."""
    masked, full = (pairs / plan.layout.context for pairs in plan.family.pairs(plan.model, plan.tokens))
    fused = plan.kernel in ("flash", "efficient")
    forward = 4 * part.heads * part.head_width * (masked * (0.5 if fused else 1.0) + full)
    return forward, (2.5 if fused else 2.0) * forward, 0.0 if fused else float(part.heads * (masked + full))


def micro_batch(
    plan: Plan, known: Structure, work: StageWork, b: Any, hardware: Hardware, v: Values
) -> Mapping[str, Any]:
    """Seconds of one micro batch of ``b`` samples on one stage, in parts; ``micro`` is what it takes in all."""
    row, size = plan.precision_row, DTYPE_BYTES[plan.precision_row.compute]
    wide = hardware.float32_efficiency if row.compute == "float32" else hardware.efficiency
    speed, memory = hardware.flops[row.compute] * wide, hardware.memory_bandwidth
    compiled = v["compiled-passes"] if plan.compute.compile else 1.0
    whole, trained = work.blocks + work.ends, work.trained
    quick = 2.0 if plan.compute.float8 != "none" else 1.0  # 8-bit products run at twice the rate (data sheets)
    eight = work.blocks.products * (1 - 1 / quick)  # multiplications that are saved by it
    forward, backward, scores = (each * work.share for each in known.attention)
    slow = v["attention-efficiency-later" if hardware.later else "attention-efficiency"]

    def moved(sums: Sums, samples: Any) -> Any:
        return v["narrow-products"] * size * (samples * (sums.inputs + sums.outputs) + sums.weights) / memory

    def passed(stream: float) -> Any:
        return compiled * v["pointwise-passes"] * size * b * stream / memory

    first = b * (2 * (whole.products - eight) + forward / slow) / speed
    compute = first + b * (2 * (whole.products + trained.products - 2 * eight) + backward / slow) / speed
    traffic = 2 * moved(whole, b) + moved(trained, b) + _cast_and_added(plan, work, known) / memory
    eager = v["score-passes"] * size * scores / memory
    pointwise = 3 * passed(work.stream) + b * (eager + compiled * v["logit-bytes"] * work.logits / memory)
    operations = known.operations * work.layers * compiled
    again = recomputed(plan, work, b, speed, slow, forward, eager, moved, passed)
    # Backward's part of the micro batch goes by FLOPs alone, so that no speed changes it.
    repeated = recomputed(plan, work, b, speed, slow, forward, 0.0, lambda *_: 0.0, lambda *_: 0.0)
    passes = 3 + (1 if plan.checkpoint_every else 0)
    kernels = passes * operations * v["kernel-seconds"] * (0.0 if plan.device == "cpu" else 1.0)
    hooks = _hooks(plan, known, work, v)
    host = passes * operations * v["cpu-launch-seconds" if plan.device == "cpu" else "launch-seconds"]
    sent = 0.0
    for each, of_bytes, of_calls in known.seconds(hardware, v):
        if each.per == SAMPLE:
            sent = sent + b * of_bytes + of_calls
    card = compute + again + traffic + pointwise + kernels + sent
    micro = (card + host if plan.device == "cpu" else np.maximum(card, host)) + hooks
    return {
        "compute": compute,
        "recompute": again + 0 * b,
        "traffic": traffic,
        "pointwise": pointwise,
        "kernels": kernels + 0 * b,
        "host": host + 0 * b,
        "hooks": hooks + 0 * b,
        "tensor": sent + 0 * b,
        "micro": micro,
        "backward_share": (compute - first + repeated) / np.maximum(compute + repeated, 1e-30),
    }


def recomputed(
    plan: Plan,
    work: StageWork,
    b: Any,
    speed: float,
    slow: float,
    forward: float,
    eager: float,
    moved: Any,
    passed: Any,
) -> Any:
    """Seconds of what checkpoints run again of one micro batch."""
    if not plan.checkpoint_every:
        return 0.0 * b
    covered = 1 / plan.checkpointing.one_in
    attention = b * (forward / slow / speed + eager / 3)
    policy = plan.checkpointing.policy
    if policy == "core-attention":
        return covered * attention
    if policy == "matrix-products":  # every second product and attention are kept
        return covered * ((b * work.blocks.products / speed) + moved(work.blocks, b) / 2 + passed(work.stream))
    products = 2 * work.blocks.products
    if not plan.reentrant and not plan.dropout:
        # Recomputation stops at the last saved tensor, before the product that ends a checkpoint
        # (torch/utils/checkpoint.py, early_stop); only one block in checkpoint_every ends one.
        products -= 2 * work.last / plan.checkpoint_every
    return covered * (b * products / speed + attention + moved(work.blocks, b) + passed(work.stream))


def _cast_and_added(plan: Plan, work: StageWork, known: Structure) -> float:
    """Bytes a micro batch moves for its weights beside their products: autocast's copies, and gradients that are added up."""
    row, strategy = plan.precision_row, plan.strategy_row
    held = work.parameters
    cast = 0.0
    if row.autocast:  # FSDP's policy casts shards
        cast = (FLOAT + DTYPE_BYTES[row.compute]) * 2 * held / (plan.shards if strategy.gathers else 1)
    width = FLOAT if strategy.main_grads else DTYPE_BYTES[row.weights]
    return cast + 2 * width * work.trainable


def _hooks(plan: Plan, known: Structure, work: StageWork, v: Values) -> float:
    """Seconds an engine's hooks add to one micro batch: what waits for a gather or a bucket waits for the hook too."""
    if plan.ranks == 1:
        return 0.0
    row = plan.strategy_row
    if row.zero_stage is not None:  # stages 0 and 1 reduce once a step, bucket by bucket
        return work.tensors * {2: v["hook-seconds"], 3: v["fetch-seconds"]}.get(row.zero_stage, 0.0)
    if not row.backend.startswith("fsdp"):
        return 0.0
    plain = plan.strategy.replace("fsdp-hybrid-shard-grad", "fsdp-shard-grad").replace("hybrid", "full")
    return known.units * v[f"unit-seconds-{plain}"]


def update(plan: Plan, known: Structure, b: Any, a: Any, hardware: Hardware, v: Values) -> tuple[Any, Any]:
    """(seconds of the optimizer step, seconds of offload that nothing hides)."""
    row, strategy = plan.precision_row, plan.strategy_row
    low = DTYPE_BYTES[row.weights]
    share = plan.shards if strategy.shards_optimizer else 1
    mine = known.trainable / share
    width = DTYPE_BYTES[_updated_dtype(plan)]
    touched = mine * (3 * width + 2 * known.state_bytes + (low if row.master else 0))
    fused = plan.optimizer_kind == "fused" or strategy.engine != "torch"
    passes = 1.0 if fused else v["unfused-passes"]
    if plan.offload.optimizer == "none":
        host = known.tensors * v["cpu-launch-seconds"]  # nothing but the operation itself
        stepping = max(touched * passes / hardware.memory_bandwidth, host)
    else:
        everyone = mine * known.neighbours  # ranks of a machine share its cores and its memory
        stepping = everyone * passes / v["cpu-adam-rate"] + 2 * low * mine / hardware.host_link
        if plan.offload.optimizer == "nvme":
            stepping += 2 * everyone * (width + known.state_bytes) / v["nvme-rate"]
    offloaded = 0.0 * b
    if plan.offload.parameters != "none":  # fetched in forward and in backward, gradients sent back
        rate = hardware.host_link
        if plan.offload.parameters == "nvme":
            rate = min(rate, v["nvme-rate"] / known.neighbours)
        offloaded = offloaded + a * 3 * low * known.trainable / plan.shards / rate
    return stepping, offloaded
