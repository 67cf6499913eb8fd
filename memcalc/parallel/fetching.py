"""DeepSpeed's stage 3 around each module: weights are gathered for it, ahead of it, and let go after it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from memcalc.deepspeed import DeepSpeed
from memcalc.graph import Modules
from memcalc.recorder import Storage
from memcalc.spec import Weight

__all__ = ["Fetching", "Gather"]

NEVER = -1


class Gather:
    """One all-gather under way: a flat buffer, and the weights that will be copied out of it."""

    __slots__ = ("done", "flat", "weights")

    def __init__(self, weights: list[Weight], flat: Storage) -> None:
        self.weights, self.flat, self.done = weights, flat, False


class Fetching(Modules):
    """Source: deepspeed/runtime/zero/partitioned_param_coordinator.py and partition_parameters.py.

    From the second step on the order of modules is known. Each module fetches what is missing, then the next weights
    up to ``prefetch_bucket_size`` while fewer than ``max_live_parameters`` are there. A weight is kept after its module
    when it is used again within ``max_reuse_distance``. A gather of several weights is a flat buffer out of which each
    is copied when the first of them is used; it goes when the last of them is. Modules without weights fetch ahead too,
    which is not counted: the limits are reached a little later.
    """

    def __init__(
        self,
        knobs: DeepSpeed,
        persistent: set[str],
        allocate: Callable[[str, int], Storage],
        gather: Callable[..., Gather],
    ) -> None:
        self.knobs, self.persistent = knobs, persistent
        self.allocate, self.start = allocate, gather
        self.seen: list[list[Weight]] = []
        """The weights of each module, in the order they ran."""
        self.order: list[list[Weight]] | None = None
        self.there: dict[str, Storage] = {}
        self.under_way: dict[str, Gather] = {}
        self.begin()

    def follow(self, order: list[list[Weight]]) -> None:
        """Fetch ahead along an order recorded before."""
        self.order = order
        self.begin()

    def begin(self) -> None:
        """A forward pass begins: what was fetched ahead in vain goes, and the trace starts anew."""
        self.under_way.clear()
        self.at, self.live = 0, 0
        self.latest: dict[str, int] = {}
        self.queue = deque((weight, index) for index, part in enumerate(self.order or []) for weight in part)

    def drop(self) -> None:
        """The optimizer's step begins: every weight is divided again."""
        self.there.clear()
        self.under_way.clear()

    def missing(self, weight: Weight) -> bool:
        return (
            weight.name not in self.there and weight.name not in self.under_way and weight.name not in self.persistent
        )

    def enter(self, weights: list[Weight], forward: bool) -> None:
        self.gather([weight for weight in weights if self.missing(weight)])
        for weight in weights:
            self.wait(weight)
        if self.order is None:
            self.seen.append(list(weights))
        else:
            self.fetch_ahead(weights)
        self.at += 1

    def gather(self, weights: list[Weight]) -> None:
        if not weights:
            return
        handle = self.start(weights)
        self.live += sum(weight.numel for weight in weights)
        for weight in weights:
            self.under_way[weight.name] = handle

    def wait(self, weight: Weight) -> None:
        """A gather of one weight is used as it is; of several, each is copied out."""
        handle = self.under_way.pop(weight.name, None)
        if handle is None or handle.done:
            return
        handle.done = True
        for part in handle.weights:
            alone = len(handle.weights) == 1
            self.there[part.name] = handle.flat if alone else self.allocate(f"{part.name} gathered", part.numel)

    def fetch_ahead(self, weights: list[Weight]) -> None:
        new = {weight.name for weight in weights if self.latest.get(weight.name, NEVER) < self.at}
        passed: set[str] = set()
        while self.queue and len(passed) < len(new):
            weight, index = self.queue.popleft()
            self.latest[weight.name] = index
            passed.add(weight.name)
        room = min(self.knobs.max_live_parameters - self.live, self.knobs.prefetch_bucket_size)
        ahead: dict[str, Weight] = {}
        count = 0
        while self.queue and count < room:
            weight, index = self.queue.popleft()
            self.latest[weight.name] = max(index, self.latest.get(weight.name, NEVER))
            if self.missing(weight) and weight.name not in ahead:
                ahead[weight.name] = weight
                count += weight.numel
        self.gather(list(ahead.values()))

    def leave(self, weights: list[Weight], forward: bool) -> None:
        for weight in self.released(weights):
            if self.there.pop(weight.name, None) is not None:
                self.live -= weight.numel

    def released(self, weights: list[Weight]) -> list[Weight]:
        """Those that are not used again soon."""
        if self.order is None:
            return weights
        going = {w.name: w for w in weights if self.latest.get(w.name, NEVER) < self.at}
        passed = 0
        for part in self.order[self.at :]:
            if passed >= self.knobs.max_reuse_distance or not going:
                break
            for weight in part:
                going.pop(weight.name, None)
                passed += weight.numel
        return list(going.values())
