"""What one rank keeps in the host's memory when parameters or optimizer states are offloaded.

Pinned memory comes from torch's CachingHostAllocator, which rounds every request up to a power of two
(aten/src/ATen/core/CachingHostAllocator.h, ``PowerOf2Ceil``).
"""

from __future__ import annotations

from math import prod
from typing import NamedTuple

from memcalc.plan import Plan
from memcalc.precision import DTYPE_BYTES
from memcalc.sharding import flat_layout, partition_slices, round_robin, rows_per_rank, sub_groups, zero_partition
from memcalc.spec import Weight

__all__ = ["HostTensor", "host_tensors", "pinned"]

FLOAT = DTYPE_BYTES["float32"]
# deepspeed/runtime/swap_tensor/utils.py, MIN_AIO_BYTES and AIO_ALIGNED_BYTES: what is smaller stays in memory.
LEAST_SWAPPED, ALIGNED = 2**20, 1024


class HostTensor(NamedTuple):
    """A tensor on the host: what was asked for, and whether it is page-locked."""

    name: str
    size: int
    pinned: bool
    apart: bool = False
    """Memory that torch knows nothing of: DeepSpeed's async_io locks pages of its own."""

    @property
    def held(self) -> int:
        """Bytes taken for it."""
        return pinned(self.size) if self.pinned and not self.apart else self.size


def pinned(size: int) -> int:
    """Bytes of page-locked memory taken for ``size``: the next power of two.

    >>> pinned(1_000_000), pinned(1024), pinned(0)
    (1048576, 1024, 0)
    """
    return 1 << (size - 1).bit_length() if size else 0


def host_tensors(plan: Plan) -> list[HostTensor]:
    """What is offloaded to one rank's host memory, tensor by tensor; what lies on NVMe is not among it."""
    if not plan.offload.on:
        return []
    weights = plan.family.weights(plan.model)
    if plan.strategy_row.gathers:
        return _fsdp(plan, weights)
    return _zero_3(plan, weights) if plan.strategy_row.zero_stage == 3 else _zero(plan, weights)


