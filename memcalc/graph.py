"""The graph that a tape records: tensors with sizes and no values, nodes, and checkpointed regions."""

from __future__ import annotations

from collections.abc import Callable

from memcalc.recorder import Storage
from memcalc.spec import Weight

__all__ = ["Backward", "Edge", "Gradient", "Graph", "Keeps", "Modules", "Node", "Region", "Tensor"]


class Tensor:
    """A view of a storage: elements per sample, dtype, and the node whose output it is.

    ``node`` is None where no trainable weight stands behind it (``requires_grad`` is False).
    """

    __slots__ = ("batched", "dtype", "node", "shape", "slot", "storage")

    def __init__(
        self,
        storage: Storage,
        shape: tuple[int, ...],
        dtype: str,
        node: Node | None,
        slot: int = 0,
        batched: bool = True,
    ) -> None:
        self.storage, self.shape, self.dtype = storage, shape, dtype
        self.node, self.slot, self.batched = node if node is not None and node.live else None, slot, batched


Gradient = Storage | None
Backward = Callable[["Node", list[Gradient]], "list[Gradient]"]


class Node:
    """One operation in the graph: where its gradients go, what it saved, and how it computes them.

    An edge is None where no gradient is wanted. A node without any other edge is not ``live``: torch makes none.
    """

    __slots__ = ("backward", "edges", "grads", "held", "live", "region", "saved")

    def __init__(self, edges: list[Edge], backward: Backward, outputs: int, *, live: bool = True) -> None:
        self.edges, self.backward, self.live = edges, backward, live
        self.grads: list[Gradient] = [None] * outputs
        self.saved: list[Storage | None] = []
        self.held: list[Storage] = []
        self.region: Region | None = None

    def wants(self, index: int) -> bool:
        """A gradient is needed for the input of this place (``ctx.needs_input_grad``)."""
        return self.edges[index] is not None


Edge = tuple[Node, int] | Weight | None


class Graph:
    """What one forward pass recorded: its nodes, and how often each weight was used. Several may wait for their backward."""

    __slots__ = ("nodes", "uses")

    def __init__(self, nodes: list[Node], uses: dict[str, int]) -> None:
        self.nodes, self.uses = nodes, uses


Keeps = Callable[[str], bool]
"""``operation -> its output is kept`` through a checkpoint; called in the order of the operations."""


class Region:
    """A checkpointed stretch of the model: how to run it again, and which nodes wait for their saved tensors."""

    __slots__ = ("keeps", "kept", "ready", "run", "saved_before", "waiting")

    def __init__(self, run: Callable[[], object], keeps: Keeps | None) -> None:
        self.run, self.ready, self.keeps = run, False, keeps
        self.waiting: list[tuple[Node, int]] = []
        self.kept: list[list[Storage] | None] = []
        """Outputs of the operations that were asked about, in their order; None where it was not kept."""
        self.saved_before: list[int] = []
        """How many tensors nodes had saved when each of them was made."""

    def drop_unread(self) -> None:
        """Give up outputs at the end that no backward reads, nor anything it is computed from again."""
        for index, saved in enumerate(self.saved_before):
            if saved == len(self.waiting):
                self.kept[index] = None


class Modules:
    """What a strategy does around every operation that has weights: nothing."""

    def enter(self, weights: list[Weight], forward: bool) -> None:
        """Before the operation runs."""

    def leave(self, weights: list[Weight], forward: bool) -> None:
        """When its output is there; in backward, when its gradients have been handed on."""
