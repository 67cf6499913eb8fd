"""A meter for tensors without values: it follows storages, from the operation that makes one to its last reference.

A dispatch mode sees what each operation returns, below autograd and so in backward and in the optimizer too. It does not
see what a kernel takes for itself while it runs.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from memcalc.measurement import RankMeasurement
from memcalc.streams import WAITING
from memcalc.timeline import MOMENTS
from trainers.backends import Prepared
from trainers.history import Boundary, Event, History
from trainers.meters import Sizes, steady_steps, summary
from trainers.rehearsal import private
from trainers.rehearsal.cuda import as_cuda_makes
from trainers.rehearsal.host import HostMade, of_host
from trainers.rehearsal.kernels import with_reserve, workspace

__all__ = ["Tracer"]

_OUTSIDE = -1
_BLOCK = {"cuda": 512, "cpu": 1}
"""Bytes each allocation is a multiple of (c10/cuda/CUDACachingAllocator.cpp, kMinBlockSize)."""
_COPIED = {"c10d::allgather_": 0, "c10d::_allgather_base_": 0, "c10d::_reduce_scatter_base_": 1}
"""What gloo, the backend on CPUs, works on a copy of: the argument (torch/csrc/distributed/c10d/ProcessGroupGloo.cpp,
newLikeFlat of the outputs in allgather, clone of the inputs in reduce_scatter_tensor_coalesced)."""
_SAME = ("_c10d_functional::wait_tensor", "_c10d_functional::_wrap_tensor_autograd")
"""What gives back its input, of which fake tensors make a copy."""
_ENDINGS = {
    "FSDP::all_gather": " gather",
    "FSDP::post_backward_reduce": " shards gradient",
    private.CAST_SHARD: " cast shard",
    "FullyShardedDataParallel._post_backward_hook": " shards gradient",
}
"""By regions of FSDP 2 and 1: the endings by which memcalc/streams.py knows on which stream something is made, of what is made
there while another stream than the computation's is the current one; the input of FSDP 2's reduce-scatter is not."""
_WAITS = WAITING[-1]
"""The ending by which it knows what is made on the computation's stream and waits for another to be free."""
_PASSES = ("forward", "loss", "backward")
"""Moments in which code of the model runs; in a step the optimizer's asks for its own numbers."""
_ENTER, _LEAVE = "profiler::_record_function_enter_new", "profiler::_record_function_exit"


