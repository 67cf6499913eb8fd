"""A miniature of eager PyTorch in which tensors have sizes and no values.

A model family is written once more against this tape (see ``memcalc/models``), nearly line by line like
its torch module. Running it forward and backward leaves the exact sequence of allocations and frees:

- A ``Storage`` is freed when the last Python reference to it goes, as in torch. So a local variable, a
  tensor saved for backward and a gradient in flight live exactly as long here as there.
- Every operation leaves a ``Node`` that holds what autograd would save; ``backward`` walks the nodes in
  reverse order of creation, as the autograd engine does, and drops what they saved one by one.
- A checkpointed block saves nothing but its input and is run again when its first node is reached.

Sizes are kept as ``fixed + micro_batch * per_sample`` bytes, so that one run serves every micro batch.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial

from memcalc.layout import Layout
from memcalc.recorder import Parked, Recorder, Storage
from memcalc.spec import Weight

__all__ = ["Adapts", "Edge", "Gradient", "Graph", "Linear", "Modules", "Node", "Tape", "Tensor"]


# torchtune/training/_activation_offloading.py, max_fwd_stash_size: saved tensors that stay until they are copied.
STASHED = 5


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


Linear = Callable[[Tensor], Tensor]
Adapts = Callable[["Tape", Tensor, str, Linear], Tensor]
"""``(tape, input, name, the layer itself) -> output``: a module that an adapter wraps around a linear layer."""


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


class _Stop(Exception):
    """Raised inside a recomputation once everything the nodes had saved is there again."""


def _references_of_one_kept_in_a_list() -> int:
    """What sys.getrefcount says of an object that one list and one local name refer to; versions of Python differ."""
    kept = [object()]
    held = kept[0]
    return sys.getrefcount(held)


_ALONE = _references_of_one_kept_in_a_list()


class Tape(Recorder):
    """Records the allocations of one training step.

    ``gradient`` is called with each finished weight gradient; a strategy puts its own function there.
    """

    def __init__(
        self,
        weights: Iterable[Weight],
        *,
        weight_dtype: str,
        compute_dtype: str,
        device: str,
        rms_norm: str = "fused",
        layout: Layout = Layout(),  # noqa: B008 - frozen
        reduces_in_place: bool = False,
    ) -> None:
        super().__init__()
        self.weights = {weight.name: weight for weight in weights}
        self.weight_dtype, self.compute_dtype, self.device = weight_dtype, compute_dtype, device
        self.rms_norm = rms_norm
        self.layout = layout
        self.reduces_in_place = reduces_in_place
        """Collectives between ranks of tensor parallel work in place, as Megatron's do and torch's do not."""
        self.autocast = weight_dtype != compute_dtype
        self.shared: dict[str, dict[str, Tensor]] = {}
        """Tensors that blocks take besides the residual stream, by part of the model; a family fills and empties it."""
        self.offloads = False
        """What is saved waits in host memory (memcalc/compute.py); the lists are what is on its way there and back."""
        self._leaving: deque[Storage] = deque(maxlen=STASHED)
        self._back: list[Storage] = []
        self.float8 = "none"
        """How products inside blocks are cast to 8 bit (memcalc/compute.py)."""
        self.head: tuple[str, str] | None = None
        """Name of the head's product and of its weight, where the loss shall make it (memcalc/cross_entropy.py)."""
        self.chunks: list[Tensor] = []
        """Logits that go before the model's output, where the head is computed chunk by chunk."""
        self.gradient: Callable[[Weight, Storage], None] = lambda weight, storage: None
        self.modules: Modules | None = None
        self._module: tuple[Node, list[Weight]] | None = None
        self.adapt: Adapts | None = None
        """What stands in place of a linear layer; None where nothing does."""
        self._nodes: list[Node] = []
        self._pending: dict[str, list[Storage]] = {}
        self._uses: dict[str, int] = {}
        self._grad_enabled = True
        self._casts: dict[str, tuple[Storage, Node]] = {}
        self.policy: Callable[[], Keeps] | None = None
        """What checkpoints keep; None keeps nothing but their input."""
        self.drops_unread = False
        """A compiled checkpoint keeps only what its backward reads."""
        self._region: Region | None = None
        self._again: list[list[Storage] | None] | None = None
        self.prompt: Callable[[Tape, Tensor, Tensor, str], Tensor] | None = None
        """``(tape, queries, attention's output, name)``: what an adapter adds to attention; None where nothing is."""
        self.core: Callable[..., Tensor] | None = None
        """What runs attention in place of a plain call, where a checkpoint is put around it alone."""
        self._replay: Iterator[tuple[Node, int]] | None = None
        self._left = 0

    def dtype_of(self, weight: Weight) -> str:
        """The dtype a weight is stored in while the model runs."""
        return weight.dtype or self.weight_dtype

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

    # -- graph -------------------------------------------------------------------------------------

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

    # -- contexts ----------------------------------------------------------------------------------

    @contextmanager
    def casts(self) -> Iterator[None]:
        """An autocast region: 16-bit copies of weights are made once in it and forgotten at its end."""
        yield
        self._casts.clear()

    def cast_weight(self, weight: Weight) -> tuple[Storage, Node]:
        """The 16-bit copy of a weight, cached while the autocast region lasts, and the node its gradient goes to.

        The copy of a frozen weight is made anew at each use (aten/src/ATen/autocast_mode.cpp, ``cached_cast``).
        """
        if weight.name not in self._casts:
            dtype = self.dtype_of(weight)

            def backward(node: Node, grads: list[Gradient]) -> list[Gradient]:
                return [self.allocate(f"{weight.name} gradient", weight.shape, dtype, "gradients", batched=False)]

            copy = self.allocate(
                f"{weight.name} autocast copy", weight.shape, self.compute_dtype, "activations", batched=False
            )
            if not weight.trainable:
                return copy, self.node([weight], backward)
            self._casts[weight.name] = copy, self.node([weight], backward)
        return self._casts[weight.name]

    def leaf(self, x: Tensor) -> Tensor:
        """``x.requires_grad_()``: from here on gradients flow to ``x``, and no further."""
        node = Node([], lambda node, grads: [], 1)
        if self._grad_enabled and self._replay is None:
            self._nodes.append(node)
        return Tensor(x.storage, x.shape, x.dtype, node, batched=x.batched)

    def checkpoint(self, function: Callable[..., Tensor], *inputs: Tensor, reentrant: bool = False) -> Tensor:
        """Run ``function(*inputs)`` keeping only those, of which the reentrant form takes one; it runs again in backward."""
        return self._checkpoint_reentrant(function, *inputs) if reentrant else self._checkpoint(function, *inputs)

    def computed(self, operation: str, compute: Callable[[], list[Storage]]) -> list[Storage]:
        """Outputs of an operation whose outputs a selective checkpoint may keep, so that it is not run again."""
        if self._again is not None:
            kept = self._again.pop()
            return compute() if kept is None else kept
        outputs = compute()
        region = self._region
        if region is not None and region.keeps is not None:
            region.kept.append(outputs if region.keeps(operation) else None)
            region.saved_before.append(len(region.waiting))
        return outputs

    def _checkpoint(self, function: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        again: Callable[[], object] = partial(function, *inputs)
        if self.offloads:
            away = [(self._kept(x.storage) or x.storage, x) for x in inputs]
            kept = [Tensor(at, x.shape, x.dtype, x.node, x.slot, x.batched) for at, x in away]
            again = partial(self._run_again, function, kept)
            del kept, away
        self._region = Region(again, self.policy() if self.policy is not None else None)
        try:
            return function(*inputs)
        finally:
            if self.drops_unread:
                self._region.drop_unread()
            self._region = None

    def _run_again(self, function: Callable[..., Tensor], kept: list[Tensor]) -> object:
        back = [Tensor(self.fetched(x.storage), x.shape, x.dtype, x.node, x.slot, x.batched) for x in kept]
        return function(*back)

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

    def _checkpoint_reentrant(self, function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        shape, dtype = x.shape, x.dtype
        # Without an input that wants a gradient this form would train nothing, so that callers make it want one.
        parent = x.node if x.node is not None else self.leaf(x).node
        slot = x.slot if x.node is not None else 0

        def backward(node: Node, grads: list[Gradient]) -> list[Gradient]:
            entry = Node([], lambda node, grads: [], 1)
            outer, self._nodes = self._nodes, []
            kept, self._casts = self._casts, {}
            kept_input = node.saved[0]
            assert kept_input is not None
            y = function(Tensor(kept_input, shape, dtype, entry))
            del kept_input
            self._casts = kept
            assert y.node is not None
            y.node.grads[y.slot] = grads[0]
            inner, self._nodes = self._nodes, outer
            self._run(inner)
            return [entry.grads[0]]

        assert parent is not None
        node = self.node([(parent, slot)], backward)
        self.save(node, x.storage)
        self._grad_enabled = False
        y = function(x)
        self._grad_enabled = True
        return Tensor(y.storage, y.shape, y.dtype, node)
