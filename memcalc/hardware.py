"""GPUs: what torch can use of their memory, and how fast they are."""

from __future__ import annotations

from dataclasses import dataclass

from memcalc.catalog import Catalog

__all__ = ["GPUS", "Gpu"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Gpu:
    """One card. Memory is what torch can use, below the size on the box."""

    name: str
    usable_bytes: int
    """``torch.cuda.get_device_properties().total_memory``; less than what nvidia-smi shows."""


GPUS: Catalog[Gpu] = Catalog("GPU", [Gpu(name="a100-80gb", usable_bytes=int(79.15 * 2**30))])
