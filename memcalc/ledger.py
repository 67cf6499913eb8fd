"""Plan → timeline, from formulas: one steady-state training step on the fullest rank, without torch.

The step is the trainers' own (``trainers/loop.py``), played on the tape:

    start     the next micro batch is made while the last one is still there
    forward   the model, block by block, with checkpointing and sharding around each
    loss      cross-entropy; then the model's output is dropped
    backward  the graph in reverse
    step      the optimizer's temporaries; gradients are freed
"""

from __future__ import annotations

from functools import partial
from math import prod

from memcalc import ops
from memcalc.cross_entropy import loss_of
from memcalc.models import Block
from memcalc.parallel import Replicated, make, shard_units
from memcalc.plan import Plan
from memcalc.sharding import rows_per_rank
from memcalc.spec import Weight
from memcalc.tape import Tape, Tensor
from memcalc.timeline import Skeleton, Timeline

__all__ = ["CUDA_BLOCK", "ledger", "skeleton"]

# Allocations on CUDA are multiples of this (c10/cuda/CUDACachingAllocator.cpp, kMinBlockSize).
CUDA_BLOCK = 512

Batch = tuple[Tensor, Tensor]


def ledger(plan: Plan) -> Timeline:
    """The timeline of the plan's step.

    >>> from memcalc.models import MODELS
    >>> ledger(Plan(model=MODELS["gpt2"], tokens=128, micro_batch=1, precision="bf16")).peak().moment
    'step'
    """
    return skeleton(plan).at(plan.micro_batch)


def skeleton(plan: Plan) -> Skeleton:
    """The same with the micro batch left open."""
    step = _Step(plan)
    step.run()
    return step.tape.skeleton(CUDA_BLOCK if plan.device == "cuda" else 1)


class _Step:
    """One step in the making: the tape, the strategy's hooks and the model."""

    def __init__(self, plan: Plan) -> None:
        precision, weights = plan.precision_row, plan.family.weights(plan.model)
        self.plan = plan
        sharded = plan.strategy_row.gathers and not plan.gathers_unknown_layers
        if plan.gathers_unknown_layers:
            weights = [Weight(weight.name, rows_per_rank(weight.shape, plan.ranks), weight.group) for weight in weights]
        # fully_shard casts whole shards by policy; everyone else autocasts operation by operation.
        self.tape = Tape(
            weights,
            weight_dtype=precision.compute if sharded else precision.weights,
            compute_dtype=precision.compute,
            device=plan.device,
            fused_rms_norm=plan.fused_rms_norm,
        )
        every = max(plan.checkpoint_every, 1)
        self.units = shard_units(weights, every)
        self.hooks: Replicated = make(self.tape, plan, self.units)
        self.tape.gradient = self.hooks.gradient

    def run(self) -> None:
        tape, plan = self.tape, self.plan
        self.hooks.states()
        self.batch = self.make_batch()
        # First, middle and last micro batch differ; more of the middle ones only repeat themselves.
        rounds = min(plan.accumulation, 3)
        for index in range(rounds):
            self.hooks.sync = index == rounds - 1
            tape.moment = "start"
            self.batch = self.make_batch()
            self.micro_step(self.batch)
        tape.moment = "step"
        self.optimizer_step()
        self.hooks.zero_grad()

    def make_batch(self) -> Batch:
        """Inputs and targets of one micro batch."""
        plan, tape = self.plan, self.tape
        if plan.family.reads == "tokens":
            inputs, dtype, targets = (plan.family.sequences * plan.tokens,), "int64", (plan.tokens,)
        else:
            inputs, dtype, targets = (plan.model.features,), plan.precision_row.weights, (int(plan.model.classes > 0),)
        return (
            Tensor(tape.allocate("inputs", inputs, dtype, "inputs"), inputs, dtype, None),
            Tensor(tape.allocate("targets", targets, "int64", "inputs"), targets, "int64", None),
        )

    def micro_step(self, batch: Batch) -> None:
        tape, hooks = self.tape, self.hooks
        tape.moment = "forward"
        hooks.begin_forward()
        opaque = self.plan.family.opaque
        with tape.casts():
            output = self.forward(batch[0])
            hooks.end_forward()
            output = ops.boundary(tape, output, hooks.begin_backward)
            tape.moment = "loss"
            loss = output if opaque else loss_of(tape, self.plan, output, batch[1])
            kept = output.storage if self.plan.keep_logits else None
            del output
        tape.moment = "backward"
        tape.backward(loss, shape=(0,) if opaque else ())
        del kept
        hooks.end_backward()

    def forward(self, inputs: Tensor) -> Tensor:
        tape, plan = self.tape, self.plan
        if plan.strategy_row.gathers and plan.family.reads == "features":
            # MixedPrecisionPolicy.cast_forward_inputs; the others cast where the first product is.
            inputs = ops.cast(tape, inputs, plan.precision_row.compute, "inputs")
        x = plan.family.enter(tape, plan, inputs)
        blocks = plan.family.blocks(tape, plan)
        every = max(plan.checkpoint_every, 1)
        for first in range(0, len(blocks), every):
            x = plan.family.between(tape, plan, blocks[first][0], x)
            x = self.segment(blocks[first : first + every], x)
        return plan.family.leave(tape, plan, x)

    def segment(self, blocks: list[Block], x: Tensor) -> Tensor:
        """One sharding unit, which is also what one activation checkpoint spans."""
        tape, hooks, unit = self.tape, self.hooks, blocks[0][0]

        def run(x: Tensor) -> Tensor:
            for _, block in blocks:
                x = block(x)
            return x

        hooks.enter(unit)
        x = ops.boundary(tape, x, partial(hooks.leave_backward, unit))
        x = tape.checkpoint(run, x, reentrant=self.plan.reentrant) if self.plan.checkpoint_every else run(x)
        hooks.leave(unit)
        return ops.boundary(tape, x, partial(hooks.enter_backward, unit))

    def optimizer_step(self) -> None:
        plan = self.plan
        if plan.family.opaque and plan.optimizer_kind == "for-loop":
            return  # as large as the largest tensor, which is not known
        if plan.update.clip:
            self.clip()
        if not plan.update.in_backward:
            self.hooks.temporaries(self.hooks.step_shapes())

    def clip(self) -> None:
        """``clip_grad_norm_`` in its foreach form: a norm for each tensor, and their norm; gradients are scaled in place.

        On CUDA the kernel has partial sums for each stretch of 65536 elements of each tensor, as many for each as the
        largest has (aten/src/ATen/native/cuda/ForeachReduceOp.cu, kChunkSize).
        """
        shapes = self.hooks.step_shapes()
        stretches = max(-(-prod(shape) // 65536) for shape in shapes) if self.plan.device == "cuda" else 0
        held = [self.tape.allocate("partial norms", (len(shapes) * stretches,), "float32", "temporary", batched=False)]
        held += [self.tape.allocate("norm", (), "float32", "temporary", batched=False) for _ in shapes]
        held.append(self.tape.allocate("norms together", (len(shapes),), "float32", "temporary", batched=False))
