"""Instruments that read how much memory each moment of a step takes.

    CpuMeter    the CPU allocator's own events, through torch.profiler: every allocation, exact to the byte
    CudaMeter   torch.cuda.max_memory_allocated and max_memory_reserved by moment, the device's free memory,
                and the caching allocator's history for one step

Resident set size is not used anywhere: it counts libraries and what malloc keeps, and misses what was reused.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile, record_function

from memcalc.measurement import RankMeasurement
from memcalc.timeline import MOMENTS
from trainers.backends import Prepared
from trainers.gloo_threads import settle, waited_for
from trainers.history import Boundary, Event, History

__all__ = ["CpuMeter", "CudaMeter", "Meter", "Sizes", "address", "make", "steady_steps", "storages", "summary"]

_MARK = "memcalc:"
_OUTSIDE = -1
_CUDA_BLOCK = 512  # kMinBlockSize of c10/cuda/CUDACachingAllocator.cpp


class Meter(Protocol):
    """What the loop tells an instrument, in this order: mark ..., states, mark ..., finish."""

    def mark(self, step: int, moment: str) -> None:
        """The loop enters a moment of a step; step -1 is outside of all steps."""

    def states(self, prepared: Prepared) -> None:
        """Backward is over and the gradients are complete; called in the last metered step."""

    def finish(self, prepared: Prepared, rank: int) -> RankMeasurement:
        """The last metered step is over."""


class Metered(Protocol):
    """What a summary needs of an instrument."""

    instrument: str
    sizes: Sizes


def make(device: torch.device, last_step: int) -> Meter:
    """The instrument for a device, started; ``last_step`` is the step whose timeline is kept."""
    return CudaMeter(device, last_step) if device.type == "cuda" else CpuMeter(last_step)


def address(storage: torch.UntypedStorage) -> int:
    """Where a storage lies."""
    return storage.data_ptr()


def storages(
    tensors: Iterable[object], device: torch.device, where: Callable[[torch.UntypedStorage], int] = address
) -> dict[int, int]:
    """Address and bytes of the storages behind tensors on a device, each once however many tensors share it.

    >>> whole = torch.zeros(100)
    >>> sum(storages([whole[:50], whole[50:]], torch.device("cpu")).values())
    400
    """
    found = {}
    for tensor in tensors:
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        if isinstance(local, Tensor) and local.device.type == device.type:
            storage = local.untyped_storage()
            found[where(storage)] = storage.nbytes()
    found.pop(0, None)  # empty storages, of ranks that got no rows
    return found


class Sizes:
    """Exact bytes of parameters, gradients and optimizer states, and where they lie."""

    def __init__(self, device: torch.device, where: Callable[[torch.UntypedStorage], int] = address) -> None:
        self.device, self.where = device, where
        self.gradients: dict[int, int] = {}
        self.kept_gradients: dict[int, int] = {}
        self.parameters: dict[int, int] = {}
        self.optimizer: dict[int, int] = {}

    def backward_done(self, prepared: Prepared) -> None:
        self.gradients = self._found(prepared)["gradients"]

    def step_done(self, prepared: Prepared) -> None:
        found = self._found(prepared)
        self.parameters, self.kept_gradients, self.optimizer = (
            found[kind] for kind in ("parameters", "gradients", "optimizer")
        )

    def _found(self, prepared: Prepared) -> dict[str, dict[int, int]]:
        """Address and bytes of what there is of each kind."""
        parameters = list(prepared.model.parameters())
        kinds: dict[str, Sequence[object]] = {
            "parameters": parameters,
            "gradients": [parameter.grad for parameter in parameters],
            "optimizer": [value for state in prepared.states.state.values() for value in state.values()],
            **prepared.holds(),
        }
        return {kind: storages(tensors, self.device, self.where) for kind, tensors in kinds.items()}

    def lasting(self) -> dict[int, str]:
        """Addresses of what outlives every step."""
        kinds = {"parameters": self.parameters, "optimizer": self.optimizer, "gradients": self.kept_gradients}
        return {address: kind for kind, found in kinds.items() for address in found}

    def categories(self, history: History, last_step: int) -> dict[int, str]:
        """Categories of the history's allocations: gradients by their address after the last backward."""
        backward_end = max(b.time for b in history.boundaries if (b.step, b.moment) == (last_step, "step"))
        step_end = history.boundaries[-1].time
        gradients = history.identify(backward_end, dict.fromkeys(self.gradients, "gradients"))
        return gradients | history.identify(step_end, self.lasting())


