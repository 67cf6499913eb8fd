"""Plan → Estimate: the peak in each of four meters, the verdict, and what was assumed.

allocated   torch.cuda.max_memory_allocated: what the program asked for, to the block
reserved    torch.cuda.max_memory_reserved: what the caching allocator took from the driver
device      what nvidia-smi shows: reserved, the CUDA context and NCCL's buffers
host        RAM of one rank's process, beside the interpreter and its libraries
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy as np

from memcalc.compute import Compute
from memcalc.hardware import GPUS, Gpu
from memcalc.host import host_tensors
from memcalc.ledger import fullest, peaks, skeleton
from memcalc.outside import communicators, device_range, outside
from memcalc.parallel.replicated import workspaces
from memcalc.plan import Plan
from memcalc.precision import DTYPE_BYTES
from memcalc.replay import Reserved
from memcalc.reserved import Range, replayed, reserved_range
from memcalc.timeline import CATEGORIES, MOMENTS, Peak, Timeline
from memcalc.units import format_both

__all__ = [
    "GUESSED",
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


GUESSED = (
    "its code asks for the values of tensors ({} times), which a rehearsal has not: each was taken for 1, and what other "
    "values would take is not counted"
)
REHEARSED = "rehearsed: two steps of its own code, strategy and optimizer on tensors without values"


@dataclass(frozen=True, kw_only=True, slots=True)
class Rehearsed:
    """What a rehearsal of the plan's own code gave."""

    timeline: Timeline | None
    """None where it could not be rehearsed; the remarks say why."""
    remarks: tuple[str, ...] = ()
    sure: bool = False
    """The code went the way it goes with any values."""


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
    assumptions: tuple[str, ...]
    held: Reserved | None = None
    """What the caching allocator would hold on a card without an end; None on a CPU."""

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


def estimate(plan: Plan, stage: int | None = None, rehearsal: Rehearsed | None = None) -> Estimate:
    """Estimate one plan: its fullest rank, in a pipeline on the ``stage`` asked for or on the fullest.

    A ``rehearsal`` takes the place of the ledger.

    >>> from memcalc.models import Model
    >>> billion = Model(name="1e9 parameters", family="size", parameters=10**9)
    >>> estimate(Plan(model=billion, optimizer="adam")).peak.bytes
    20000000000
    """
    if rehearsal is None or rehearsal.timeline is None:
        stage, bones = fullest(plan) if stage is None else (stage, skeleton(plan, stage))
        timeline = bones.at(plan.micro_batch)
    else:
        stage, timeline = 0, with_workspaces(plan, rehearsal.timeline)
    peak, gpu = timeline.peak(), plan.gpu_row
    capacity = gpu.usable_bytes - outside(plan, gpu).point if gpu else None
    held = None if plan.device == "cpu" else replayed(plan, timeline)
    reserved = reserved_range(plan, timeline, capacity=capacity, free=held)
    device, host = device_range(plan, reserved, gpu), host_bytes(plan, peak.bytes)
    uncounted = held.peak_allocated - peak.bytes if held else 0
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
        assumptions=tuple(
            assumptions(plan, reserved, stage=stage, uncounted=uncounted, host=host, rehearsal=rehearsal)
        ),
        held=held,
    )


def with_workspaces(plan: Plan, timeline: Timeline) -> Timeline:
    """A rehearsal's timeline with what cuBLAS holds beside all tensors."""
    held = workspaces(plan)
    first, count = len(timeline.names), len(held)
    return Timeline(
        names=(*timeline.names, *(name for name, _ in held)),
        ident=np.concatenate([np.arange(first, first + count), timeline.ident]).astype(np.int64),
        category=np.concatenate([np.full(count, CATEGORIES.index("temporary")), timeline.category]).astype(np.int8),
        moment=np.concatenate([np.full(count, MOMENTS.index("start")), timeline.moment]).astype(np.int8),
        delta=np.concatenate([np.array([size for _, size in held], dtype=np.int64), timeline.delta]),
    )


def _bounds(found: Range) -> dict[str, int]:
    return {"low_bytes": found.low, "high_bytes": found.high}


