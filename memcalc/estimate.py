"""Plan → Estimate: the peak in each of four meters, the verdict, and what was assumed.

allocated   torch.cuda.max_memory_allocated: what the program asked for, to the block
reserved    torch.cuda.max_memory_reserved: what the caching allocator took from the driver
device      what nvidia-smi shows: reserved, the CUDA context and NCCL's buffers
host        buffers of one rank in RAM: the batch, counters, what is offloaded; not the interpreter and CUDA's libraries
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy as np

from memcalc.assumptions import (
    REHEARSED,
    Rehearsed,
    activations_known,
    assumptions,
    doubts,
    uncounted,
    undivided,
)
from memcalc.hardware import GPUS, Gpu
from memcalc.host import host_tensors
from memcalc.kernels import refusal
from memcalc.ledger import fullest, skeleton
from memcalc.outside import device_range, outside
from memcalc.parallel.replicated import workspaces
from memcalc.plan import Plan
from memcalc.precision import DTYPE_BYTES
from memcalc.replay import Reserved
from memcalc.reserved import Range, replayed, reserved_range
from memcalc.timeline import CATEGORIES, MOMENTS, Peak, Skeleton, Timeline

__all__ = [
    "REHEARSED",
    "Estimate",
    "Rehearsed",
    "estimate",
    "holding_gpus",
    "host_bytes",
    "usable_bytes",
    "verdict",
    "with_workspaces",
]


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """What a plan needs on its fullest rank; all sizes in bytes."""

    plan: Plan
    stage: int = 0
    """The pipeline stage that is estimated, from 0."""
    timeline: Timeline
    peak: Peak
    """The ``allocated`` meter over the whole run: what decides whether it survives."""
    steady: Peak
    """The same without the moments before the first step: what a run shows whose counters were reset after it."""
    reserved: Range
    device: Range
    host: int
    parameters: int
    """Trainable parameters of the whole model, shared ones counted once."""
    verdict: str
    """``fits``, ``tight``, ``does-not-fit``, or ``unknown`` when something that matters was not given."""
    whole: bool = True
    """Nothing of the model is known to be missing, so that a card can be said to hold it."""
    doubts: tuple[str, ...]
    """What could make it wrong, in sentences, the worst first."""
    taken: tuple[str, ...]
    """What else it takes for granted, and how its numbers are meant."""
    held: Reserved | None = None
    """What the caching allocator would hold on a card without an end; None on a CPU."""

    @property
    def assumptions(self) -> tuple[str, ...]:
        """All sentences, what could make it wrong first."""
        return (*self.doubts, *self.taken)

    def to_dict(self) -> dict[str, Any]:
        """The estimate as plain JSON values."""
        return {
            "plan": dataclasses.asdict(self.plan),
            "allocated": {
                "peak_bytes": self.peak.bytes,
                "moment": self.peak.moment,
                "by_category": self.peak.by_category,
                "by_moment": self.peak.by_moment,
            },
            "reserved": _bounds(self.reserved),
            "device": _bounds(self.device),
            "host": {"peak_bytes": self.host},
            "parameters": self.parameters,
            "verdict": self.verdict,
            "assumptions": list(self.assumptions),
        }


def estimate(
    plan: Plan,
    stage: int | None = None,
    rehearsal: Rehearsed | None = None,
    played: dict[int, Skeleton] | None = None,
) -> Estimate:
    """Estimate one plan: its fullest rank, in a pipeline on the ``stage`` asked for or on the fullest.

    A ``rehearsal`` takes the place of the ledger; ``played`` is what the ledger gave at another micro batch (``fullest``).

    >>> from memcalc.models import Model
    >>> billion = Model(name="1e9 parameters", family="size", parameters=10**9)
    >>> estimate(Plan(model=billion, optimizer="adam")).peak.bytes
    20000000000
    """
    if rehearsal is None or rehearsal.timeline is None:
        stage, bones = fullest(plan, played) if stage is None else (stage, skeleton(plan, stage))
        timeline = bones.at(plan.micro_batch)
    else:
        stage, timeline = 0, with_workspaces(plan, rehearsal.timeline)
    peak, gpu = timeline.peak(), plan.gpu_row
    capacity = gpu.usable_bytes - outside(plan, gpu).point if gpu else None
    held = None if plan.device == "cpu" else replayed(plan, timeline)
    reserved = reserved_range(plan, timeline, capacity=capacity, free=held)
    device, host = device_range(plan, reserved, gpu), host_bytes(plan, peak.bytes)
    in_blocks = held.peak_allocated - peak.bytes if held else 0
    return Estimate(
        plan=plan,
        stage=stage,
        timeline=timeline,
        peak=peak,
        steady=timeline.steady(),
        reserved=reserved,
        device=device,
        host=host,
        parameters=sum(weight.numel for weight in plan.weights if weight.trainable),
        verdict=verdict(plan, device, gpu, sure=rehearsal is not None and rehearsal.sure),
        whole=not uncounted(plan) and (not plan.model.module.factory or (rehearsal is not None and rehearsal.sure)),
        doubts=tuple(doubts(plan, rehearsal)),
        taken=tuple(assumptions(plan, reserved, stage=stage, in_blocks=in_blocks, host=host, rehearsal=rehearsal)),
        held=held,
    )


def with_workspaces(plan: Plan, timeline: Timeline) -> Timeline:
    """A rehearsal's timeline with what cuBLAS holds beside all tensors."""
    held = workspaces(plan)
    first, count = len(timeline.names), len(held)
    return Timeline(
        names=(*timeline.names, *(name for name, _ in held)),
        ident=np.concatenate([np.arange(first, first + count), timeline.ident]).astype(np.int64),
        category=np.concatenate([np.full(count, CATEGORIES.index("workspaces")), timeline.category]).astype(np.int8),
        moment=np.concatenate([np.full(count, MOMENTS.index("start")), timeline.moment]).astype(np.int8),
        delta=np.concatenate([np.array([size for _, size in held], dtype=np.int64), timeline.delta]),
    )


