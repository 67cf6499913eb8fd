"""The meter waits until gloo's threads have let go of what a collective held."""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor
from torch.distributed import ProcessGroup, Work
from torch.profiler import ProfilerActivity, profile

from trainers import gloo_threads
from trainers.gloo_threads import settle, waited_for
from trainers.history import Boundary, Event
from trainers.meters import _walk

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


@pytest.fixture
def starved(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A group of one, whose threads run only while nothing else wants their core: who waits for them runs before them."""
    if not hasattr(os, "SCHED_IDLE"):
        pytest.skip("threads are starved by Linux's scheduler")
    monkeypatch.setattr(gloo_threads, "_LONGEST", 60.0)  # another process may want the core as well
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        for task in Path("/proc/self/task").iterdir():
            if (task / "comm").read_text() == "pt_gloo_runloop\n":
                os.sched_setscheduler(int(task.name), os.SCHED_IDLE, os.sched_param(0))
        yield
    finally:
        dist.destroy_process_group()
        os.sched_setaffinity(0, before)


def _world() -> ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group


def reduced(tensor: Tensor) -> None:
    dist.all_reduce(tensor)


def reduced_as_dtensor_does(tensor: Tensor) -> None:
    funcol.all_reduce(tensor, "sum", _world()) + 1


def exchanged_as_dtensor_does(tensor: Tensor) -> None:
    funcol.all_to_all_single(tensor, None, None, _world()) + 1


def sent_round_as_ddp_does(tensor: Tensor) -> None:
    dist._broadcast_coalesced(_world(), [tensor, *(torch.ones(1000) for _ in range(5))], 4000, 0)


@pytest.mark.parametrize(
    "collective", [reduced, reduced_as_dtensor_does, exchanged_as_dtensor_does, sent_round_as_ddp_does]
)
def test_all_that_a_collective_held_is_seen_to_be_freed(starved: None, collective: Callable[[Tensor], None]) -> None:
    """Without waiting for the threads, between one in ten and all of these frees are made by them, and not seen."""
    events: list[Event] = []
    boundaries: list[Boundary] = []
    with waited_for(), profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as seen:
        for _ in range(20):
            collective(torch.ones(1000))
        settle()
    assert seen.profiler is not None and seen.profiler.kineto_results is not None
    _walk(seen.profiler.kineto_results.experimental_event_tree(), (), events, boundaries)
    assert sum(event.bytes > 0 for event in events) >= 20
    assert sum(event.bytes for event in events if abs(event.bytes) >= 1000) == 0


def test_waiting_is_torchs_own_again_afterwards() -> None:
    places = [(owner, name, getattr(owner, name)) for owner, name, _ in gloo_threads._WAITING]
    assert Work.wait in [own for _, _, own in places]
    with waited_for():
        assert all(getattr(owner, name) is not own for owner, name, own in places)
    assert all(getattr(owner, name) is own for owner, name, own in places)
