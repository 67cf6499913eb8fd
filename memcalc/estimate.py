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

from memcalc.hardware import GPUS, Gpu
from memcalc.ledger import ledger
from memcalc.plan import Plan
from memcalc.precision import DTYPE_BYTES
from memcalc.timeline import Peak, Timeline

__all__ = ["Estimate", "Range", "device_range", "estimate", "holding_gpus", "reserved_range", "verdict"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Range:
    """Bytes that are known only between two bounds."""

    low: int
    high: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """What one training step of a plan needs on its fullest rank; all sizes in bytes."""

    plan: Plan
    timeline: Timeline
    peak: Peak
    """The ``allocated`` meter."""
    reserved: Range
    device: Range
    host: int
    parameters: int
    """Trainable parameters of the whole model, shared ones counted once."""
    verdict: str
    """``fits``, ``tight``, ``does-not-fit``, or ``unknown`` when something that matters was not given."""
    assumptions: tuple[str, ...]

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
            "reserved": {"low_bytes": self.reserved.low, "high_bytes": self.reserved.high},
            "device": {"low_bytes": self.device.low, "high_bytes": self.device.high},
            "host": {"peak_bytes": self.host},
            "parameters": self.parameters,
            "verdict": self.verdict,
            "assumptions": list(self.assumptions),
        }


def estimate(plan: Plan) -> Estimate:
    """Estimate one plan.

    >>> from memcalc.models import Model
    >>> billion = Model(name="1e9 parameters", family="size", parameters=10**9)
    >>> estimate(Plan(model=billion, optimizer="adam")).peak.bytes
    20000000000
    """
    timeline = ledger(plan)
    peak = timeline.peak()
    reserved = reserved_range(plan, peak.bytes)
    device = device_range(plan, reserved, plan.gpu_row)
    return Estimate(
        plan=plan,
        timeline=timeline,
        peak=peak,
        reserved=reserved,
        device=device,
        host=host_bytes(plan, peak.bytes),
        parameters=sum(weight.numel for weight in plan.family.weights(plan.model)),
        verdict=verdict(plan, device, plan.gpu_row),
        assumptions=tuple(assumptions(plan)),
    )


# The caching allocator holds whole segments, and under FSDP a pool for each stream. Published runs show reserved
# up to 1.17 of allocated on one GPU (logs of KellerJordan/modded-nanogpt) and up to 1.36 under FSDP
# (pytorch/torchtitan pull request 165; 1.35 in meta-llama/llama-cookbook pull request 41), and up to one 20 MiB
# segment per pool comes on top (c10/core/AllocatorConfig.h, kLargeBuffer).
RESERVED_OVER_ALLOCATED = {False: (1.00, 1.17), True: (1.00, 1.36)}
SEGMENT = 20 * 2**20


def reserved_range(plan: Plan, allocated: int) -> Range:
    """What the caching allocator holds for an allocated peak; on a CPU there is no such allocator."""
    if plan.device == "cpu":
        return Range(low=allocated, high=allocated)
    low, high = RESERVED_OVER_ALLOCATED[plan.strategy_row.gathers]
    return Range(low=int(allocated * low), high=int(allocated * high) + SEGMENT)


def device_range(plan: Plan, reserved: Range, gpu: Gpu | None) -> Range:
    """What nvidia-smi shows: reserved, the CUDA context and one NCCL communicator when ranks talk.

    Without a card the widest bounds of the catalog stand.
    """
    if plan.device == "cpu":
        return reserved
    cards = [gpu] if gpu else list(GPUS.values())
    low = min(card.context.low for card in cards)
    high = max(card.context.high for card in cards)
    if plan.ranks > 1:
        low += min(card.nccl.low for card in cards)
        high += max(card.nccl.high for card in cards)
    return Range(low=reserved.low + low, high=reserved.high + high)


def host_bytes(plan: Plan, allocated: int) -> int:
    """RAM the training data structures of one rank take.

    On the CPU that is the whole training state. With a GPU it is the batch being prepared and the
    optimizer's step counters, which torch keeps on the CPU unless the step is fused.
    """
    if plan.device == "cpu":
        return allocated
    tokens = plan.tokens * DTYPE_BYTES["int64"]
    features = plan.model.features * DTYPE_BYTES[plan.precision_row.weights]
    counters = 0
    row, paged = plan.optimizer_row, 0
    if not plan.family.opaque:
        weights = plan.family.weights(plan.model)
        counters = DTYPE_BYTES["float32"] * len(weights) * row.counters * (plan.optimizer_kind != "fused")
        paged = sum(row.host_bytes(weight, plan.precision_row.weights) for weight in weights)
    return plan.micro_batch * (2 * tokens if tokens else features) + counters + paged


def verdict(plan: Plan, device: Range, gpu: Gpu | None) -> str:
    """Does it fit? ``tight`` is between the bounds; what was not counted can only be refuted."""
    if gpu is None:
        return "unknown"
    if device.low > gpu.usable_bytes:
        return "does-not-fit"
    if not _activations_known(plan):
        return "unknown"
    return "fits" if device.high <= gpu.usable_bytes else "tight"


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
    return not plan.family.opaque or bool(model.layer_bytes or (model.features and model.layers))


def assumptions(plan: Plan) -> list[str]:
    """What the estimate takes for granted, in sentences."""
    said = ["the peak of a steady step, from the second step on, on the fullest rank"]
    if plan.family.assumption:
        said.append(plan.family.assumption)
    if not _activations_known(plan):
        said.append("activations are not counted because no shape was given")
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
    if plan.device == "cpu":
        said.append("one thread per rank; scratch memory inside oneDNN's kernels is not counted")
        return said
    said.append(f"torch {plan.torch}; sizes are rounded up to blocks of 512 B, as the caching allocator does")
    if not plan.family.opaque:
        said.extend([f"attention by the {plan.kernel} kernel"] if plan.tokens else [])
    if plan.gpu is None and not plan.family.opaque:
        said.append("cuBLAS workspaces (16 MiB to 64 MiB by card) are counted only with --gpu")
    low, high = RESERVED_OVER_ALLOCATED[plan.strategy_row.gathers]
    said.append(f"reserved is {low:.2f} to {high:.2f} of allocated and one 20 MiB segment, until measured")
    if plan.gpu is None:
        said.append("device adds the widest range of CUDA contexts in the catalog; give --gpu for one card's")
    return said
