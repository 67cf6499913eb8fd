"""Pipeline schedules: in which order one rank runs its forward and backward passes.

gpipe        all forward passes, then all backward passes (torch/distributed/pipelining/schedules.py, ScheduleGPipe)
1f1b         as many forward passes ahead as there are stages behind, then one forward and one backward in turn
             (megatron/core/pipeline_parallel/schedules.py, forward_backward_pipelining_without_interleaving)
interleaved  the same with several stretches of layers on each rank (forward_backward_pipelining_with_interleaving)
"""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["MIDDLE", "PLAYED", "Pass", "ahead", "in_flight", "passes", "played", "spared"]

PLAYED = 8
"""Micro batches of GPipe that are played one by one; of more the middle ones are played once and counted."""

MIDDLE = 2
"""The one of them that stands for all that are left out."""

AHEAD = 4
"""Forward passes ahead of 1F1B's first backward pass that are played one by one where only the peak is asked for."""


class Pass(NamedTuple):
    """One pass of one micro batch through one stretch of layers."""

    forward: bool
    micro_batch: int
    chunk: int = 0


def ahead(schedule: str, stage: int, stages: int, micro_batches: int, chunks: int = 1) -> int:
    """Forward passes before the first backward pass, less the one that it comes after.

    >>> [ahead("1f1b", stage, 4, 8) for stage in range(4)]
    [3, 2, 1, 0]
    >>> [ahead("interleaved", stage, 4, 8, 2) for stage in range(4)]
    [10, 8, 6, 4]
    """
    everything = micro_batches * chunks
    if schedule == "gpipe":
        return everything
    behind = stages - stage - 1
    return min(behind if chunks == 1 else 2 * behind + (chunks - 1) * stages, everything)


def passes(schedule: str, stage: int, stages: int, micro_batches: int, chunks: int = 1) -> list[Pass]:
    """The order of passes on one rank.

    >>> ["FB"[not p.forward] + str(p.micro_batch) for p in passes("1f1b", 1, 3, 4)]
    ['F0', 'F1', 'B0', 'F2', 'B1', 'F3', 'B2', 'B3']
    >>> [p[1:] for p in passes("interleaved", 0, 2, 2, 2) if not p.forward]
    [(0, 1), (1, 1), (0, 0), (1, 0)]
    """
    group = micro_batches if schedule == "gpipe" else stages  # micro batches that go through one chunk in a row
    table = [
        (micro_batch, chunk)
        for first in range(0, micro_batches, group)
        for chunk in range(chunks)
        for micro_batch in range(first, min(first + group, micro_batches))
    ]
    warm_up = ahead(schedule, stage, stages, micro_batches, chunks)
    forward = [Pass(True, *entry) for entry in table]
    backward = [Pass(False, micro_batch, chunks - 1 - chunk) for micro_batch, chunk in table]
    order = forward[:warm_up]
    for ahead_of, behind in zip(forward[warm_up:], backward, strict=False):
        order += [ahead_of, behind]
    return order + backward[len(table) - warm_up :]


def in_flight(order: list[Pass]) -> int:
    """Most passes that wait for their backward at once.

    >>> [in_flight(passes("1f1b", stage, 4, 8)) for stage in range(4)], in_flight(passes("gpipe", 3, 4, 8))
    ([4, 3, 2, 1], 8)
    """
    waiting = most = 0
    for each in order:
        waiting += 1 if each.forward else -1
        most = max(most, waiting)
    return most


def played(
    schedule: str, stage: int, stages: int, micro_batches: int, chunks: int = 1, *, remembers: bool = False
) -> int:
    """Micro batches that need playing for the fullest point: more of them only repeat what one has seen.

    After the warm-up a first, a middle and a last micro batch differ. One that ``remembers`` has something of the
    warm-up, which counts in full when all micro batches of the warm-up are done.

    >>> played("1f1b", 0, 4, 1000), played("1f1b", 3, 4, 1000), played("gpipe", 0, 4, 1000)
    (6, 3, 8)
    """
    if schedule == "gpipe":
        return min(micro_batches, PLAYED)
    warm_up = ahead(schedule, stage, stages, micro_batches, chunks)
    if chunks == 1:
        return min(micro_batches, max(warm_up + 3, (2 * warm_up + 1) * remembers))
    rounds = -(-warm_up // (stages * chunks)) + 3
    return min(micro_batches, rounds * stages + micro_batches % stages)


def spared(schedule: str, stage: int, stages: int, micro_batches: int, chunks: int = 1) -> int:
    """Micro batches of 1F1B's warm-up that need no playing where only the peak is asked for: the middle one stands for them.

    They wait alike, and the backward passes of the first two come while all of them still do. When the middle one's comes,
    fewer wait, and it finds no more than the one before it found.

    >>> spared("1f1b", 0, 4, 8), spared("1f1b", 0, 16, 64), spared("1f1b", 15, 16, 64), spared("gpipe", 0, 16, 64)
    (0, 11, 0, 0)
    """
    if schedule != "1f1b":
        return 0
    return max(ahead(schedule, stage, stages, micro_batches, chunks) - AHEAD, 0)
