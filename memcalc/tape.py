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

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial

from memcalc.autograd import Autograd
from memcalc.graph import Gradient, Node, Region, Tensor
from memcalc.layout import Layout
from memcalc.recorder import Storage
from memcalc.spec import Weight

__all__ = ["Adapts", "Linear", "Tape"]

Linear = Callable[[Tensor], Tensor]
Adapts = Callable[["Tape", Tensor, str, Linear], Tensor]
"""``(tape, input, name, the layer itself) -> output``: a module that an adapter wraps around a linear layer."""


class Tape(Autograd):
    """Records the allocations of one training step: the weights, how they are computed with, and checkpoints."""

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
        self.sensed: Tensor | None = None
        """What the micro batch has beside its tokens: images, frames of sound."""
        self.returned: list[object] = []
        """What the model returns beside its output; it lives until the loss is there."""
        self.keeps_softmax_input = False
        """Softmax and log-softmax save their input beside their output, as torch up to 1.10 did."""
        self.float8 = "none"
        """How products inside blocks are cast to 8 bit (memcalc/compute.py)."""
        self.head: tuple[str, str] | None = None
        """Name of the head's product and of its weight, where the loss shall make it (memcalc/cross_entropy.py)."""
        self.chunks: list[Tensor] = []
        """Logits that go before the model's output, where the head is computed chunk by chunk."""
        self.adapt: Adapts | None = None
        """What stands in place of a linear layer; None where nothing does."""
        self.prompt: Callable[[Tape, Tensor, Tensor, str], Tensor] | None = None
        """``(tape, queries, attention's output, name)``: what an adapter adds to attention; None where nothing is."""
        self.core: Callable[..., Tensor] | None = None
        """What runs attention in place of a plain call, where a checkpoint is put around it alone."""

    def dtype_of(self, weight: Weight) -> str:
        """The dtype a weight is stored in while the model runs."""
        return weight.dtype or self.weight_dtype

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

    @contextmanager
    def unread(self) -> Iterator[None]:
        """What is recorded here has no way to the loss, and lives as long as what the model returns."""
        outer, self._nodes = self._nodes, []
        uses = dict(self._uses)
        yield
        self.returned += self._nodes
        self._nodes, self._uses = outer, uses

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
            entered = kept_input if self.entries is not None else None
            del kept_input
            self._casts = kept
            assert y.node is not None
            y.node.grads[y.slot] = grads[0]
            inner, self._nodes = self._nodes, outer
            self._run(inner)
            if self.entries is not None:
                self.entries += [storage for storage in (entered, entry.grads[0]) if storage is not None]
            return [entry.grads[0]]

        assert parent is not None
        node = self.node([(parent, slot)], backward)
        self.save(node, x.storage)
        self._grad_enabled = False
        y = function(x)
        self._grad_enabled = True
        return Tensor(y.storage, y.shape, y.dtype, node)
