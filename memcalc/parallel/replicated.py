"""One rank's own work, with nothing divided: the hooks every strategy starts from."""

from __future__ import annotations

from math import prod

from memcalc.graph import Tensor
from memcalc.host import host_tensors
from memcalc.optimizers.row import fullest
from memcalc.plan import Plan
from memcalc.precision import DTYPE_BYTES
from memcalc.quantised import QUANTISED, stored
from memcalc.recorder import Storage
from memcalc.spec import Weight
from memcalc.tape import Tape

__all__ = ["EMBEDDINGS", "ROOT_UNIT", "Replicated", "in_order"]

ROOT_UNIT, EMBEDDINGS = "root", "embeddings"


def in_order(plan: Plan, weights: list[Weight]) -> list[Weight]:
    """Weights as the model lists them (``model.parameters()``), in which order optimizers make their states and DeepSpeed its
    flat buffers; units come root first."""
    place = {weight.name: index for index, weight in enumerate(plan.weights)}
    return sorted(weights, key=lambda weight: place.get(weight.name, len(place)))


class Replicated:
    """Every rank holds everything: one rank, and the base of the others."""

    def __init__(self, tape: Tape, plan: Plan, units: dict[str, list[Weight]]) -> None:
        self.tape, self.plan, self.units = tape, plan, units
        self.dtype = plan.precision_row.weights
        """dtype of what lives between steps."""
        self.weights = in_order(plan, [weight for unit in units.values() for weight in unit])
        self.trained = [weight for weight in self.weights if weight.trainable]
        self.trained_dtype = next((weight.dtype for weight in self.trained if weight.dtype), self.dtype)
        """dtype of trained weights, their gradients and states: an adapter may have its own."""
        self.held: list[Storage] = []
        self.grads: dict[str, Storage] = {}
        self.away = plan.strategy_row.gathers and plan.offload.on and plan.device == "cuda"
        """FSDP keeps shards, their gradients and states on the host, and updates them there. On the CPU that is the device,
        and nothing is moved."""
        self.whole: dict[str, Storage] = {}
        """Parameters that were built in full, until this rank's part of each is taken."""
        self.sync = True
        """False while gradients are only accumulated (no_sync)."""
        self.through_optimizer = True
        """False where the pipeline's engine calls autograd itself and not ``optimizer.backward`` (DeepSpeed)."""
        self.inputs_without_gradient: dict[str, None] = {}
        """Units whose input wants none, so that ``leave_backward`` is not called for them."""

    # -- what lives between steps ------------------------------------------------------------------

    def states(self) -> None:
        """Parameters, optimizer states and whatever else lives between steps."""
        if not self.away:
            self.parameters()
        self.whole.clear()  # what goes to the host, or into a flat parameter, is not taken one by one
        self.tape.moment = "start"
        if not self.away:
            self.optimizer_states()
        if self.plan.device == "cpu" and self.plan.strategy_row.zero_stage:
            for tensor in host_tensors(self.plan):
                if not tensor.apart:
                    self.hold(tensor.name, (tensor.size,), "optimizer", "uint8")
            for _ in range(self.updates_on_host()):  # torch's Adam keeps one for each tensor that it updates
                self.hold("step counter", (1,), "optimizer", "float32")
        if self.plan.update.ema != "none":  # torch/optim/swa_utils.py, AveragedModel: a deep copy
            dtype = self.dtype if self.plan.update.ema == "weights" else "float32"
            for weight in self.weights:
                self.hold(f"{weight.name} average", self.local_shape(weight), "optimizer", dtype)
        here = {weight.name.rpartition(".")[0] for weight in self.weights}
        for name, shape, dtype in self.plan.family.buffers(self.plan):
            if self.plan.layout.pipeline == 1 or name.rpartition(".")[0] in here:
                self.hold(name, shape, "buffers", dtype)
        for name, size in workspaces(self.plan):
            self.hold(name, (size,), "workspaces", "uint8")
        if not self.plan.set_to_none and not self.away:
            self.keep_gradients()

    def parameters(self) -> None:
        for weight in self.weights:
            self.parameter(weight)
            self.whole.pop(weight.name, None)

    def parameter(self, weight: Weight) -> None:
        """This rank's part of one weight."""
        if weight.dtype in QUANTISED:
            for part, size in stored(weight.dtype, weight.shape):
                self.hold(f"{weight.name} {part}", (size,), "parameters", "uint8")
        else:
            self.hold(weight.name, self.local_shape(weight), "parameters", weight.dtype)

    def optimizer_states(self) -> None:
        for weight in self.updated():
            self.hold_states(Weight(weight.name, self.local_shape(weight), weight.group), self.trained_dtype)

    def hold_states(self, weight: Weight, dtype: str) -> None:
        """What the optimizer keeps for a tensor of ``dtype`` that this rank updates."""
        row = self.plan.optimizer_row
        for size in row.state_bytes(weight, dtype):
            self.hold(f"{weight.name} state", (size,), "optimizer", "uint8")
        # The counter is a CPU scalar unless the step is fused (torch/optim/adam.py, _init_group).
        if not self.plan.family.opaque and (self.plan.device == "cpu" or self.plan.optimizer_kind == "fused"):
            for _ in range(row.part(weight).counters):
                self.hold(f"{weight.name} step counter", (1,), "optimizer", "float32")

    def hold(self, name: str, shape: tuple[int, ...], category: str, dtype: str | None = None) -> None:
        storage = self.tape.allocate(name, shape, dtype or self.dtype, category, batched=False)
        self.held.append(storage)

    def local_shape(self, weight: Weight) -> tuple[int, ...]:
        """Shape of this rank's part of a weight."""
        return weight.shape

    def updated(self) -> list[Weight]:
        """Weights whose update this rank computes."""
        return self.trained

    def updates_on_host(self) -> int:
        """Tensors that are updated where they were offloaded to."""
        return int(self.plan.offload.optimizer != "none")

    def keep_gradients(self) -> None:
        """Gradients that are zeroed and not freed after a step."""
        for weight in self.trained:
            self.grads[weight.name] = self.new_gradient(weight.name, weight.numel)

    def new_gradient(self, name: str, numel: int) -> Storage:
        return self.tape.allocate(f"{name} gradient", (numel,), self.trained_dtype, "gradients", batched=False)

    # -- hooks -------------------------------------------------------------------------------------

    def begin_forward(self) -> None:
        """Before the model's forward pass."""

    def end_forward(self) -> None:
        """After the model's forward pass."""

    def gather_outputs(self, output: Tensor) -> Tensor:
        """What the loss is taken of."""
        return output

    def begin_backward(self) -> None:
        """When the gradient of the model's output arrives."""

    def enter(self, unit: str) -> None:
        """Before a block's forward pass."""

    def leave(self, unit: str) -> None:
        """After a block's forward pass."""

    def enter_backward(self, unit: str) -> None:
        """When the gradient of a block's output arrives."""

    def leave_backward(self, unit: str) -> None:
        """When a block's backward is done."""

    def gradient(self, weight: Weight, grad: Storage) -> None:
        """A finished gradient: kept, or added in place to the one that is there."""
        self.grads.setdefault(weight.name, grad)
        del grad
        self.step_in_backward(weight.name, [self.local_shape(weight)])

    def step_in_backward(self, name: str, shapes: list[tuple[int, ...]]) -> None:
        """Update weights whose gradient, of that name, has just been finished, one by one, and free it."""
        plan = self.plan
        if not plan.update.in_backward:
            return
        for shape in shapes:
            self.temporaries([shape], self.trained_dtype)
        self.grads.pop(name, None)

    def end_backward(self) -> None:
        """When backward is done."""

    def finish(self) -> None:
        """After the backward passes of all micro batches."""

    def step(self) -> None:
        """The optimizer's update."""
        if self.away or self.plan.update.in_backward:
            return  # on the host; or taken already
        if self.plan.family.opaque and self.plan.optimizer_kind == "for-loop":
            return  # as large as the largest tensor, which is not known
        self.temporaries(self.step_shapes(), self.trained_dtype)

    def temporaries(self, shapes: list[tuple[int, ...]], dtype: str) -> None:
        """What the update of tensors of ``dtype`` allocates, alive together at its fullest point."""
        plan, row, itemsize = self.plan, self.plan.optimizer_row, DTYPE_BYTES[dtype]
        held = row.temporaries(shapes, itemsize, plan.optimizer_kind, plan.torch_version, plan.update.l2)
        if row.rest is not None:  # two optimizers, one after the other
            local = [(row.part(weight), self.local_shape(weight)) for weight in self.updated()]
            held = fullest([
                part.temporaries([s for p, s in local if p is part], itemsize, part.kinds[0], plan.torch_version)
                for part in (row, row.rest)
            ])  # fmt: skip
        _ = [self.tape.allocate(name, (size,), "uint8", "temporary", batched=False) for name, size in held]

    def clip(self) -> None:
        """``clip_grad_norm_`` in its foreach form: a norm for each tensor, and their norm; gradients are scaled in place.

        On CUDA the kernel has partial sums for each stretch of 65536 elements of each tensor, as many for each as the
        largest has (aten/src/ATen/native/cuda/ForeachReduceOp.cu, kChunkSize).
        """
        shapes = self.step_shapes()
        stretches = max(-(-prod(shape) // 65536) for shape in shapes) if self.plan.device == "cuda" else 0
        held = [self.tape.allocate("partial norms", (len(shapes) * stretches,), "float32", "temporary", batched=False)]
        held += [self.tape.allocate("norm", (), "float32", "temporary", batched=False) for _ in shapes]
        held.append(self.tape.allocate("norms together", (len(shapes),), "float32", "temporary", batched=False))

    def zero_grad(self) -> None:
        """After the step."""
        if self.plan.set_to_none:
            self.grads.clear()

    def step_shapes(self) -> list[tuple[int, ...]]:
        """Shapes of the tensors the optimizer updates on this rank."""
        return [self.local_shape(weight) for weight in self.updated()]


# cuBLAS workspace of one handle, taken from the caching allocator at the first matrix product and kept: 32 MiB from
# compute capability 9.0 on, 8.125 MiB before (aten/src/ATen/cuda/CublasHandlePool.cpp, _parseChosenWorkspaceSize).
# Forward and backward run on threads of their own, each with its own handle. From 2.15 on nothing is kept.
WORKSPACE_BEFORE_HOPPER, WORKSPACE_SINCE_HOPPER = 8_519_680, 33_554_432
WORKSPACE_UNTIL = (2, 15)


def workspaces(plan: Plan) -> list[tuple[str, int]]:
    """cuBLAS workspaces kept by one rank, when the card is known and the model has matrix products."""
    gpu = plan.gpu_row
    if plan.device != "cuda" or gpu is None or gpu.capability is None or plan.family.opaque:
        return []
    if plan.torch_version >= WORKSPACE_UNTIL:
        return []
    size = WORKSPACE_SINCE_HOPPER if gpu.capability >= (9, 0) else WORKSPACE_BEFORE_HOPPER
    return [(f"cuBLAS workspace, {thread} thread", size) for thread in ("forward", "backward")]