def _bounds(found: Range) -> dict[str, int]:
    return {"low_bytes": found.low, "high_bytes": found.high}


def host_bytes(plan: Plan, allocated: int) -> int:
    """RAM the training data structures of one rank take.

    On the CPU that is the whole training state. With a GPU it is the batch being prepared, the
    optimizer's step counters, which torch keeps on the CPU unless the step is fused, and what is offloaded: buffers of
    the step, where the process itself, with CUDA's libraries, has more.
    """
    if plan.device == "cpu":
        return allocated
    tokens = plan.tokens * DTYPE_BYTES["int64"]
    features = plan.model.features * DTYPE_BYTES[plan.precision_row.weights]
    counters = 0
    row, paged = plan.optimizer_row, 0
    if not plan.family.opaque:
        trained = [weight for weight in plan.weights if weight.trainable]
        counters = DTYPE_BYTES["float32"] * len(trained) * row.counters * (plan.optimizer_kind != "fused")
        paged = sum(row.host_bytes(weight, plan.precision_row.weights) for weight in trained)
    offloaded = sum(tensor.held for tensor in host_tensors(plan))
    return plan.micro_batch * (2 * tokens if tokens else features) + counters + paged + offloaded


def verdict(plan: Plan, device: Range, gpu: Gpu | None, *, sure: bool = False) -> str:
    """Does it fit? ``tight`` is between the bounds; what was not counted can only be refuted, unless a rehearsal is ``sure``,
    and what is an upper bound not even that."""
    if gpu is None:
        return "unknown"
    usable = usable_bytes(plan, gpu)
    if device.low > usable:
        return "unknown" if undivided(plan) else "does-not-fit"
    if not (activations_known(plan) or sure) or uncounted(plan):
        return "unknown"
    return "fits" if device.high <= usable else "tight"


def usable_bytes(plan: Plan, gpu: Gpu) -> int:
    """What the run may take of a card: with ``per_process_memory_fraction`` torch takes no more than its part."""
    fraction = plan.allocator_options.per_process_memory_fraction
    if fraction is None:
        return gpu.usable_bytes
    return min(int(fraction * gpu.usable_bytes) + outside(plan, gpu).low, gpu.usable_bytes)


def holding_gpus(plan: Plan, reserved: Range) -> list[tuple[Gpu, bool]]:
    """Cards that hold it, smallest first: ``True`` for sure, ``False`` only perhaps; without those on which attention would be
    computed by another kernel, which keeps more."""
    found = []
    for gpu in sorted(GPUS.values(), key=lambda gpu: gpu.usable_bytes):
        if plan.model.heads and refusal(plan.kernel, dataclasses.replace(plan.attends, gpu=gpu)):
            continue
        device = device_range(plan, reserved, gpu)
        if device.low <= gpu.usable_bytes:
            found.append((gpu, device.high <= gpu.usable_bytes))
    return found
