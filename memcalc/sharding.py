"""How real libraries divide tensors over ranks. None of them divides evenly; each rule is its library's.

The question is always the same: how much does the fullest rank hold?
"""

from __future__ import annotations

from collections.abc import Sequence

from memcalc.spec import Weight

__all__ = [
    "ddp_buckets",
    "flat_layout",
    "fullest",
    "greedy_partition",
    "partition_slices",
    "round_robin",
    "rows_per_rank",
    "sub_groups",
    "zero_partition",
]


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


def zero_partition(numel: int, ranks: int) -> int:
    """Elements of the flat buffer of all weights that DeepSpeed's ZeRO 1 and 2 give each rank, padding included.

    Source: deepspeed/runtime/zero/stage_1_and_2.py, ``nccl_start_alignment_factor`` of 2 and
    ``flatten_dense_tensors_aligned``: the buffer is padded to a multiple of two elements per rank.

    >>> zero_partition(17, 4)
    6
    """
    return -(-numel // (2 * ranks)) * 2


def round_robin(weights: Sequence[Weight], ranks: int) -> list[Weight]:
    """The order of ZeRO's flat buffer with ``round_robin_gradients``: every N-th weight comes to the same rank.

    Source: deepspeed/runtime/zero/stage_1_and_2.py, ``_round_robin_reorder``.

    >>> [weight.name for weight in round_robin([Weight(name, (1,)) for name in "abcde"], 2)]
    ['a', 'c', 'e', 'b', 'd']
    """
    return [weight for rank in range(ranks) for weight in weights[rank::ranks]]


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


def flat_layout(weights: Sequence[Weight], ranks: int, aligned: int) -> tuple[int, list[list[int]]]:
    """Elements of FSDP 1's flat parameter, and how many of each weight lie in each rank's shard.

    Every weight begins at a multiple of ``aligned`` elements (16 bytes under ``use_orig_params``, else 1), and the
    end is padded to a multiple of ``ranks``. Source: torch/distributed/fsdp/_flat_param.py,
    ``_init_flat_param_and_metadata`` and ``_get_shard``.

    >>> flat_layout([Weight("a", (3,)), Weight("b", (4,))], 2, 4)
    (8, [[3, 0], [0, 4]])
    """
    starts, end = [], 0
    for weight in weights:
        start = -(-end // aligned) * aligned
        starts.append(start)
        end = start + weight.numel
    size = -(-end // ranks) * ranks
    shard = size // ranks
    return size, [
        [max(0, min(start + w.numel, (rank + 1) * shard) - max(start, rank * shard)) for rank in range(ranks)]
        for w, start in zip(weights, starts, strict=True)
    ]


def sub_groups(weights: Sequence[Weight], ranks: int, limit: int) -> list[int]:
    """Elements of a rank in each group of weights that DeepSpeed's stage 3 updates at a time.

    Each weight is divided for itself, rounded up. Source: deepspeed/runtime/zero/stage3.py,
    ``_create_fp16_sub_groups``: a group closes once it has reached the limit.

    >>> sub_groups([Weight("a", (7,)), Weight("b", (4,)), Weight("c", (2,))], 2, 5)
    [6, 1]
    """
    sizes = [-(-weight.numel // ranks) for weight in weights]
    groups, size = [], 0
    for part in sizes:
        size += part
        if size >= limit:
            groups.append(size)
            size = 0
    return [*groups, size] if size else groups
