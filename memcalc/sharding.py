"""How real libraries divide tensors over ranks. None of them divides evenly; each rule is its library's.

The question is always the same: how much does the fullest rank hold?
"""

from __future__ import annotations

from collections.abc import Sequence

from memcalc.spec import Weight

__all__ = ["ddp_buckets", "fullest", "greedy_partition", "partition_slices", "rows_per_rank"]


def rows_per_rank(shape: tuple[int, ...], ranks: int) -> tuple[int, ...]:
    """Shape every rank holds of a tensor that ``fully_shard`` splits by rows, padding included.

    Source: torch/distributed/fsdp/_fully_shard/_fsdp_param.py, ``_init_sharded_param``: rows are rounded up
    and every rank allocates the padded shard.

    >>> rows_per_rank((10, 64), 8)
    (2, 64)
    """
    return (-(-shape[0] // ranks), *shape[1:])


def greedy_partition(weights: Sequence[Weight], ranks: int) -> list[list[Weight]]:
    """Whole tensors to ranks, the largest first, each to the rank that holds least so far.

    Source: torch/distributed/optim/zero_redundancy_optimizer.py, ``_partition_parameters``.

    >>> parts = greedy_partition([Weight("a", (6,)), Weight("b", (4,)), Weight("c", (3,))], 2)
    >>> [[weight.name for weight in part] for part in parts]
    [['a'], ['b', 'c']]
    """
    parts: list[list[Weight]] = [[] for _ in range(ranks)]
    sizes = [0] * ranks
    for weight in sorted(weights, key=lambda weight: weight.numel, reverse=True):
        rank = sizes.index(min(sizes))
        parts[rank].append(weight)
        sizes[rank] += weight.numel
    return parts


def fullest(parts: Sequence[Sequence[Weight]]) -> int:
    """The rank whose part holds most elements; among equals the one with more tensors, then the first.

    >>> fullest([[Weight("a", (6,))], [Weight("b", (4,)), Weight("c", (2,))]])
    1
    """
    # More tensors are more step counters.
    return max(range(len(parts)), key=lambda rank: (sum(w.numel for w in parts[rank]), len(parts[rank])))


def ddp_buckets(weights: Sequence[Weight], itemsize: int, bucket_mb: int) -> list[int]:
    """Bytes of each gradient bucket of DistributedDataParallel, after its first iteration.

    Gradients are taken in the order they become ready, nearly the reverse of the parameters'; the first
    bucket closes at 1 MiB when the default of 25 MiB is used. A bucket closes once it has reached its size.
    Source: torch/csrc/distributed/c10d/reducer.cpp, ``compute_bucket_assignment_by_size``;
    torch/nn/parallel/distributed.py, ``_DEFAULT_FIRST_BUCKET_BYTES``.

    >>> ddp_buckets([Weight("a", (1000,)), Weight("b", (500_000,))], 4, 25)
    [2000000, 4000]
    """
    limit = bucket_mb * 2**20
    first = 2**20 if bucket_mb == 25 else limit
    buckets: list[int] = []
    size = 0
    for weight in reversed(weights):
        size += weight.numel * itemsize
        if size >= (limit if buckets else first):
            buckets.append(size)
            size = 0
    return [*buckets, size] if size else buckets


def partition_slices(order: Sequence[Weight], partition: int) -> dict[str, list[tuple[int, int]]]:
    """``(rank, elements)`` of each weight's slices when the weights lie end to end in a buffer cut by ranks.

    >>> partition_slices([Weight("a", (3,)), Weight("b", (4,))], 4)
    {'a': [(0, 3)], 'b': [(0, 1), (1, 3)]}
    """
    slices: dict[str, list[tuple[int, int]]] = {}
    start = 0
    for weight in order:
        end, found = start + weight.numel, []
        while start < end:
            rank = start // partition
            stop = min(end, (rank + 1) * partition)
            found.append((rank, stop - start))
            start = stop
        slices[weight.name] = found
    return slices
