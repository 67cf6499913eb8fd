"""One steady-state training step of one stage, played on the tape; see ``memcalc/ledger.py``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

from memcalc import ops
from memcalc.adapted import adapting, prompting
from memcalc.batch import Batch, make_batch
from memcalc.checkpointing import matrix_products
from memcalc.cross_entropy import loss_of
from memcalc.graph import Tensor
from memcalc.models import Block
from memcalc.parallel import EMBEDDINGS, Replicated, build_whole, flattened, make, resume, shard_units
from memcalc.pipeline import Crossing, Flight, Links, whole_batch
from memcalc.plan import Plan
from memcalc.recorder import granularity
from memcalc.schedules import MIDDLE, passes, played, spared
from memcalc.sharding import rows_per_rank
from memcalc.spec import HEAD, Weight
from memcalc.stages import Stage, Stretch, stage_weights
from memcalc.tape import Tape
from memcalc.tensor_parallel import local
from memcalc.timeline import Skeleton
from memcalc.vocab_parallel import gather_logits

__all__ = ["Step"]

# SoftmaxBackward0 and LogSoftmaxBackward0 of torch/include/torch/csrc/autograd/generated/Functions.h, read in the wheels
# of 1.10.2, where they hold self_ and result_, and of 1.11.0, where they hold result_ (pytorch pull request 65242).
SOFTMAX_KEEPS_OUTPUT_ONLY_SINCE = (1, 11)


class Step:
    """One step of one stage in the making: the tape, the strategy's hooks and the model."""

    def __init__(self, plan: Plan, stage: Stage) -> None:
        self.plan, self.stage = plan, stage
        self.local = local(plan)
        """What the modules of one rank see: its part of the model, its part of each sequence."""
        weights = self.local.weights
        if plan.gathers_unknown_layers:
            weights = [Weight(each.name, rows_per_rank(each.shape, plan.shards), each.group) for each in weights]
        self.links = Links(plan, stage, self.crossing(weights))
        weights = stage_weights(weights, stage, plan.model.tied, module=self.links.engine.ties_modules)
        runs = [part.stop - part.start for part in stage.chunks] if stage.of > 1 else []
        self.units = shard_units(weights, max(plan.checkpoint_every, 1), runs, plan.fsdp.separate_root)
        self.tape = self.new_tape(
            flattened(self.units) if plan.strategy_row.flat_units or plan.fsdp.mixes(plan) else weights
        )
        self.adapt()
        self.hooks: Replicated = make(self.tape, plan, self.units)
        self.hooks.through_optimizer = stage.last
        self.tape.gradient = self.hooks.gradient

    def new_tape(self, weights: list[Weight]) -> Tape:
        precision, plan = self.plan.precision_row, self.plan
        sharded = plan.strategy_row.gathers and not plan.gathers_unknown_layers
        # fully_shard casts whole shards by policy; everyone else autocasts operation by operation.
        tape = Tape(
            weights,
            weight_dtype=precision.compute if sharded else precision.weights,
            compute_dtype=precision.compute,
            device=plan.device,
            rms_norm=plan.rms_norm,
            layout=plan.layout,
            reduces_in_place=plan.family.divides == "megatron",
        )
        tape.float8, tape.offloads = plan.compute.float8, plan.compute.offload_activations
        tape.keeps_softmax_input = plan.torch_version < SOFTMAX_KEEPS_OUTPUT_ONLY_SINCE
        return tape

    def adapt(self) -> None:
        """Adapters and what checkpoints keep, as the plan says."""
        tape, plan = self.tape, self.plan
        tape.adapt = adapting(plan.adapter)
        tape.prompt = prompting(plan.adapter, plan.model.heads)
        if plan.checkpointing.policy == "matrix-products":
            tape.policy, tape.drops_unread = matrix_products, plan.compute.compile
        if plan.checkpointing.policy == "core-attention":
            tape.core = tape.checkpoint

    def crossing(self, weights: list[Weight]) -> Crossing:
        """What goes into each block that another stage hands over. Blocks that read tokens all take the same; others are
        played up to it."""
        if self.stage.of == 1:
            return lambda block: ((0,), "float32")
        self.tape = self.new_tape(weights)
        x = self.plan.family.enter(self.tape, self.local, self.make_batch()[0])
        if self.plan.family.reads == "tokens":
            return lambda block: (x.shape, x.dtype)
        found = [(x.shape, x.dtype)]
        with self.tape.casts():
            for _, play_block in self.plan.family.blocks(self.tape, self.local):
                x = play_block(x)
                found.append((x.shape, x.dtype))
        return found.__getitem__

    def run(self) -> None:
        self.begin()
        self.passes()
        self.end()

    def begin(self) -> None:
        """What is there before the first forward pass."""
        tape, plan = self.tape, self.plan
        build_whole(tape, plan, self.hooks)
        self.hooks.states()
        self.standing = plan.family.standing(tape, self.local)
        resume(tape, plan, self.hooks)
        self.links.open(tape)
        self.batch = self.make_batch()
        if whole_batch(plan):
            tape.moment = "start"
            self.batch = self.make_batch()

    def passes(self, few: bool = False) -> None:
        """All forward and backward passes; with ``few`` one that waits in a pipeline may stand for others like it."""
        tape, plan, stage, layout = self.tape, self.plan, self.stage, self.plan.layout
        many = few and not self.links.remembers
        less = spared(layout.schedule, stage.index, stage.of, plan.accumulation, layout.chunks) if many else 0
        where = (layout.schedule, stage.index + less, stage.of)
        eager = plan.strategy_row.gathers and plan.fsdp.sync_every_micro_batch
        rounds = played(*where, plan.accumulation - less, layout.chunks, remembers=self.links.remembers)
        flights: dict[tuple[int, int], Flight] = {}
        for forward, micro_batch, chunk in passes(*where, rounds, layout.chunks):
            self.hooks.sync = micro_batch == rounds - 1 or eager
            since = tape.made
            if forward:
                flights[micro_batch, chunk] = self.forward_pass(stage.chunks[chunk])
            else:
                self.backward_pass(stage.chunks[chunk], flights.pop((micro_batch, chunk)))
            many = rounds < plan.accumulation and layout.schedule == "gpipe" and micro_batch == MIDDLE
            if many and (forward or self.links.holds_gradients):
                tape.repeat(since, plan.accumulation - rounds + 1)
            if less and forward and micro_batch == MIDDLE:
                tape.repeat(since, less + 1)
        self.hooks.finish()
        self.links.close()

    def climb(self) -> Iterator[None]:
        """Forward passes through the first layers of a stage, one after the other, all of which wait for their backward."""
        waiting: list[Flight] = []
        while True:
            self.hooks.sync = False
            waiting.append(self.forward_pass(self.stage.chunks[0]))
            yield

    def end(self) -> None:
        """The update."""
        self.tape.moment = "step"
        if self.plan.update.clip:
            self.hooks.clip()
        self.hooks.step()
        self.hooks.zero_grad()

    def skeleton(self) -> Skeleton:
        """What was recorded; nothing more can be, so that all of it goes with the step, without the collector of cycles."""
        self.tape.gradient = lambda weight, storage: None
        return self.tape.skeleton(granularity(self.plan.device))

    def make_batch(self) -> Batch:
        """Inputs and targets of one micro batch."""
        # One process takes the samples of all its GPUs, of which each replica sees its own.
        times = self.plan.ranks if self.plan.strategy_row.one_process else 1
        return make_batch(self.tape, self.local, times * (self.plan.accumulation if whole_batch(self.plan) else 1))

    def forward_pass(self, part: Stretch) -> Flight:
        tape, hooks, flight = self.tape, self.hooks, Flight()
        tape.moment = "start"
        if (part.first or part.last) and not whole_batch(self.plan):
            self.batch = self.make_batch()
        beside = self.plan.family.beside(tape, self.local) if part.first or part.last else []
        tape.moment = "forward"
        x = self.batch[0] if part.first else self.links.receive(part.start, flight.entry, flight.kept)
        hooks.begin_forward()
        with tape.casts():
            output = self.layers(part, x)
            del x
            hooks.end_forward()
            output = ops.boundary(tape, output, hooks.begin_backward)
            if part.last:
                tape.moment = "loss"
                if not self.plan.family.unplayed:
                    output = hooks.gather_outputs(output)
                if self.plan.loss.float32_output:
                    output = ops.cast(tape, output, "float32", "logits")
                self.links.keep_logits(output, flight.kept)
                loss = output if self.plan.family.unplayed else loss_of(tape, self.local, output, self.batch[1])
                if self.plan.loss.converted:
                    wide = tape.allocate("converted logits", output.shape, "float32", "temporary")
                    del wide
                if self.plan.keep_logits:
                    flight.kept.append(output.storage)
                del output
                tape.returned.clear()
                flight.output = loss
            else:
                flight.output = self.links.send(part.stop, output, flight.kept)
        flight.graph = tape.take_graph()
        del beside
        return flight

    def backward_pass(self, part: Stretch, flight: Flight) -> None:
        tape = self.tape
        tape.moment = "backward"
        node, slot = flight.output.node, flight.output.slot
        assert node is not None
        if part.last:
            shape = (0,) if self.plan.family.unplayed else ()
            grads = [tape.allocate("gradient of the loss", shape, flight.output.dtype, "temporary", batched=False)]
        else:
            grads = self.links.receive_gradient(part.stop, flight.kept)
        tape.resume(flight.graph, node, slot, grads)
        flight.kept.clear()
        self.hooks.end_backward()
        if not part.first:
            self.links.send_gradient(flight.entry)

    def layers(self, part: Stretch, x: Tensor) -> Tensor:
        tape, plan = self.tape, self.local
        if part.first:
            if self.plan.strategy_row.gathers and plan.family.reads != "tokens":
                # MixedPrecisionPolicy.cast_forward_inputs; the others cast where the first product is.
                x = ops.cast(tape, x, plan.precision_row.compute, "inputs")
            x = self.unit(EMBEDDINGS, partial(plan.family.enter, tape, plan), x)
            if plan.adapter.input_gradients and x.node is None:
                x = tape.leaf(x)
        blocks = plan.family.blocks(tape, plan)[part.start : part.stop]
        every = max(plan.checkpoint_every, 1)
        for first in range(0, len(blocks), every):
            x = plan.family.between(tape, plan, blocks[first][0], x)
            x = self.segment(blocks[first : first + every], x, self.checkpoints((part.start + first) // every))
        return gather_logits(tape, self.unit(HEAD, partial(plan.family.leave, tape, plan), x)) if part.last else x

    def checkpoints(self, index: int) -> bool:
        """The blocks of this index, counted by units, are checkpointed as a whole."""
        whole = self.plan.checkpoint_every > 0 and self.plan.checkpointing.policy != "core-attention"
        return whole and self.plan.checkpointing.covers(index)

    def segment(self, blocks: list[Block], x: Tensor, checkpointed: bool) -> Tensor:
        """One sharding unit, which is also what one activation checkpoint spans."""

        def run(x: Tensor) -> Tensor:
            for _, block in blocks:
                x = block(x)
            return x

        whole = partial(self.tape.checkpoint, run, reentrant=self.plan.reentrant)
        return self.unit(blocks[0][0], whole if checkpointed else run, x)

    def unit(self, unit: str, run: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """Layers with the strategy's work around them, where they are a sharding unit."""
        hooks = self.hooks
        if unit not in self.units:
            return run(x)
        hooks.enter(unit)
        if x.node is None:
            hooks.inputs_without_gradient[unit] = None
        x = run(ops.boundary(self.tape, x, partial(hooks.leave_backward, unit)))
        hooks.leave(unit)
        return ops.boundary(self.tape, x, partial(hooks.enter_backward, unit))
