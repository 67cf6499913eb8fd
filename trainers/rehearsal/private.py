"""What a rehearsal needs of torch that torch does not promise: everything private stands here and nowhere else.

    fake tensors                torch._subclasses.fake_tensor: sizes and no values
    fake process group          torch.testing._internal.distributed.fake_pg: collectives of N ranks that move nothing
    dispatch modes              torch.utils._python_dispatch: sees each operation below autograd
    storages that change size   torch.UntypedStorage.resize_, with which FSDP lets go of gathered parameters
    FSDP 1's streams            what torch tells the allocator of a GPU about them, and of no other device
    DDP's reducer               asks a collective for its result, and the fake group has none

Tried with torch 2.13; a torch that has one of them elsewhere fails here, by name.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any, Protocol, TypeAlias

import torch
import torch.distributed as dist
from torch._guards import active_fake_mode
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import _flat_param, _runtime_utils
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

__all__ = [
    "CAST_SHARD", "Listener", "Mode", "answered_reductions", "fake_group", "fake_mode", "is_fake", "local", "marked_waits",
    "no_modes", "propagates", "real_meshes", "resizes", "states_of_generators", "storages_by_identity", "tensors",
]  # fmt: skip

Mode: TypeAlias = TorchDispatchMode
CAST_SHARD = "FSDP::cast_shard"


def fake_mode() -> FakeTensorMode:
    """Operations run inside it give tensors without values. Tensors of the meta device may be among the inputs."""
    return FakeTensorMode(allow_non_fake_inputs=True)


def no_modes() -> Any:
    """Inside it tensors are real, and nothing is traced."""
    return _disable_current_modes()


def propagates() -> bool:
    """Whether torch itself works out shapes just now, on fake tensors as large as all ranks' together (DTensor does)."""
    return active_fake_mode() is not None


def is_fake(tensor: torch.Tensor) -> bool:
    """Whether a tensor has no values."""
    return isinstance(tensor, FakeTensor)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a distributed tensor; the tensor itself otherwise."""
    found: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
    return found


def tensors(tree: Any) -> list[torch.Tensor]:
    """Every tensor in nested lists, tuples and dicts."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


@contextlib.contextmanager
def fake_group(rank: int, world: int) -> Iterator[None]:
    """A default process group in which the other ranks do not exist and every collective is done at once."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextlib.contextmanager
def _replaced(holder: Any, name: str, value: Any) -> Iterator[Any]:
    """``holder.name`` is something else for a while; gives what it was."""
    original = getattr(holder, name)
    setattr(holder, name, value)
    try:
        yield original
    finally:
        setattr(holder, name, original)


@contextlib.contextmanager
def resizes(before: Callable[[Any], None], after: Callable[[Any], None]) -> Iterator[None]:
    """Tell of every ``UntypedStorage.resize_``, which no dispatch mode sees, with the storage."""
    original = torch.UntypedStorage.resize_

    def resize_(storage: torch.UntypedStorage, size: int) -> Any:
        before(storage)
        found = original(storage, size)
        after(storage)
        return found

    with _replaced(torch.UntypedStorage, "resize_", resize_):
        yield


@contextlib.contextmanager
def states_of_generators(seen: Callable[[torch.Tensor], None]) -> Iterator[None]:
    """Tell of every state of the CPU's generator that a checkpoint keeps; no dispatch mode sees it made."""
    original = torch.get_rng_state

    def get_rng_state() -> torch.Tensor:
        found = original()
        seen(found)
        return found

    torch.get_rng_state = get_rng_state
    try:
        yield
    finally:
        torch.get_rng_state = original


class Listener(Protocol):
    """Who is told what DDP does with its buckets."""

    def rebuilds(self, begins: bool) -> None:
        """Before and after buckets may be put in the order of the gradients.

        The ranks settle it by numbers that have to be real (torch/csrc/distributed/c10d/reducer.cpp, sync_bucket_indices).
        """

    def reduces(self, bucket: torch.Tensor) -> None:
        """A bucket is full."""


def _answer(state: object, bucket: dist.GradBucket) -> Future[torch.Tensor]:
    if state is not None:
        state.reduces(bucket.buffer())  # type: ignore[attr-defined]
    done: Future[torch.Tensor] = Future()
    done.set_result(bucket.buffer())
    return done


# DDP compares the annotations with the classes themselves (torch/nn/parallel/distributed.py, _check_comm_hook).
_answer.__annotations__ = {"state": object, "bucket": dist.GradBucket, "return": Future[torch.Tensor]}


@contextlib.contextmanager
def answered_reductions(listener: Listener | None = None) -> Iterator[None]:
    """DDP's buckets come back as they are: its own all-reduce waits for a result, which the fake group has not got."""
    init, pre_forward = DistributedDataParallel.__init__, DistributedDataParallel._pre_forward

    def new_init(self: DistributedDataParallel, *args: Any, **options: Any) -> None:
        init(self, *args, **options)
        self.register_comm_hook(listener, _answer)

    def new_pre_forward(self: DistributedDataParallel, *args: Any, **options: Any) -> Any:
        if listener is None:
            return pre_forward(self, *args, **options)
        listener.rebuilds(True)
        try:
            return pre_forward(self, *args, **options)
        finally:
            listener.rebuilds(False)

    with (
        _replaced(DistributedDataParallel, "__init__", new_init),
        _replaced(DistributedDataParallel, "_pre_forward", new_pre_forward),
    ):
        yield


@contextlib.contextmanager
def real_meshes() -> Iterator[None]:
    """Meshes of ranks are made of real numbers, which DeviceMesh looks at, also while tensors are fake."""

    def real(function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **options: Any) -> Any:
            with no_modes():
                return function(*args, **options)

        return run

    made = dist.device_mesh.init_device_mesh
    holders = [module for module in list(sys.modules.values()) if getattr(module, "init_device_mesh", None) is made]
    with contextlib.ExitStack() as stack:
        for holder in holders:
            stack.enter_context(_replaced(holder, "init_device_mesh", real(made)))
        stack.enter_context(_replaced(DeviceMesh, "__init__", real(DeviceMesh.__init__)))
        yield


@contextlib.contextmanager
def marked_waits(waits: Callable[[torch.Tensor], None]) -> Iterator[None]:
    """FSDP 1: tell of each tensor that may not be used again before another stream has come past it, which on a CPU nobody
    is told; and let the copy of a shard in lower precision stand in a region of its own."""
    cast = _flat_param.FlatParamHandle._use_low_precision_shard

    def marked(handle: Any) -> Any:
        with torch.profiler.record_function(CAST_SHARD):
            return cast(handle)

    with (
        _replaced(_flat_param.FlatParamHandle, "_use_low_precision_shard", marked),
        _replaced(_runtime_utils, "_no_dispatch_record_stream", lambda tensor, stream: waits(tensor)),
    ):
        yield


@contextlib.contextmanager
def storages_by_identity() -> Iterator[None]:
    """FSDP 1 tells storages apart by their addresses, which fake ones have not got."""
    with (
        _replaced(_flat_param, "_same_storage", lambda a, b: a.untyped_storage() is b.untyped_storage()),
        _replaced(_flat_param, "_data_ptr_allocated", lambda tensor: tensor.untyped_storage().nbytes() > 0),
    ):
        yield