def steady_steps(first: int, last: int) -> range:
    """Steps that count as steady: all but the first, which makes the optimizer's states."""
    return range(min(first + 1, last), last + 1)


class CpuMeter:
    """Exact bytes of the CPU allocator. Everything allocated after it was made is seen."""

    instrument = "torch.profiler memory events of the CPU allocator"

    def __init__(self, last_step: int) -> None:
        self.last_step = last_step
        self.sizes = Sizes(torch.device("cpu"))
        self.held = ExitStack()
        self.held.enter_context(waited_for())
        # Not acc_events: torch would make a Python object of every operation, which takes longer than a small run.
        self.profile = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
        self.profile.start()

    def mark(self, step: int, moment: str) -> None:
        """Leave an empty event in the profile; its start is the boundary."""
        settle()  # DDP's reducer waited in C++, and what it drops afterwards shall be its own alone
        with record_function(f"{_MARK}{step}:{moment}"):
            pass

    def states(self, prepared: Prepared) -> None:
        """Note the gradients."""
        self.sizes.backward_done(prepared)

    def finish(self, prepared: Prepared, rank: int) -> RankMeasurement:
        """Stop the profiler and read it."""
        self.sizes.step_done(prepared)
        self.mark(_OUTSIDE, "init")
        self.profile.stop()
        self.held.close()
        assert self.profile.profiler is not None and self.profile.profiler.kineto_results is not None
        events: list[Event] = []
        boundaries: list[Boundary] = []
        _walk(self.profile.profiler.kineto_results.experimental_event_tree(), (), events, boundaries)
        history = History(events, boundaries, kept=self.sizes.lasting())
        windows = history.windows()
        steady = steady_steps(min(window.step for window in windows if window.step >= 0), self.last_step)
        peaks: dict[tuple[int, str], int] = {}
        for window in windows:
            key = window.step, window.moment
            peaks[key] = max(peaks.get(key, 0), window.peak)
        begin = next(window.first for window in windows if window.step == steady[0])
        return summary(
            self, rank, {key: peak for key, peak in peaks.items() if key[0] in steady},
            init_peak=int(history.live[:begin].max(initial=0)),
            timeline=history.timeline(self.last_step, self.sizes.categories(history, self.last_step)),
        )  # fmt: skip


def _walk(nodes: Iterable[Any], parents: tuple[str, ...], events: list[Event], boundaries: list[Boundary]) -> None:
    """Collect memory events, named after the operations around them, and boundaries from the profiler's tree."""
    for node in nodes:
        name: str = node.name
        if name == "[memory]":
            fields = node.extra_fields
            if fields.device.type == "cpu" and fields.alloc_size:
                events.append(Event(node.start_time_ns, fields.ptr, fields.alloc_size, " > ".join(parents)))
        elif name.startswith(_MARK):
            _, step, moment = name.split(":")
            boundaries.append(Boundary(node.start_time_ns, int(step), moment))
        elif name.startswith("autograd::engine::evaluate_function"):
            _walk(node.children, parents, events, boundaries)
        else:
            _walk(node.children, (*parents, name), events, boundaries)