def _fsdp(plan: Plan, weights: list[Weight]) -> list[HostTensor]:
    """Shards and their gradients are pinned (CPUOffloadPolicy and CPUOffload), the states of the CPU's step are not."""
    itemsize, pin = DTYPE_BYTES[plan.precision_row.weights], plan.offload.pin_memory
    if plan.fsdp.version == "1":
        groups: dict[str, list[Weight]] = {}
        for weight in weights:
            groups.setdefault(weight.group if "." in weight.group else "", []).append(weight)
        aligned = 16 // DTYPE_BYTES[plan.precision_row.compute] if plan.fsdp.original_parameters else 1
        flat = {name: flat_layout(part, plan.shards, aligned)[0] // plan.shards for name, part in groups.items()}
        shapes: dict[str, tuple[int, ...]] = {name: (size,) for name, size in flat.items()}
        pin = True
    else:
        shapes = {weight.name: rows_per_rank(weight.shape, plan.shards) for weight in weights}
    found = []
    for name, shape in shapes.items():
        size = prod(shape) * itemsize
        found += [HostTensor(f"{name} shard", size, pin), HostTensor(f"{name} shard gradient", size, pin)]
        states = plan.optimizer_row.state_bytes(Weight(name, shape), plan.precision_row.weights)
        found += [HostTensor(f"{name} state", state, False) for state in states]
    return found


def _zero(plan: Plan, weights: list[Weight]) -> list[HostTensor]:
    """deepspeed/runtime/zero/stage_1_and_2.py with ``cpu_offload``; the states are made by DeepSpeedCPUAdam."""
    low, pin = DTYPE_BYTES[plan.precision_row.weights], plan.offload.pin_memory
    order = round_robin(weights, plan.shards) if plan.deepspeed.round_robin_gradients else weights
    partition = zero_partition(sum(weight.numel for weight in order), plan.shards)
    found = [
        HostTensor("float32 partition", FLOAT * partition, pin),
        HostTensor("float32 gradient", FLOAT * partition, pin),
        HostTensor("weights on their way to the device", low * partition, pin),
        HostTensor("first moment", FLOAT * partition, False),
        HostTensor("second moment", FLOAT * partition, False),
    ]
    if plan.family.opaque:
        return found
    found.append(HostTensor("gradient on its way", low * max(weight.numel for weight in weights), pin))
    if plan.accumulation > 1:  # whole weights, wherever the partition has a part of them
        slices = partition_slices(order, partition)
        touched = [[w for w in weights if any(rank == r for rank, _ in slices[w.name])] for r in range(plan.shards)]
        fullest = max(touched, key=lambda part: sum(pinned(low * weight.numel) for weight in part))
        found += [HostTensor(f"{weight.name} summed gradient", low * weight.numel, pin) for weight in fullest]
    return found


def _zero_3(plan: Plan, weights: list[Weight]) -> list[HostTensor]:
    """deepspeed/runtime/zero/stage3.py; NVMe keeps buffers of the swappers of deepspeed/runtime/swap_tensor."""
    offload, low = plan.offload, DTYPE_BYTES[plan.precision_row.weights]
    groups = sub_groups(weights, plan.shards, plan.deepspeed.sub_group_size)
    total, pin, found = sum(groups), offload.pin_memory, []
    if offload.parameters != "none":
        kept = total if offload.parameters == "cpu" else min(total, offload.max_in_cpu)
        found.append(HostTensor("partitions of weights", low * kept, True))
    if offload.parameters == "nvme":
        found += _left_in_memory(weights, plan, low, kept)
        buffers = offload.parameter_buffers * _aligned(offload.parameter_buffer_size, low)
        found.append(HostTensor("swap buffers for weights", low * buffers, True, apart=True))
    if offload.optimizer == "none":
        return found
    summed = FLOAT if plan.deepspeed.grad_accum_dtype == "float32" else low
    found.append(HostTensor("gradient partitions", summed * total, pin))
    if offload.optimizer == "nvme":
        buffers = offload.optimizer_buffers * _aligned(max(groups), FLOAT)
        found.append(HostTensor("swap buffers for states", FLOAT * buffers, True, apart=True))
        groups = [size for size in groups if FLOAT * size < LEAST_SWAPPED]
    for index, size in enumerate(groups):
        found += [
            HostTensor(f"{name} of group {index}", FLOAT * size, False) for name in ("masters", "moment", "moment")
        ]
        found.append(HostTensor(f"float32 gradient of group {index}", FLOAT * size, pin))
    return found


def _left_in_memory(weights: list[Weight], plan: Plan, low: int, kept: int) -> list[HostTensor]:
    """Partitions too small to be swapped, of groups that have no place in the flat buffer of ``kept`` elements
    (stage3.py, ``_create_fp16_partitions_with_defragmentation``; partition_parameters.py, ``_partition_param``)."""
    found: list[HostTensor] = []
    standing: dict[str, int] = {}
    end, place = 0, iter(weights)
    for size in sub_groups(weights, plan.shards, plan.deepspeed.sub_group_size):
        end += size
        group: list[tuple[str, int]] = []
        while sum(part for _, part in group) < size:
            weight = next(place)
            group.append((weight.name, -(-weight.numel // plan.shards)))
        if end > kept:
            if any(low * part >= LEAST_SWAPPED for _, part in group):
                standing = {"what stands for weights that are on NVMe": 2}  # one float16 for all
            found += [HostTensor(name, low * part, True) for name, part in group if low * part < LEAST_SWAPPED]
    return found + [HostTensor(name, size, False) for name, size in standing.items()]


def _aligned(elements: int, itemsize: int) -> int:
    step = ALIGNED // itemsize
    return -(-elements // step) * step
