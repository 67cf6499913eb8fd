"""How long a training step takes.

    micro batch = max(products + attention + pointwise + kernels + what ranks that share samples send, host)
    step        = micro batches through the pipeline + exposed communication + optimizer + offload

Everything is a sum of terms that are fixed or grow with the samples of a micro batch, so that one structure's times at any
number of micro batches are a few operations on arrays. Every coefficient stands in ``memcalc/coefficient_table.py`` with its
source; what is fitted is fitted by ``memcalc calibrate --published``, never by hand.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from memcalc.coefficients import Values, published
from memcalc.plan import Plan
from memcalc.rank_hardware import Hardware, hardware_of, values_of
from memcalc.rank_time import Structure, micro_batch, structure, update
from memcalc.traffic import MICRO_BATCH, SAMPLE

__all__ = ["StepTime", "StepTimes", "crowded", "step_time", "step_times", "times_of"]


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTimes:
    """Seconds of one optimizer step in parts, for several micro batches; ``StepTime`` has one of each."""

    compute: Any
    """Matrix products and attention of forward and backward, at the speed of wide ones."""
    recompute: Any
    """What checkpointing runs again; not part of ``compute``."""
    traffic: Any
    """What products move to and from memory, weights above all: what small micro batches and narrow products lose."""
    pointwise: Any
    """Norms, residuals, activations, written-out attention and the loss: bytes over the memory's bandwidth."""
    kernels: Any
    """Fixed time of the card's operations."""
    host: Any
    """Python starting operations: the floor for small models and micro batches."""
    hooks: Any
    """Host time of the engine's hooks. Not hidden: a unit waits for its gather, and the hook starts it."""
    tensor: Any
    """What ranks that share samples send each other: tensor, context, expert and pipeline parallel. Not hidden."""
    bubble: Any
    """The slowest stage waiting for the pipeline to fill and drain."""
    communication: Any
    """Everything this rank sends for data parallel, hidden or not."""
    exposed: Any
    """The part of it that nothing hides."""
    optimizer: Any
    offload: Any
    """Copies between host and card, and the step on the host, that nothing hides."""
    total: Any
    samples: Any
    """Samples of the step over all ranks."""
    low: Any
    """One in ten published runs is faster than this, each project counting the same."""
    high: Any
    """And one in ten slower."""
    tokens: int
    """Of a sample."""
    model_flops: float
    """Of a sample, by the convention of MFU: (6 N + 12 L H S) a token; of frozen parameters 4 N."""
    ranks: int
    peak: float
    """FLOP/s of one rank's data sheet."""

    @property
    def seconds_per_sample(self) -> Any:
        return self.total / np.maximum(self.samples, 1)

    @property
    def tokens_per_second(self) -> Any:
        """Over all ranks."""
        return self.samples * self.tokens / self.total

    @property
    def mfu(self) -> Any:
        """Model FLOPs utilisation, as llm-foundry counts it: 6 N + 12 L H S FLOPs a token (4 N of what is frozen) over
        the peak of all ranks."""
        return self.samples * self.model_flops / (self.total * self.ranks * self.peak)


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTime(StepTimes):
    """The same for one micro batch: plain numbers."""

    @property
    def seconds_per_sample(self) -> float:
        return float(self.total / max(self.samples, 1))


def step_time(plan: Plan, hardware: Hardware | None = None, coefficients: Values | None = None) -> StepTime:
    """Predicted seconds of one optimizer step.

    >>> from dataclasses import replace
    >>> from memcalc.models import MODELS
    >>> plan = Plan(model=MODELS["gpt2"], tokens=1024, micro_batch=8, precision="amp-bf16", gpu="a100-80gb")
    >>> plain, again = step_time(plan), step_time(replace(plan, checkpoint_every=1))
    >>> again.compute == plain.compute, 0.1 < again.total / plain.total - 1 < 1 / 3
    (True, True)
    >>> plain.low < plain.total < plain.high, 0.2 < plain.mfu < 0.6
    (True, True)
    """
    found = step_times(plan, [plan.micro_batch], [plan.accumulation], hardware, coefficients)
    plain = {f.name: getattr(found, f.name) for f in fields(found)}
    return StepTime(**{k: x[0].item() if isinstance(x, np.ndarray) else x for k, x in plain.items()})


