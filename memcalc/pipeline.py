"""What one stage of a pipeline allocates to talk to its neighbours."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from memcalc.engines import ENGINES
from memcalc.graph import Graph, Node, Tensor
from memcalc.plan import Plan
from memcalc.recorder import Storage
from memcalc.stages import Stage
from memcalc.tape import Tape

__all__ = ["Crossing", "Flight", "Links", "whole_batch"]

Crossing = Callable[[int], tuple[tuple[int, ...], str]]
"""Shape and dtype of what goes into a block, by its index."""


def whole_batch(plan: Plan) -> bool:
    """All micro batches of a step come together."""
    return plan.layout.pipeline > 1 and ENGINES[plan.strategy_row.engine].whole_batch


class Flight:
    """A micro batch between its forward and its backward pass through some layers: the graph and what is kept for it."""

    __slots__ = ("entry", "graph", "kept", "output")

    graph: Graph
    output: Tensor

    def __init__(self) -> None:
        self.kept: list[Storage] = []
        self.entry = Node([], lambda node, grads: [], 1)
        """Where the gradient of what was received arrives."""


class Links:
    """The tensors that come from and go to the stages before and after."""

    def __init__(self, plan: Plan, stage: Stage, crossing: Crossing) -> None:
        self.plan, self.stage = plan, stage
        self.engine = ENGINES[plan.strategy_row.engine]
        self.crossing = crossing
        self.parts = plan.layout.tensor if self.engine.partitions else 1
        self.divided = self.parts > 1
        self.inbox: dict[int, Storage] = {}
        """Buffers that activations are received into, by the block that takes them."""
        self.gradients: dict[int, Storage] = {}
        self.logits: deque[Storage] = deque(maxlen=max(self.engine.keeps_logits, 1))
        self.lingering: dict[str, Storage] = {}
        self.held: list[Storage] = []
        """What torch's schedules hold on to until the step's last backward pass."""
        self.sent = 0

    def open(self, tape: Tape) -> None:
        """Buffers that stay from step to step."""
        self.tape = tape
        if self.engine.buffers == "each":
            return
        many = self.plan.accumulation if self.engine.buffers == "all" else 1
        chunks = self.stage.chunks
        self.inbox = {c.start: self._buffer("received activations", c.start, many) for c in chunks if not c.first}
        self.gradients = {c.stop: self._buffer("received gradient", c.stop, many) for c in chunks if not c.last}

    def _buffer(self, name: str, block: int, many: int) -> Storage:
        since = self.tape.made
        found = self._make(name, block, divided=True)
        self.tape.repeat(since, many)
        return found

    def close(self) -> None:
        """At the end of all passes."""
        self.lingering.clear()
        self.held.clear()

    def receive(self, block: int, entry: Node, kept: list[Storage]) -> Tensor:
        """The activations that a block takes, from the stage before; their gradient goes to ``entry``."""
        x = self.inbox.get(block)
        if self.divided:
            flat = self._make("gathered activations", block)
            x = self._make("input of the stage", block)
            del flat
        elif self.engine.copies_input:
            kept.append(self._make("received activations, copied", block))
            x = self._make("input of the stage", block)
        elif x is None:
            x = self._make("input of the stage", block)
        if not self.engine.copies_input or self.divided:
            kept.append(x)
        self._forget()
        return Tensor(x, *self.crossing(block), entry)

    def send(self, block: int, output: Tensor, kept: list[Storage]) -> Tensor:
        """A stage's output, which ``block`` takes, after its forward pass: what is left of it."""
        if self.divided:
            kept.append(self._make("output of the stage, divided", block, divided=True))
        elif self.engine.keeps_output:
            kept.append(output.storage)
            self._hold_output(output.storage)
        stub = self.tape.allocate("output that was sent", (1,), output.dtype, "activations", batched=False)
        return Tensor(stub, output.shape, output.dtype, output.node, output.slot)

    @property
    def remembers(self) -> bool:
        """The output of a micro batch of the warm-up stays longer than itself."""
        return self.engine.works and self.plan.device == "cpu"

    def _hold_output(self, output: Storage) -> None:
        """torch/distributed/pipelining/schedules.py: the variables of _step_microbatches that outlive a forward pass.

        A Work of gloo has its tensor as long as it lives (torch/csrc/distributed/c10d/ProcessGroupGloo.hpp, SendWork), one
        of NCCL until it was waited for (ProcessGroupNCCL.cpp, WorkNCCL::synchronize unstashes it).
        """
        if not self.engine.works:
            return
        schedule, gloo = self.plan.layout.schedule, self.plan.device == "cpu"
        if schedule == "interleaved":  # send_ops are waited for when all is done
            self.held.append(output)
            return
        self.lingering["output that was made last"] = output
        warm_up = min(self.plan.accumulation, self.stage.of - self.stage.index)
        # GPipe's fwd_sends_to_wait has all; 1F1B's send_work the last but one of the warm-up.
        if gloo and (schedule == "gpipe" or self.sent == warm_up - 2):
            self.held.append(output)
        self.sent += 1

    def keep_logits(self, output: Tensor, kept: list[Storage]) -> None:
        """The last stage's outputs, which some engines hold on to."""
        if self.engine.works and self.stage.of > 1:
            kept.append(output.storage)
            if self.plan.layout.schedule != "interleaved":
                self.lingering["output that was made last"] = output.storage
        if self.engine.keeps_logits and (self.stage.of > 1 or self.plan.deepspeed.pipeline_engine):
            self.logits.append(output.storage)

    def receive_gradient(self, block: int, kept: list[Storage]) -> list[Storage]:
        """The gradient of a stage's output, from the stage after, which begins with ``block``."""
        if self.divided:
            # The output is put together again as well, each out of a flat copy.
            for name in ("output of the stage", "gradient of the output"):
                flat = self._make(f"{name}, gathered", block)
                kept.append(self._make(name, block))
                del flat
            return [kept[-1]]
        grad = self.gradients.get(block) or self._make("gradient of the output", block)
        kept.append(grad)
        if self.engine.lingers:
            self.lingering["output"] = grad
        return [grad]

    def send_gradient(self, entry: Node) -> None:
        """The gradient of a stage's input; it is held until it has been sent."""
        grad = entry.grads[0]
        if grad is not None and self.holds_gradients:
            self.held.append(grad)
        elif grad is not None:
            self.lingering["input"] = grad

    @property
    def holds_gradients(self) -> bool:
        """bwd_sends_to_wait and send_ops have each gradient that was sent; 1F1B's bwd_sends the last one."""
        return self.engine.works and self.plan.layout.schedule != "1f1b"

    def _forget(self) -> None:
        """What was sent is gone once the next tensor has been received."""
        if not self.engine.lingers and not self.engine.works:
            self.lingering.clear()

    def _make(self, name: str, block: int, *, divided: bool = False) -> Storage:
        """Memory for what goes into a block, or for one rank's share where engines divide it."""
        (first, *others), dtype = self.crossing(block)
        parts = self.parts if divided else 1
        return self.tape.allocate(name, (-(-first // parts), *others), dtype, "communication")
