"""A miniature of torch's autograd: records nodes as operations run, keeps what they save, and runs them backward."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterator

from memcalc.graph import Backward, Edge, Gradient, Graph, Keeps, Modules, Node, Region, Tensor
from memcalc.recorder import Parked, Recorder, Storage
from memcalc.spec import Weight

__all__ = ["Autograd"]

# torchtune/training/_activation_offloading.py, max_fwd_stash_size: saved tensors that stay until they are copied.
STASHED = 5


class _Stop(Exception):
    """Raised inside a recomputation once everything the nodes had saved is there again."""


def _references_of_one_kept_in_a_list() -> int:
    """What sys.getrefcount says of an object that one list and one local name refer to; versions of Python differ."""
    kept = [object()]
    held = kept[0]
    return sys.getrefcount(held)


_ALONE = _references_of_one_kept_in_a_list()


class Autograd(Recorder):
    """Records the graph of each forward pass, and plays its backward pass.

    ``gradient`` is called with each finished weight gradient; a strategy puts its own function there.
    """

    def __init__(self) -> None:
        super().__init__()
        self.gradient: Callable[[Weight, Storage], None] = lambda weight, storage: None
        self.modules: Modules | None = None
        self.entries: list[Storage] | None = None
        """Where inputs of reentrant checkpoints stay with their gradients once they have run backward; None drops them."""
        self.drops_unread = False
        """A compiled checkpoint keeps only what its backward reads."""
        self.policy: Callable[[], Keeps] | None = None
        """What checkpoints keep; None keeps nothing but their input."""
        self.offloads = False
        """What is saved waits in host memory (memcalc/compute.py); the lists are what is on its way there and back."""
        self._leaving: deque[Storage] = deque(maxlen=STASHED)
        self._back: list[Storage] = []
        self._module: tuple[Node, list[Weight]] | None = None
        self._nodes: list[Node] = []
        self._pending: dict[str, list[Storage]] = {}
        self._uses: dict[str, int] = {}
        self._grad_enabled = True
        self._casts: dict[str, tuple[Storage, Node]] = {}
        """16-bit copies of weights in an autocast region; a recomputation is a region of its own."""
        self._region: Region | None = None
        self._again: list[list[Storage] | None] | None = None
        self._replay: Iterator[tuple[Node, int]] | None = None
        self._left = 0

    def output(self, name: str, shape: tuple[int, ...], dtype: str, node: Node, slot: int = 0) -> Tensor:
        """A new activation that ``node`` produces."""
        tensor = Tensor(self.allocate(name, shape, dtype, "activations"), shape, dtype, node, slot)
        if self._module is not None and self._module[0] is node:
            self._leave_module()
        return tensor

    def _leave_module(self) -> None:
        if self._module is not None and self.modules is not None:
            self.modules.leave(self._module[1], True)
        self._module = None

    def node(self, edges: list[Edge], backward: Backward, outputs: int = 1) -> Node:
        """A node for the operation about to run. Weight edges are counted, so that a shared weight's
        gradient is handed over once, when its last part has arrived."""
        if self.modules is not None and (weights := [edge for edge in edges if isinstance(edge, Weight)]):
            self._leave_module()
            self.modules.enter(weights, True)
        else:
            weights = []
        edges = [None if isinstance(edge, Weight) and not edge.trainable else edge for edge in edges]
        node = Node(edges, backward, outputs, live=any(edge is not None for edge in edges))
        if weights:
            self._module = node, weights
        if node.live and self._grad_enabled and self._replay is None:
            self._nodes.append(node)
            node.region = self._region
            for edge in edges:
                if isinstance(edge, Weight):
                    self._uses[edge.name] = self._uses.get(edge.name, 0) + 1
        return node

    def save(self, node: Node, *storages: Storage | None) -> None:
        """Keep storages for the backward of ``node`` (inside a checkpoint: only note that they are needed).

        None stands for a weight, which lives anyway; but a recomputation has to come as far as that.
        """
        if not (self._grad_enabled and node.live):
            return
        for storage in storages:
            if self._replay is not None:
                original, index = next(self._replay)
                original.saved[index] = storage
                self._left -= 1
                if not self._left:
                    raise _Stop
            elif self._region is not None:
                self._region.waiting.append((node, len(node.saved)))
                node.saved.append(None)
            else:
                node.saved.append(self._kept(storage))

    def _kept(self, storage: Storage | None) -> Storage | None:
        if storage is None or not self.offloads or self.moment != "forward":
            return storage
        self._leaving.append(storage)
        return self.parked(storage)

    def _fetch(self, node: Node) -> list[Storage]:
        """Bring back what the node saved; what the one before it had stays until this one has run."""
        self._leaving.clear()
        waiting = [isinstance(storage, Parked) for storage in node.saved]
        node.saved = [storage and self.fetched(storage) for storage in node.saved]
        return [storage for storage, parked in zip(node.saved, waiting, strict=True) if parked and storage]

    def hold(self, node: Node, storage: Storage) -> None:
        """Keep a storage as an attribute of the node, which a checkpoint does not see and so does not give back."""
        if self._grad_enabled and self._replay is None and node.live:
            node.held.append(storage)

    def take_graph(self) -> Graph:
        """What was recorded since the last time; the tape begins a new one."""
        found = Graph(self._nodes, self._uses)
        self._nodes, self._uses = [], {}
        return found

    def backward(self, loss: Tensor, shape: tuple[int, ...] = ()) -> None:
        """Run what was recorded backward from ``loss``, which is of ``shape``."""
        assert loss.node is not None
        grad = [self.allocate("gradient of the loss", shape, loss.dtype, "temporary", batched=False)]
        self.resume(self.take_graph(), loss.node, loss.slot, grad)

    def resume(self, graph: Graph, node: Node, slot: int, grads: list[Storage]) -> None:
        """Run a graph backward from an output of ``node``; its gradient is taken out of ``grads``, so that nobody else
        holds it. Every node is dropped once it has run."""
        node.grads[slot] = grads.pop()
        self._uses = graph.uses
        self._run(graph.nodes)
        self._uses = {}

    def _run(self, nodes: list[Node]) -> None:
        while nodes:
            node = nodes.pop()
            grads, node.grads = node.grads, []
            if all(grad is None for grad in grads):
                continue
            weights = [edge for edge in node.edges if isinstance(edge, Weight)] if self.modules else []
            if self.modules and weights:
                self.modules.enter(weights, False)
            if node.region is not None and not node.region.ready and node.saved:
                self._recompute(node.region)
            back = self._fetch(node) if self.offloads else []
            results = node.backward(node, grads)
            del grads
            self._back = back
            del back
            node.saved, node.held = [], []
            node.region = None
            edges = node.edges
            while edges:
                edge, result = edges.pop(0), results.pop(0)
                if isinstance(edge, Weight) and result is not None:
                    self._receive_weight(edge, result)
                elif isinstance(edge, tuple) and result is not None:
                    self._receive(edge[0].grads, edge[1], result)
                del result
            if self.modules and weights:
                self.modules.leave(weights, False)
        self._back = []

    def _recompute(self, region: Region) -> None:
        """Fill the saved tensors of a region's nodes; stops as soon as the last one is there."""
        self._replay, self._left = iter(region.waiting), len(region.waiting)
        if region.keeps is not None:
            region.kept.reverse()
            self._again = region.kept  # what is not taken again before the stop lives as long as the region
        kept, self._casts = self._casts, {}
        try:
            region.run()
        except _Stop:
            pass
        finally:
            self._replay, self._again, self._casts = None, None, kept
        region.ready, region.waiting = True, []

    def _receive(self, grads: list[Gradient], slot: int, grad: Storage) -> None:
        """Add a gradient to an input buffer: in place when nobody else holds the one that is there."""
        held = grads[slot]
        if held is None:
            grads[slot] = grad
        elif sys.getrefcount(held) > _ALONE or held.view:
            grads[slot] = self.copy_of(held, "sum of gradients", "temporary")

    def _receive_weight(self, weight: Weight, grad: Storage) -> None:
        parts = self._pending.setdefault(weight.name, [])
        self._uses[weight.name] -= 1
        if parts:
            # A shared weight: autograd adds its parts out of place, as traces of tied GPT-2 show.
            grad = self.copy_of(grad, f"{weight.name} gradient", "gradients")
            parts.clear()
        if self._uses[weight.name]:
            parts.append(grad)
            return
        del self._pending[weight.name], parts
        self.gradient(weight, grad)
