"""The meter waits until gloo's threads have let go of what a collective held."""

from __future__ import annotations

import ctypes
import os
import threading
import time

import pytest
from torch.distributed import Work

from trainers.gloo_threads import settle, waited_for

_PR_SET_NAME = 15


@pytest.mark.skipif(not os.path.exists("/proc/self/task"), reason="threads are looked at through Linux's /proc")
def test_settle_outlasts_what_a_thread_of_gloo_is_doing() -> None:
    working, may_end = threading.Event(), threading.Event()

    def like_gloo() -> None:
        ctypes.CDLL(None).prctl(_PR_SET_NAME, b"pt_gloo_runloop", 0, 0, 0)
        working.set()
        until = time.monotonic() + 0.05
        while time.monotonic() < until:
            pass
        working.clear()
        may_end.wait()

    thread = threading.Thread(target=like_gloo)
    thread.start()
    assert working.wait(10)
    settle()
    assert not working.is_set()
    may_end.set()
    thread.join()


def test_wait_is_torchs_own_again_afterwards() -> None:
    before = Work.wait
    with waited_for():
        assert Work.wait is not before
    assert Work.wait is before