def step_times(
    plan: Plan,
    micro_batches: Sequence[int],
    accumulations: Sequence[int],
    hardware: Hardware | None = None,
    coefficients: Values | None = None,
) -> StepTimes:
    """The same of one structure at several micro batches, each with its accumulation; fields are arrays of their length.

    >>> from memcalc.models import MODELS
    >>> plan = Plan(model=MODELS["gpt2"], tokens=1024, micro_batch=8, ranks=8, strategy="ddp", gpu="a100-80gb")
    >>> times = step_times(plan, [8, 16], [1, 1])
    >>> bool(times.total[0] == step_time(plan).total), times.samples.tolist()
    (True, [64, 128])
    """
    v = values_of(plan) if coefficients is None else coefficients
    return times_of(plan, structure(plan), micro_batches, accumulations, hardware or hardware_of(plan, v), v)


def times_of(
    plan: Plan,
    known: Structure,
    micro_batches: Sequence[int],
    accumulations: Sequence[int],
    hardware: Hardware,
    v: Values,
) -> StepTimes:
    """``step_times`` of a structure that is at hand."""
    b, a = np.asarray(micro_batches, dtype=float), np.asarray(accumulations, dtype=float)
    parts = [micro_batch(plan, known, work, b, hardware, v) for work in known.distinct]
    slowest: Mapping[str, Any] = parts[0]
    around: Any = 0.0
    if len(parts) > 1:
        index = np.argmax(np.stack([part["micro"] for part in parts]), axis=0)
        slowest = {
            k: np.take_along_axis(np.stack([np.broadcast_to(p[k], b.shape) for p in parts]), index[None], 0)[0]
            for k in parts[0]
        }
    if known.stages > 1:
        all_of_them = sum(count * part["micro"] for count, part in zip(known.counts, parts, strict=True))
        around = (all_of_them - slowest["micro"]) / plan.layout.chunks
    busy = a * slowest["micro"] + around
    exposed, sent = _exposed(known, plan, b, a, busy, slowest, hardware, v)
    stepping, offloaded = update(plan, known, b, a, hardware, v)
    total = busy + exposed + stepping + offloaded
    per_step = {name: a * slowest[name] for name in _PER_MICRO_BATCH}
    return StepTimes(
        **per_step,
        bubble=around + 0 * b,
        communication=sent,
        exposed=exposed,
        optimizer=stepping + 0 * b,
        offload=offloaded + 0 * b,
        total=total,
        samples=(b * a * plan.data_parallel).astype(int),
        low=total * v["range-fast"],
        high=total * v["range-slow"],
        tokens=plan.tokens,
        model_flops=known.model_flops,
        ranks=plan.ranks,
        peak=hardware.flops[plan.precision_row.compute],
    )


_PER_MICRO_BATCH = ("compute", "recompute", "traffic", "pointwise", "kernels", "host", "hooks", "tensor")


def _exposed(
    known: Structure, plan: Plan, b: Any, a: Any, busy: Any, slowest: Mapping[str, Any], hardware: Hardware, v: Values
) -> tuple[Any, Any]:
    """(seconds of data-parallel traffic that nothing hides, seconds of all of it)."""
    forward = backward = last = bare = 0.0 * b
    for each, bytes_seconds, call_seconds in known.seconds(hardware, v):
        if each.per == SAMPLE:  # of ranks that share samples: part of the micro batch
            continue
        took = (a if each.per == MICRO_BATCH else 1.0) * (bytes_seconds + call_seconds)
        if not each.hideable:
            bare = bare + took
        elif each.what == "weights for forward":
            forward = forward + took
        elif each.per == MICRO_BATCH:
            backward = backward + took
        else:  # only in the backward pass of the last micro batch
            last = last + took
    bare = bare + (known.tensors * v[known.one_by_one] if known.one_by_one else 0.0)
    by_units = plan.strategy_row.shards_parameters or plan.strategy_row.backend.startswith("fsdp")
    overlap = v["overlap-fsdp" if by_units else "overlap-ddp"]
    behind = slowest["backward_share"]
    left = np.maximum(0.0, overlap * forward - busy * (1 - behind))
    before_last = np.maximum(0.0, overlap * backward * (1 - 1 / a) - (busy - slowest["micro"]) * behind)
    in_last = np.maximum(0.0, overlap * (backward / a + last) - slowest["micro"] * behind)
    hideable = forward + backward + last
    return (1 - overlap) * hideable + left + before_last + in_last + bare, hideable + bare


def crowded(share: Any, coefficients: Values | None = None) -> Any:
    """What a step's time is multiplied with when a share of the card's memory is reserved: 1 while some is free.

    >>> crowded(0.5), round(crowded(1.0), 2)
    (1.0, 1.3)
    """
    v = published() if coefficients is None else coefficients
    start = v["crowded-from"]
    found = 1.0 + v["crowded-slowdown"] * np.clip((np.asarray(share, dtype=float) - start) / (1 - start), 0.0, 1.0)
    return found if found.ndim else found.item()