def host_bytes(plan: Plan, allocated: int) -> int:
    """RAM the training data structures of one rank take.

    On the CPU that is the whole training state. With a GPU it is the batch being prepared, the
    optimizer's step counters, which torch keeps on the CPU unless the step is fused, and what is offloaded.
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
    """Does it fit? ``tight`` is between the bounds; what was not counted can only be refuted, unless a rehearsal is ``sure``."""
    if gpu is None:
        return "unknown"
    usable = usable_bytes(plan, gpu)
    if device.low > usable:
        return "does-not-fit"
    if not (_activations_known(plan) or sure):
        return "unknown"
    return "fits" if device.high <= usable else "tight"


def usable_bytes(plan: Plan, gpu: Gpu) -> int:
    """What the run may take of a card: with ``per_process_memory_fraction`` torch takes no more than its part."""
    fraction = plan.allocator_options.per_process_memory_fraction
    if fraction is None:
        return gpu.usable_bytes
    return min(int(fraction * gpu.usable_bytes) + outside(plan, gpu).low, gpu.usable_bytes)


def holding_gpus(plan: Plan, reserved: Range) -> list[tuple[Gpu, bool]]:
    """Cards that hold it, smallest first: ``True`` for sure, ``False`` only perhaps."""
    found = []
    for gpu in sorted(GPUS.values(), key=lambda gpu: gpu.usable_bytes):
        device = device_range(plan, reserved, gpu)
        if device.low <= gpu.usable_bytes:
            found.append((gpu, device.high <= gpu.usable_bytes))
    return found


def _activations_known(plan: Plan) -> bool:
    model = plan.model
    return (
        not plan.family.unplayed
        or not model.module.factory
        and bool(model.layer_bytes or (model.features and model.layers))
    )


def compiled(plan: Plan) -> str:
    """What torch.compile may do to the estimate, in a sentence: the ends of its range (memcalc/compute.py)."""
    least = dataclasses.replace(plan, compute=Compute(float8=plan.compute.float8), checkpoint_every=1)
    most = dataclasses.replace(plan, compute=Compute(float8=plan.compute.float8))
    low, high = (peaks(each, [plan.micro_batch])[0] for each in (least, most))
    return (
        f"torch.compile is counted as eager with fused norms, which keeps most; allocated is at least "
        f"{format_both(min(low, high))}, as if every block were computed again"
    )


def assumptions(
    plan: Plan, reserved: Range, *, stage: int, uncounted: int, host: int, rehearsal: Rehearsed | None = None
) -> list[str]:
    """What the estimate takes for granted, in sentences; ``uncounted`` is what blocks hold beside their tensors, ``host``
    what one rank holds there."""
    said = ["the peak of all moments up to the second step, which repeats itself, on the fullest rank"]
    if plan.layout.pipeline > 1:
        said.append(
            f"the fullest stage of the pipeline is number {stage}, counted from 0 to {plan.layout.pipeline - 1}"
        )
        if plan.accumulation < plan.layout.pipeline:
            said.append(
                f"only {plan.accumulation} micro batch{'es' * (plan.accumulation > 1)} a step for {plan.layout.pipeline} "
                "stages, so that most stages wait; with more (--accumulation) more of them are in flight at once"
            )
    if plan.layout.tensor > 1:
        whose = "Megatron's" if plan.family.divides == "megatron" else "torch's (torch.distributed.tensor.parallel)"
        said.append(f"tensor parallel is {whose}, as the model's family is written")
    if plan.family.assumption:
        said.append(plan.family.assumption)
    said.extend(plan.model.notes)
    forms = [f"{field} {form}" for field, form in dataclasses.asdict(plan.implementation).items() if form != "auto"]
    if forms:
        said.append(f"the model's code is written with {', '.join(forms)}")
    if rehearsal is not None:
        said += rehearsal.remarks
    elif not _activations_known(plan):
        why = (
            "a module's code is run for them only when it is named"
            if plan.model.module.factory
            else "no shape was given"
        )
        said.append(f"activations are not counted because {why}")
    if plan.gathers_unknown_layers:
        said.append("gathered layers are not counted because their number was not given; give --layers")
    if plan.family.opaque and plan.optimizer_kind == "for-loop":
        said.append("the largest tensor is not known, so the temporaries of the for-loop step are not counted")
    if plan.model.layer_bytes:
        each = plan.model.layer_bytes * plan.micro_batch * plan.model.layers
        said.append(
            f"activation bytes per layer are taken for the whole micro batch of {plan.micro_batch}; "
            f"were they per sample, activations would be {each:,} B"
        )
    if plan.strategy_row.gathers:
        itemsize = DTYPE_BYTES[plan.precision_row.weights]
        whole = itemsize * sum(weight.numel for weight in plan.family.weights(plan.model))
        said.append(
            f"saving is not counted; a whole state dict takes {format_both(whole)} of RAM on every rank that gathers it"
        )
    if plan.device == "cpu":
        said.append("one thread per rank; scratch memory inside oneDNN's kernels is not counted")
        return said
    said.append(f"torch {plan.torch}; sizes are rounded up to blocks of 512 B, as the caching allocator does")
    if uncounted:
        said.append(
            f"blocks of more than 1 MiB are not split to the last byte: max_memory_allocated, which counts blocks, may "
            f"be {format_both(uncounted)} higher"
        )
    if not plan.family.opaque:
        said.extend([f"attention by the {plan.kernel} kernel"] if plan.tokens else [])
    if plan.offload.on:
        each = -(-plan.ranks // plan.nodes)
        said.append(f"host is of one rank; the {each} of a machine need {format_both(each * host)} together")
    if plan.compute.offload_activations:
        said.append("activations in pinned host memory are not counted in host")
    if plan.compute.compile and not plan.family.opaque:
        said.append(compiled(plan))
    if plan.gpu is None and not plan.family.opaque:
        said.append("cuBLAS workspaces (16 MiB to 64 MiB by card) are counted only with --gpu")
    said.append(
        f"reserved is most likely {format_both(reserved.point)}: the caching allocator replayed from the model's "
        "construction on; the high end is that on an endless card, or what published runs reserved of so much, if it is more"
    )
    if groups := communicators(plan):
        named = ", ".join(f"{name} of {size}" for name, size in groups.items())
        said.append(f"NCCL has a communicator for each group of ranks: {named}")
    if plan.gpu is None:
        said.append("device adds the widest range of CUDA contexts in the catalog; give --gpu for one card's")
    return said
