"""nn.DataParallel: one process, a replica a GPU; what the first GPU holds."""

from __future__ import annotations

from memcalc import ops
from memcalc.graph import Gradient, Node, Tensor
from memcalc.parallel.replicated import Replicated
from memcalc.recorder import Storage
from memcalc.spec import Weight

__all__ = ["DataParallel"]


class DataParallel(Replicated):
    """The first GPU's replica are the parameters themselves; outputs of all are put together on it for the loss.

    Source: torch/nn/parallel/data_parallel.py, _functions.py and comm.py. ``Gather`` concatenates outputs and hands
    back parts of the gradient; ``Broadcast.backward`` waits for all gradients of the replica, and makes their sums
    (``ReduceAddCoalesced``) beside them. Chunks of 10 MiB that are sent round are not counted.
    """

    def __init__(self, *args: object) -> None:
        super().__init__(*args)  # type: ignore[arg-type]
        self.replica: dict[str, Storage] = {}

    def gather_outputs(self, output: Tensor) -> Tensor:
        """The outputs of all replicas: as many times the elements of a sample."""
        if self.plan.ranks == 1:
            return output
        shape = (output.shape[0] * self.plan.ranks, *output.shape[1:])

        def backward(node: Node, grads: list[Gradient]) -> list[Gradient]:
            return list(grads)

        node = self.tape.node([ops.edge(output)], backward)
        return self.tape.output("gathered outputs", shape, output.dtype, node)

    def gradient(self, weight: Weight, grad: Storage) -> None:
        self.replica[weight.name] = grad

    def end_backward(self) -> None:
        for weight in self.trained:
            if self.plan.ranks == 1 and weight.name in self.replica:
                self.grads.setdefault(weight.name, self.replica[weight.name])
            elif weight.name in self.replica:
                self.grads.setdefault(weight.name, self.new_gradient(weight.name, weight.numel))
        self.replica.clear()
        super().end_backward()
