"""Waiting for gloo's threads, so that the memory a collective held is freed where torch.profiler sees it.

A worker thread of ProcessGroupGloo lets go of a collective's tensors microseconds after it has woken those who wait
for it (``runLoop`` in torch/csrc/distributed/c10d/ProcessGroupGloo.cpp: ``execute``, then ``workInProgress_.reset()``).
On a busy machine the system may give the thread no time in between. Then the thread is the last to hold a buffer, and
frees it some milliseconds later than it would otherwise, unseen: the profiler looks at the threads it was started on.

So whoever waits for a collective also waits for the thread, while still holding the collective. There are three who wait:

    Work.wait                        most of torch, DeepSpeed and accelerate, in Python
    funcol.wait_tensor               DTensor (tensor parallel), in C++
    dist._broadcast_coalesced        DDP sending round buffers, in C++

DDP's reducer waits in C++ too, but holds its buckets from step to step.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from typing import Any

import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor
from torch._C._distributed_c10d import _register_work
from torch.distributed import ProcessGroup, Work

__all__ = ["settle", "waited_for"]

_RUNNING = (b"pt_gloo_runloop) R", b"pt_gloo_runloop) D")
"""What torch calls these threads (2.5 and later), with the state they are in, as Linux shows them in /proc."""

_SHORT = 64
"""Bytes of /proc/.../stat that hold both."""

_LONGEST = 2.0
"""Seconds after which waiting is given up: the thread may compute for another collective that is not over yet."""

_PAUSE = 5e-5

_IN_FLIGHT = 2
"""Buckets that torch sends round at a time (max_in_flight in torch/csrc/distributed/c10d/comm.cpp)."""


@contextmanager
def waited_for() -> Iterator[None]:
    """Within, whoever waits for a collective also waits until its thread has let go of it."""
    with ExitStack() as changed:
        for owner, name, settled in _WAITING:
            original = getattr(owner, name)
            setattr(owner, name, settled(original))
            changed.callback(setattr, owner, name, original)
        yield


def _wait(original: Callable[..., bool]) -> Callable[..., bool]:
    def wait(work: Work, *arguments: Any, **options: Any) -> bool:
        done = original(work, *arguments, **options)
        settle()
        return done

    return wait


class _Settling(Work):
    """A collective that is over when gloo's threads sleep."""

    def wait(self, timeout: timedelta = timedelta()) -> bool:
        settle()
        return True


def _wait_tensor(original: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    settling = _Settling()

    def wait_tensor(tensor: Tensor) -> Tensor:
        # torch waits for all that is registered for a tensor, one after the other, and lets go of them together
        # (wait_tensor in torch/csrc/distributed/c10d/Functional.cpp).
        if type(tensor) is Tensor:  # others have one within, which is waited for here too
            _register_work(tensor, settling)
        return original(tensor)

    return wait_tensor


class _Holding(ProcessGroup):
    """A group through which tensors are broadcast that are held here until gloo's threads have let go of them."""

    def __init__(self, group: ProcessGroup) -> None:
        super().__init__(group.rank(), group.size())  # type: ignore[call-arg]
        self.group = group
        self.held: deque[Work] = deque()

    def broadcast(self, tensors: list[Tensor], options: Any) -> Work:  # type: ignore[override]
        """Called by torch, in C++, for a bucket whose tensors it has put together."""
        if len(self.held) == _IN_FLIGHT:
            self.let_go()
        self.held.append(self.group.broadcast(tensors, options))
        return self.held[-1]

    def let_go(self) -> None:
        """Of the oldest one, which was waited for."""
        settle()
        self.held.popleft()


def _broadcast_coalesced(original: Callable[..., None]) -> Callable[..., None]:
    def broadcast_coalesced(group: ProcessGroup, *arguments: Any, **options: Any) -> None:
        holding = _Holding(group)
        original(holding, *arguments, **options)
        while holding.held:
            holding.let_go()

    return broadcast_coalesced


_WAITING: tuple[tuple[Any, str, Callable[..., Any]], ...] = (
    (Work, "wait", _wait),
    (funcol, "wait_tensor", _wait_tensor),
    (dist, "_broadcast_coalesced", _broadcast_coalesced),
)


def settle() -> None:
    """Return when all threads of gloo sleep, as they do before the next collective; at once where there is no /proc.

    >>> settle()
    """
    latest = time.monotonic() + _LONGEST
    asleep = 0
    # Twice in a row: in between a thread may have waited for Python's lock, which the pause gives it.
    while asleep < 2 and time.monotonic() < latest:
        asleep = 0 if any(map(_running, _threads())) else asleep + 1
        time.sleep(_PAUSE)


def _threads() -> list[str]:
    try:
        return os.listdir("/proc/self/task")
    except OSError:
        return []


def _running(ident: str) -> bool:
    """Whether a thread is one of gloo's and does not sleep; false too where it has ended.

    A run has two of them for each group of ranks, so that this is asked some hundred times for each collective.
    """
    try:
        file = os.open(f"/proc/self/task/{ident}/stat", os.O_RDONLY)
    except OSError:
        return False
    try:
        return os.read(file, _SHORT).partition(b" (")[2].startswith(_RUNNING)
    except OSError:
        return False
    finally:
        os.close(file)