class Tracer(private.Mode):
    """Runs operations on fake tensors and keeps the history of their storages. Enter it once, around the whole run."""

    def __init__(self, device: str, last_step: int) -> None:
        super().__init__()
        self.device, self.last_step, self.block = device, last_step, _BLOCK[device]
        self.instrument = f"a rehearsal on fake tensors of torch {torch.__version__}, as {device} would run it"
        self.fake = private.fake_mode()
        self.events: list[Event] = []
        self.boundaries: list[Boundary] = []
        self.live: dict[int, tuple[int, int, Any]] = {}
        """By identity of the storage: its number, its bytes, and the reference that tells when it is gone."""
        self.now = self.number = 0
        self.regions: list[str] = []
        self.computes = torch.cpu.current_stream()
        """The stream that the model's own code runs on; torch keeps account of them for the CPU, too."""
        self.sizes = Sizes(torch.device("cpu"), self.where)
        self.finite: set[int] = set()
        self.guessed = 0
        """How often a pass, forward or back, asked for the value of a tensor, of which there is none."""
        self.grown = 0
        """Bytes that the last step left behind, beyond what was there when it began."""
        self.host = HostMade(lambda: self.device == "cuda" and self.in_passes, self.claim)
        """To be entered by who rehearses a module that may make tensors of its own."""
        self.of_host: dict[int, Any] = {}
        """By identity of the storage: of what the module made on the host, the reference that tells when it is gone."""
        self.host_bytes = 0
        """How much the module made there, and left there."""
        self.rebuilding = False
        self.buckets: set[int] = set()
        self.waiting: set[int] = set()

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """All that happens inside is traced."""
        waits = private.marked_waits(self.wait)
        resizes, reductions = private.resizes(self.forget, self.resized), private.answered_reductions(self)
        states = private.states_of_generators(self.state) if self.device == "cpu" else contextlib.nullcontext()
        with resizes, reductions, states, waits, private.real_meshes(), private.storages_by_identity(), self:
            yield

    def state(self, tensor: Tensor) -> None:
        """A generator's state, which lies where the CPU's tensors lie."""
        self.follow(tensor.untyped_storage(), "get_rng_state")

    def wait(self, tensor: Tensor) -> None:
        """When it is gone, another stream still reads it."""
        self.waiting.add(self.where(private.local(tensor).untyped_storage()))

    def named(self, event: Event) -> Event:
        """With the ending that says that it waits, unless its name says that already."""
        if event.address not in self.waiting or event.bytes < 0 or event.name.endswith((*WAITING, *_ENDINGS.values())):
            return event
        return replace(event, name=event.name + _WAITS)

    def rebuilds(self, begins: bool) -> None:
        """DDP looks whether its buckets want another order."""
        self.rebuilding = begins

    def reduces(self, bucket: Tensor) -> None:
        """What DDP reduces is there for communication."""
        self.buckets.add(self.where(bucket.untyped_storage()))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # so that what it does on this rank comes here, piece by piece
        kwargs = kwargs or {}
        name: str = func.name()
        if name.startswith("prim::") or private.propagates():  # asks something of a tensor, or of a shape
            return func(*args, **kwargs)
        if name == "aten::_local_scalar_dense":
            return self.number_of(args[0])
        if name.startswith(_ENTER):
            self.regions.append(str(args[0]))
        elif name.startswith(_LEAVE) and self.regions:
            self.regions.pop()
        if name == "aten::bincount":
            return _evenly(*args, **kwargs)
        if self.rebuilding and _indices(args, kwargs):
            return func(*args, **kwargs)
        if _on_meta(args, kwargs):  # a module that is built, and has no memory yet
            return func(*args, **kwargs)
        if name in _SAME:
            with self.fake:
                return torch.ops.aten.alias.default(args[0])
        if name == "aten::_amp_foreach_non_finite_check_and_unscale_":
            self.finite.add(id(args[1].untyped_storage()))
        hosted, moved = of_host(self.of_host, args, kwargs) if self.of_host else (False, [])
        for tensor in moved:
            self.claim(tensor)
        with self.fake:
            found = func(*args, **kwargs)
            found = as_cuda_makes(name, found) if self.device == "cuda" else with_reserve(name, args, found)
        if hosted or self.host.making:
            for tensor in (found,) if isinstance(found, Tensor) else private.tensors(found):
                self.keep_out(tensor)
        if self.device == "cuda" and name == "aten::lift_fresh":
            return found  # a number made by torch.tensor stays on the host
        scratch = self.take(workspace(name, self.device, args), f"{name} workspace")
        for tensor in (found,) if isinstance(found, Tensor) else private.tensors(found):
            self.see(tensor, name)
        self.give_back(*scratch)
        if name in _COPIED and self.device == "cpu" and torch.distributed.get_world_size() > 1:
            size = sum(part.numel() * part.itemsize for part in private.tensors(args[_COPIED[name]]))
            self.give_back(*self.take(size, f"gloo:copy of {name}"))
        return found

    def number_of(self, tensor: Tensor) -> float | int | bool:
        """The number in a tensor that has none: 1, which any count of steps and any loss could be; 0 infinite gradients."""
        if not private.is_fake(tensor):
            with private.no_modes():
                return tensor.item()
        self.guessed += self.in_passes
        value = 0 if id(tensor.untyped_storage()) in self.finite else 1
        return float(value) if tensor.is_floating_point() else value

    @property
    def in_passes(self) -> bool:
        """Whether code of the model runs."""
        return bool(self.boundaries) and self.boundaries[-1].moment in _PASSES

    def keep_out(self, tensor: Tensor) -> None:
        """It lies on the host, unless it is known to lie on the GPU."""
        storage = private.local(tensor).untyped_storage()
        key = id(storage)
        if key not in self.live and key not in self.of_host:
            self.of_host[key] = weakref.ref(storage, lambda _: self.of_host.pop(key, None))
            self.host_bytes += storage.nbytes()

    def claim(self, tensor: Tensor) -> None:
        """It has been moved to the GPU, if it was on the host."""
        storage = private.local(tensor).untyped_storage()
        if self.of_host.pop(id(storage), None) is not None:
            self.host_bytes -= storage.nbytes()
            self.follow(storage, "aten::_to_copy")

    def see(self, tensor: Tensor, name: str) -> None:
        """Begin to follow the storage behind a tensor, unless that is done already."""
        tensor = private.local(tensor)
        if tensor.device.type != "meta":
            self.follow(tensor.untyped_storage(), name)

    def follow(self, storage: Any, name: str) -> None:
        """An allocation, if the storage is not known and has any bytes."""
        key, size = id(storage), storage.nbytes()
        if not size or key in self.live or key in self.of_host:
            return
        self.live[key] = *self.take(size, name), weakref.ref(storage, lambda _: self.free(key))

    def take(self, size: int, name: str) -> tuple[int, int]:
        """Memory without a tensor, until it is given back: its number and its bytes."""
        self.number += 1
        size = -(-size // self.block) * self.block
        if size:
            innermost = self.regions[-1].split(" (")[0] if self.regions else ""  # a module's name stands in brackets
            aside = torch.cpu.current_stream() is not self.computes
            full = " > ".join((*self.regions, name)) + (_ENDINGS.get(innermost, "") if aside else "")
            self.events.append(Event(self.tick(), self.number, size, full))
        return self.number, size

    def give_back(self, number: int, size: int) -> None:
        """The end of an allocation."""
        if size:
            self.events.append(Event(self.tick(), number, -size))

    def free(self, key: int) -> None:
        """The storage is gone, or empty."""
        number, size, _ = self.live.pop(key, (0, 0, None))
        self.finite.discard(key)
        self.give_back(number, size)

    def forget(self, storage: Any) -> None:
        """It is about to get another size."""
        self.free(id(storage))

    def resized(self, storage: Any) -> None:
        """It has got another size."""
        copied = any("copy_out" in region for region in self.regions)
        name = "gathered" if copied else "shard" if private.CAST_SHARD in self.regions else "gather"
        self.follow(storage, f"FSDP::resize_ {name}")  # nobody else resizes

    def tick(self) -> int:
        """Time is counted in events."""
        self.now += 1
        return self.now

    def where(self, storage: Any) -> int:
        """What a storage has instead of an address: its number, 0 for one that is not followed."""
        return self.live.get(id(storage), (0, 0, None))[0]

    def mark(self, step: int, moment: str) -> None:
        """The loop enters a moment of a step."""
        self.boundaries.append(Boundary(self.tick(), step, moment))

    def states(self, prepared: Prepared) -> None:
        """Note the gradients."""
        self.sizes.backward_done(prepared)

    def finish(self, prepared: Prepared, rank: int) -> RankMeasurement:
        """The last step is over."""
        self.sizes.step_done(prepared)
        self.mark(_OUTSIDE, "init")
        began = next(mark.time for mark in self.boundaries if mark.step == self.last_step)
        self.grown = sum(event.bytes for event in self.events if event.time > began)
        history = History([self.named(event) for event in self.events], self.boundaries)
        windows = history.windows()
        steady = steady_steps(min(window.step for window in windows if window.step >= 0), self.last_step)
        peaks: dict[tuple[int, str], int] = {}
        for window in windows:
            if window.step in steady and window.moment in MOMENTS:
                key = window.step, window.moment
                peaks[key] = max(peaks.get(key, 0), window.peak)
        begin = next(window.first for window in windows if window.step == steady[0])
        # Those that DDP replaced in this step, when it rebuilt its buckets, among them; a number is never used again.
        buckets = {
            row: "communication" for row, number in enumerate(history.address.tolist()) if number in self.buckets
        }
        return summary(
            self, rank, peaks,
            init_peak=int(history.live[:begin].max(initial=0)),
            timeline=history.timeline(self.last_step, buckets | self.sizes.categories(history, self.last_step)),
        )  # fmt: skip


def _on_meta(args: Any, kwargs: Any) -> bool:
    """Whether an operation makes or changes a tensor of the meta device."""
    device = kwargs.get("device")
    if device is not None:
        return torch.device(device).type == "meta"
    first = args[0] if args and isinstance(args[0], Tensor) else next(iter(private.tensors(args)), None)
    return first is not None and first.device.type == "meta" and not private.is_fake(first)


def _indices(args: Any, kwargs: Any) -> bool:
    """Whether an operation is on int32 numbers that are real."""
    given = private.tensors((args, kwargs))
    dtype = kwargs.get("dtype") or (given[0].dtype if given else None)
    return dtype == torch.int32 and not any(map(private.is_fake, given))


def _evenly(values: Tensor, weights: Tensor | None = None, minlength: int = 0) -> Tensor:
    """Counts of values that nobody knows: every one of ``minlength`` equally often, as balanced experts get tokens."""
    each, more = divmod(values.numel(), minlength)
    with private.no_modes():
        return torch.tensor([each + (place < more) for place in range(minlength)])