class CudaMeter:
    """Counters of the caching allocator by moment; its history for the last metered step."""

    instrument = "torch.cuda.max_memory_allocated, max_memory_reserved and mem_get_info by moment"

    def __init__(self, device: torch.device, last_step: int) -> None:
        self.device, self.last_step = device, last_step
        self.sizes = Sizes(device)
        self.peaks: dict[tuple[int, str], int] = {}
        self.reserved: dict[tuple[int, str], int] = {}
        self.used: dict[tuple[int, str], int] = {}
        self.here = (_OUTSIDE, "init")
        self.baseline: list[Event] = []
        self.boundaries: list[Boundary] = []
        torch.cuda.reset_peak_memory_stats(device)

    def mark(self, step: int, moment: str) -> None:
        """Read the counters of the moment that ends and reset them for the next one."""
        self._read()
        if step == self.last_step and not self.boundaries:
            self._start_history()
        if self.boundaries or step == self.last_step:
            self.boundaries.append(Boundary(time.time_ns(), step, moment))
        self.here = (step, moment)
        torch.cuda.reset_peak_memory_stats(self.device)

    def states(self, prepared: Prepared) -> None:
        """Note the gradients."""
        self.sizes.backward_done(prepared)

    def finish(self, prepared: Prepared, rank: int) -> RankMeasurement:
        """Stop the history and read it."""
        self.sizes.step_done(prepared)
        self.mark(_OUTSIDE, "init")
        trace = torch.cuda.memory._snapshot(self.device)["device_traces"][self.device.index or 0]
        torch.cuda.memory._record_memory_history(enabled=None)
        signs = {"alloc": 1, "free_requested": -1}
        events = [
            Event(entry["time_us"] * 1000, entry["addr"], signs[entry["action"]] * _rounded(entry["size"]))
            for entry in trace
            if entry["action"] in signs
        ]
        history = History([*self.baseline, *events], self.boundaries)
        first = min(step for step, _ in self.peaks if step >= 0)
        steady = steady_steps(first, self.last_step)
        early = [peak for (step, _), peak in self.peaks.items() if step not in steady]
        return summary(
            self, rank, {key: peak for key, peak in self.peaks.items() if key[0] in steady},
            init_peak=max(early, default=0),
            timeline=history.timeline(self.last_step, self.sizes.categories(history, self.last_step)),
            reserved_peak=max(size for key, size in self.reserved.items() if key[0] in steady),
            device_peak=max(size for key, size in self.used.items() if key[0] in steady),
        )  # fmt: skip

    def _read(self) -> None:
        free, total = torch.cuda.mem_get_info(self.device)
        for table, value in (
            (self.peaks, torch.cuda.max_memory_allocated(self.device)),
            (self.reserved, torch.cuda.max_memory_reserved(self.device)),
            (self.used, total - free),
        ):
            table[self.here] = max(table.get(self.here, 0), value)

    def _start_history(self) -> None:
        now = time.time_ns()
        for segment in torch.cuda.memory._snapshot(self.device)["segments"]:
            if segment["device"] != (self.device.index or 0):
                continue
            for block in segment["blocks"]:
                if block["state"] == "active_allocated":
                    self.baseline.append(Event(now, block["address"], block["size"]))
        torch.cuda.memory._record_memory_history(enabled="all", context=None)


def _rounded(size: int) -> int:
    return -(-size // _CUDA_BLOCK) * _CUDA_BLOCK


def summary(meter: Metered, rank: int, peaks: dict[tuple[int, str], int], **rest: Any) -> RankMeasurement:
    by_moment = {
        moment: max(peak for (_, name), peak in peaks.items() if name == moment)
        for moment in MOMENTS
        if any(name == moment for _, name in peaks)
    }
    top = max(by_moment, key=lambda moment: by_moment[moment])
    sizes = meter.sizes
    return RankMeasurement(
        rank=rank,
        instrument=meter.instrument,
        moment=top,
        allocated_peak=by_moment[top],
        by_moment=by_moment,
        parameters=sum(sizes.parameters.values()),
        gradients=sum(sizes.gradients.values()),
        optimizer=sum(sizes.optimizer.values()),
        **rest,
    )
