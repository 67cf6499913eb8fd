"""Storages that record their own allocation and free: how a sequence of Python references becomes a Skeleton."""

from __future__ import annotations

from collections.abc import Callable
from math import prod

import numpy as np

from memcalc.errors import PlanError
from memcalc.precision import DTYPE_BYTES
from memcalc.timeline import CATEGORIES, LARGEST, MOMENTS, TOO_LARGE, Skeleton

__all__ = ["PARKED_FROM", "Parked", "Recorder", "Storage", "granularity"]

# torchtune/training/_activation_offloading.py, min_offload_size.
PARKED_FROM = 1024
_CATEGORY = {name: index for index, name in enumerate(CATEGORIES)}
_MOMENT = {name: index for index, name in enumerate(MOMENTS)}


def granularity(device: str) -> int:
    """Bytes of which every allocation is a multiple: kMinBlockSize of c10/cuda/CUDACachingAllocator.cpp on CUDA."""
    return 512 if device == "cuda" else 1


class Storage:
    """Some bytes on the device; recorded as freed when nothing refers to it any more."""

    __slots__ = ("_free", "ident", "view")

    def __init__(self, ident: int, free: Callable[[int], None]) -> None:
        self.ident, self._free = ident, free
        self.view = False
        """Reached through a view of another shape; autograd does not add to such a gradient in place."""

    def __del__(self) -> None:
        self._free(self.ident)


class Parked(Storage):
    """A storage whose bytes wait in host memory; ``Recorder.fetched`` brings them back as a new one."""

    __slots__ = ()

    def __del__(self) -> None:
        """Nothing on the device to free."""


class Recorder:
    """Allocations and frees in program order; ``moment`` is the moment of the step that is being recorded."""

    def __init__(self) -> None:
        self.moment = "start"
        self._names: list[str] = []
        self._shapes: list[tuple[tuple[int, ...], int, bool]] = []
        self._category: list[int] = []
        self._times: dict[int, int] = {}
        self._events: list[tuple[int, int, int]] = []

    def allocate(
        self, name: str, shape: tuple[int, ...], dtype: str, category: str, *, batched: bool = True
    ) -> Storage:
        """New bytes: ``prod(shape)`` elements, times the micro batch when ``batched``."""
        ident = len(self._names)
        self._names.append(name)
        self._shapes.append((shape, DTYPE_BYTES[dtype], batched))
        self._category.append(_CATEGORY[category])
        self._events.append((ident, 1, _MOMENT[self.moment]))
        return Storage(ident, self._free)

    def _free(self, ident: int) -> None:
        self._events.append((ident, -1, _MOMENT[self.moment]))

    @property
    def made(self) -> int:
        """Allocations so far."""
        return len(self._names)

    @property
    def events(self) -> int:
        """Allocations and frees so far."""
        return len(self._events)

    def repeat(self, since: int, times: int) -> None:
        """Count what was allocated after the first ``since`` allocations and is still there ``times`` times."""
        freed = {ident for ident, sign, _ in self._events if sign < 0}
        self._times |= {ident: times for ident in range(since, self.made) if ident not in freed}

    def copy_of(self, storage: Storage, name: str, category: str) -> Storage:
        """A new storage of the same size."""
        shape, itemsize, batched = self._shapes[storage.ident]
        dtype = next(dtype for dtype, size in DTYPE_BYTES.items() if size == itemsize)
        return self.allocate(name, shape, dtype, category, batched=batched)

    def category_of(self, storage: Storage) -> str:
        """What a storage is for: one of CATEGORIES."""
        return CATEGORIES[self._category[storage.ident]]

    def parked(self, storage: Storage) -> Storage:
        """What is kept in place of ``storage`` when its bytes go to the host: itself, if it is small or no activation."""
        shape, itemsize, _ = self._shapes[storage.ident]
        activation = self._category[storage.ident] == _CATEGORY["activations"]
        return Parked(storage.ident, self._free) if activation and prod(shape) * itemsize >= PARKED_FROM else storage

    def fetched(self, storage: Storage) -> Storage:
        """The bytes of a parked storage, on the device again; any other as it is."""
        if not isinstance(storage, Parked):
            return storage
        return self.copy_of(storage, f"{self._names[storage.ident]}, back from the host", "activations")

    def skeleton(self, block: int) -> Skeleton:
        """What was recorded so far; later frees are not part of it. Raises PlanError past 4 EiB."""
        events = np.array(self._events, dtype=np.int64).reshape(-1, 3)
        exact = [prod(shape) * itemsize for shape, itemsize, _ in self._shapes]
        if sum(exact) > LARGEST:
            raise PlanError(TOO_LARGE)
        times = np.ones(len(exact), dtype=np.int64)
        times[list(self._times)] = list(self._times.values())
        sizes = np.array(exact, dtype=np.int64)
        batched = np.array([batched for _, _, batched in self._shapes], dtype=bool)
        return Skeleton(
            names=tuple(self._names),
            shapes=tuple(self._shapes),
            categories=np.array(self._category, dtype=np.int8),
            fixed=np.where(batched, 0, sizes),
            per_sample=np.where(batched, sizes, 0),
            times=times,
            ident=events[:, 0],
            moment=events[:, 2].astype(np.int8),
            sign=events[:, 1].astype(np.int8),
            block=block,
        )
