"""Being told to stop: how all ranks agree after which step they do. How one hears it is in trainers/process.py.

A scheduler that takes a machine back sends SIGTERM and some time later SIGKILL (Slurm's KillWait and Kubernetes'
terminationGracePeriodSeconds are 30 s). In between the ranks finish their step, save it and leave.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

__all__ = ["Agreement"]


class Agreement:
    """Whether any rank was told to stop, answered alike on all ranks after the same step.

    The question goes round while the next step runs, so that no rank waits for an answer; it comes one step late.
    It goes over gloo, because reading what NCCL reduced would make the host wait for the device.
    """

    def __init__(self) -> None:
        self._group = dist.new_group(backend="gloo") if dist.get_world_size() > 1 else None
        self._told = torch.zeros(1, dtype=torch.int32)
        self._work: dist.Work | None = None

    def after_step(self, told: bool) -> bool:
        """Called by every rank after every step; ``told`` is whether this rank was."""
        if self._group is None:
            return told
        before = self._answer()
        self._told.fill_(told)
        self._work = dist.all_reduce(self._told, dist.ReduceOp.MAX, group=self._group, async_op=True)
        return before

    def close(self) -> None:
        """Take in the last answer: nobody asks any more."""
        self._answer()

    def _answer(self) -> bool:
        if self._work is None:
            return False
        self._work.wait()
        self._work = None
        return bool(self._told.item())
