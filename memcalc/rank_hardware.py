"""The speeds of what one rank of a plan runs on: of data sheets, of coefficients, or as measured on this machine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from memcalc.coefficients import Values, values
from memcalc.hardware import GPUS, Gpu
from memcalc.plan import Plan

__all__ = ["Hardware", "generation", "hardware_of", "values_of"]

_NVLINK = 100e9
"""B/s to a neighbour that no PCIe slot of the catalog reaches."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Hardware:
    """What one rank runs on. FLOP/s and bytes/s."""

    name: str
    flops: Mapping[str, float]
    """Dense peak by compute dtype."""
    efficiency: float
    """Share of it that wide products reach in 16 bit."""
    memory_bandwidth: float
    link: float
    """What a machine sends to others, one direction, all its ranks together; on one machine as ``inside``."""
    inside: float
    """What one rank sends to its neighbour within a machine."""
    float32_efficiency: float = 1.0
    """Share of the peak that wide products reach in float32."""
    host_link: float = float("inf")
    """Between a card and the host's memory."""
    later: bool = False
    """From Hopper on, where attention lags behind products."""
    hops: float = 1.0
    """0 where collectives have no fixed time beside the host's: between processes on CPU cores."""


def hardware_of(plan: Plan, coefficients: Values | None = None) -> Hardware:
    """The speeds of one rank of a plan; on a CPU one core is one rank. Raises nothing.

    A plan for CUDA without a GPU is timed on an A100: only the order of plans matters.
    """
    v = values_of(plan) if coefficients is None else coefficients
    if plan.device == "cpu":
        flops = v["cpu-core-flops"]
        return Hardware(
            name="one CPU core", flops=dict.fromkeys(("float32", "bfloat16", "float16"), flops), efficiency=1.0,
            memory_bandwidth=v["cpu-memory-bandwidth"], link=v["cpu-link"], inside=v["cpu-link"], hops=0.0,
        )  # fmt: skip
    gpu = plan.gpu_row or GPUS["a100"]
    name = generation(gpu)
    inside = gpu.link_bandwidth * v["link-efficiency"]
    network = v[f"node-link-{'hopper' if name == 'blackwell' else name}"]
    if gpu.link_bandwidth < _NVLINK:
        network = v["node-link-other"]
    return Hardware(
        name=gpu.name,
        flops={dtype: gpu.flops(dtype) for dtype in ("float32", "bfloat16", "float16")},
        efficiency=v[f"efficiency-{name}"],
        float32_efficiency=v["efficiency-float32"],
        memory_bandwidth=gpu.memory_bandwidth,
        link=network * v["node-efficiency"] if plan.nodes > 1 else inside,
        inside=inside,
        host_link=_pcie(gpu) * v["host-link-share"],
        later=(gpu.capability or (0, 0)) >= (9, 0),
    )


def values_of(plan: Plan) -> Values:
    """The coefficients for a plan: the published ones, or those measured on this machine where it is its hardware."""
    return values(plan.device, plan.gpu_row.name if plan.gpu_row else "")


def generation(gpu: Gpu) -> str:
    """The generation by which efficiencies are told apart.

    >>> generation(GPUS["a100"]), generation(GPUS["h200"]), generation(GPUS["rtx-4090"])
    ('ampere', 'hopper', 'other')
    """
    major = (gpu.capability or (0, 0))[0]
    known = {7: "volta", 9: "hopper", 10: "blackwell"}
    return "ampere" if gpu.capability == (8, 0) else known.get(major, "other")


def _pcie(gpu: Gpu) -> float:
    """B/s of the slot: gen 3 up to Turing, 4 with Ampere and Ada, 5 from Hopper on (data sheets)."""
    capability = gpu.capability or (8, 0)
    return 16e9 if capability < (8, 0) else 32e9 if capability < (9, 0) else 64e9
