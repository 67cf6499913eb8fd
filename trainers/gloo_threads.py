"""Waiting for gloo's threads, so that the memory a collective held is freed where torch.profiler sees it.

A worker thread of ProcessGroupGloo lets go of a collective's tensors microseconds after it has woken those who wait
for it (``runLoop`` in torch/csrc/distributed/c10d/ProcessGroupGloo.cpp: ``execute``, then ``workInProgress_.reset()``).
On a busy machine the system may give the thread no time in between. Then the thread is the last to hold a buffer, and
frees it some milliseconds later than it would otherwise, unseen: the profiler looks at the threads it was started on.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.distributed import Work

__all__ = ["settle", "waited_for"]

_NAME = "pt_gloo_runloop"
"""What torch calls these threads (2.5 and later), and Linux shows in /proc."""

_LONGEST = 0.25
"""Seconds after which waiting is given up: the thread runs another collective, which may need other ranks."""

_PAUSE = 5e-5


@contextmanager
def waited_for() -> Iterator[None]:
    """Within, whoever waits for a collective also waits until its thread has let go of it."""
    original = Work.wait

    def wait(work: Work, *arguments: Any, **options: Any) -> bool:
        done: bool = original(work, *arguments, **options)
        settle()
        return done

    Work.wait = wait  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        Work.wait = original  # type: ignore[method-assign]


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
        return [ident for ident in os.listdir("/proc/self/task") if _read(ident, "comm").strip() == _NAME]
    except OSError:
        return []


def _running(ident: str) -> bool:
    """False too for a thread that has ended."""
    return _read(ident, "stat").rpartition(")")[2].split()[:1] in (["R"], ["D"])


def _read(ident: str, name: str) -> str:
    try:
        with open(f"/proc/self/task/{ident}/{name}") as file:
            return file.read()
    except OSError:
        return ""
