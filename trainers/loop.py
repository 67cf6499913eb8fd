"""The one training loop: the same steps for every model and strategy."""

from __future__ import annotations

import contextlib
import math
import platform
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

import memcalc
from memcalc.checkpoints import newest_checkpoint
from memcalc.errors import InputError
from memcalc.failure import Preempted
from memcalc.measurement import Measurement, RankMeasurement
from memcalc.plan import Plan
from memcalc.training import Training
from memcalc.units import format_bytes, things
from trainers import checkpoint
from trainers.adapters import add_adapters
from trainers.backends import Prepared, prepare
from trainers.batches import Source
from trainers.checkpointing import checkpoint_blocks, want_input_gradients
from trainers.evaluation import evaluate
from trainers.models import dtype_of
from trainers.models.module import call
from trainers.optimizers import scaler_options, set_coefficients
from trainers.parts import Moments, Parts
from trainers.preemption import Agreement
from trainers.process import Process, Signals
from trainers.weights import save_weights

__all__ = ["mask_seed", "train"]

_LOG_EVERY = 50  # steps between progress lines at most; each makes the loop wait for the device


def train(
    plan: Plan,
    settings: Training,
    process: Process,
    *,
    out: Path | None = None,
    say: Callable[[str], None] = lambda line: None,
    at: Moments | None = None,
    signals: Signals | None = None,
    parts: Parts | None = None,
) -> Measurement:
    """Run a plan on the ranks that joined, writing files when ``out`` is given. Raises MemcalcError.

    The measurement that comes back holds this rank's memory only.
    """
    if plan.processes != process.world:
        raise InputError(f"the plan is for {plan.processes} ranks, but {process.world} were started")
    at, parts = at or Moments(), parts or Parts()
    batches = parts.batches(plan, settings, process)
    resume = newest_checkpoint(out) if out is not None and settings.resume else None
    first = 0 if resume is None else resume[0]
    metered = min(first + settings.measure_steps, settings.steps)  # the step before which the meter is read
    if metered <= first or (resume is not None and out is not None and (out / "measured").exists()):
        metered = 0
    if metered:
        at.meter = parts.meter(process.device, metered - 1)
        at.outside()
    model = parts.build(plan)
    add_adapters(model, plan)
    if plan.layout.pipeline == 1:  # the stretches of a pipeline begin anew, so its backend does it
        checkpoint_blocks(model, plan)
    want_input_gradients(model, plan)
    prepared = prepare(model, plan, process.mesh, settings.seed, settings=settings)
    set_coefficients(prepared.optimizer, settings)
    del model
    run = _Run(
        plan=plan, settings=settings, process=process, parts=parts, batches=batches, prepared=prepared, out=out, say=say,
        at=at, metered=metered, signals=signals,
    )  # fmt: skip
    return run.run(resume[1] if resume else None)


def mask_seed(seed: int, step: int, rank: int) -> int:
    """A seed of 63 bits for the dropout of one rank in one step.

    >>> mask_seed(0, 1, 0) == mask_seed(0, 1, 0) != mask_seed(0, 0, 1)
    True
    """
    return int(np.random.SeedSequence((seed, step, rank)).generate_state(1, np.uint64)[0]) >> 1


class _Run:
    """``say`` is told a line for people; ``at`` is called with each moment of a step, and holds the meter until the steps
    before ``metered`` are done."""

    def __init__(
        self, *, plan: Plan, settings: Training, process: Process, parts: Parts, batches: Source, prepared: Prepared,
        out: Path | None, say: Callable[[str], None], at: Moments, metered: int, signals: Signals | None,
    ) -> None:  # fmt: skip
        self.plan, self.settings, self.process, self.batches, self.prepared = plan, settings, process, batches, prepared
        self.out, self.say, self.at, self.metered, self.signals = out, say, at, metered, signals
        self.criterion = parts.criterion(plan)
        precision, kind = plan.precision_row, process.device.type
        self.autocast: Callable[[], AbstractContextManager[object]] = contextlib.nullcontext
        if precision.autocast and not prepared.casts_itself:
            self.autocast = lambda: torch.autocast(kind, dtype_of(precision.compute))
        scaler = ShardedGradScaler if prepared.divides_silently else torch.amp.GradScaler
        scales = precision.loss_scaling and not prepared.scales_itself
        self.scaler = scaler(kind, enabled=scales, **(scaler_options(settings) if scales else {}))
        self.log_every = min(max(settings.steps // 20, 1), _LOG_EVERY)
        self.window = torch.zeros(self.log_every, device=process.device)
        self.losses: list[float | None] = []
        self.evaluation_loss: float | None = None
        self.measured: RankMeasurement | None = None
        self.first, self.samples, self.seconds = 0, 0, 0.0
        self.agreement: Agreement | None = None

    def run(self, resume: Path | None) -> Measurement:
        settings = self.settings
        if resume is not None:
            resumed = checkpoint.load(resume, self.prepared, self.plan)
            self.first, self.losses = resumed.step, list(resumed.losses)
            self.scaler.load_state_dict(resumed.scaler)
            self.say(f"resumed at step {self.first} from {resume}")
            if self.first >= settings.steps:
                self.say(f"already at step {self.first}; give more --steps to go on")
                return self.record("done")
        if self.batches.left_out:
            self.say(self.batches.left_out)
        self.prepared.model.train()
        filled, started = 0, time.perf_counter()
        for step in range(self.first, settings.steps):
            self.step(step, filled)
            filled += 1
            done, told = step + 1, self.told_to_stop()
            evaluates, saves = self.due(done, settings.eval_every), self.due(done, settings.checkpoint_every)
            # What interrupts the steps waits for the device in any case. With the window empty before it, no time
            # of its own counts as the steps', and a checkpoint holds all losses up to it.
            if filled == self.log_every or done == self.metered or evaluates or saves or told:
                self.log(done, filled, time.perf_counter() - started)
                if done == self.metered:
                    self.read_meter()
                if evaluates:
                    self.evaluate(done)
                if saves or told:
                    self.save(done, "preempted" if told else "running")
                if told and done < settings.steps:
                    raise Preempted(f"a checkpoint of step {done} was saved")
                filled, started = 0, time.perf_counter()
        if self.agreement is not None:
            self.agreement.close()
        return self.finish()

    def told_to_stop(self) -> bool:
        """Whether the ranks agree that one of them was told to: then they save and leave. Not while a step is metered,
        whose bytes are counted."""
        if self.signals is None or self.out is None or self.at.meter is not None:
            return False
        self.signals.saves = True
        self.agreement = self.agreement or Agreement()
        return self.agreement.after_step(self.signals.told)

    def due(self, done: int, every: int) -> bool:
        """At the end, and every so many steps unless that is 0."""
        return done == self.settings.steps or (every > 0 and done % every == 0)

    def step(self, step: int, slot: int) -> None:
        """One optimizer step. Nothing that lives on the device outlasts it but the batch and what was there before."""
        plan, prepared, at = self.plan, self.prepared, self.at
        self.batches.seek(step)
        if plan.dropout:
            # Dropout differs by step and rank, and a resumed run meets the same masks.
            torch.manual_seed(mask_seed(self.settings.seed, step, self.process.rank))
        if prepared.run_step is not None:
            at(step, "start")
            self.inputs, self.targets = self.batches.whole(step)
            self.window[slot].add_(prepared.run_step(self.inputs, self.targets, partial(at, step)))
        for micro in range(plan.accumulation if prepared.run_step is None else 0):
            at(step, "start")
            self.inputs, self.targets = self.batches.get(step, micro)
            last = micro == plan.accumulation - 1
            with contextlib.nullcontext() if last else prepared.accumulate():
                with self.autocast():
                    at(step, "forward")
                    output = call(prepared.model, self.inputs)
                    at(step, "loss")
                    if plan.loss.float32_output:
                        output = output.float()
                    loss = self.criterion(output, self.targets)
                    if not plan.keep_logits:
                        del output
                at(step, "backward")
                scaled = loss / plan.accumulation if plan.accumulation > 1 else loss
                prepared.backward(self.scaler.scale(scaled))
                self.window[slot].add_(scaled.detach())
                del loss, scaled
                if plan.keep_logits:
                    del output
        at(step, "step")
        if self.at.meter is not None and step == self.metered - 1:
            self.at.meter.states(prepared)
        self.update(step)
        at.outside()

    def update(self, step: int) -> None:
        """Clip, step along the gradients, and drop them."""
        optimizer, rate = self.prepared.optimizer, self.settings.rate_at(step)
        for group in optimizer.param_groups:
            group["lr"] = rate
        if self.settings.clip:
            self.scaler.unscale_(optimizer)
            clip = self.prepared.clip or partial(torch.nn.utils.clip_grad_norm_, self.prepared.model.parameters())
            clip(self.settings.clip)
        self.scaler.step(optimizer)
        self.scaler.update()
        optimizer.zero_grad(set_to_none=self.plan.set_to_none)

    def evaluate(self, done: int) -> None:
        """The mean loss over what was held out, if anything was."""
        if held := len(self.batches.held_out):
            loss = evaluate(self.prepared, self.batches, self.criterion, self.autocast, self.plan, self.process)
            self.evaluation_loss = loss
            self.say(f"step {done}/{self.settings.steps}  evaluation loss {loss:.4f} over {things(held, 'sample')}")

    def log(self, done: int, filled: int, seconds: float) -> None:
        """Losses since the last time, averaged over ranks; the only place where the loop waits for the device."""
        dist.all_reduce(self.window)
        # Of a pipeline one rank has the loss.
        losses = (self.window[:filled] / (self.process.world // self.plan.layout.pipeline)).tolist()
        self.window.zero_()
        self.losses += [loss if math.isfinite(loss) else None for loss in losses]
        samples = filled * self.plan.global_batch
        if done > self.metered:
            self.samples, self.seconds = self.samples + samples, self.seconds + seconds
        unit, each = ("tokens", self.plan.tokens) if self.plan.tokens else ("samples", 1)
        speed = f"{samples * each / max(seconds, 1e-9):,.0f} {unit}/s"
        peak = self.peak()
        memory = f"  peak {format_bytes(peak)} allocated" if peak is not None else ""
        self.say(f"step {done}/{self.settings.steps}  loss {losses[-1]:.4f}  {speed}{memory}")

    def peak(self) -> int | None:
        """Allocated peak so far: counted on CUDA, on the CPU known from the metered steps."""
        peak = 0 if self.measured is None else self.measured.allocated_peak
        on_cuda = self.process.device.type == "cuda"
        return (max(peak, torch.cuda.max_memory_allocated(self.process.device)) if on_cuda else peak) or None

    def read_meter(self) -> None:
        """The metered steps are over: read the instrument and put it away."""
        assert self.at.meter is not None
        self.measured = replace(self.at.meter.finish(self.prepared, self.process.rank), steps=self.metered - self.first)
        self.at.meter = None
        if self.out is not None:
            folder = self.out / "measured"
            folder.mkdir(parents=True, exist_ok=True)
            self.measured.save(folder / f"rank-{self.process.rank}.json")
            self.write(self.record("running"))

    def save(self, done: int, status: str) -> None:
        """A checkpoint from which the run can go on."""
        if self.out is not None:
            progress = checkpoint.Resumed(step=done, losses=self.losses, scaler=self.scaler.state_dict())
            kept = self.settings.keep_checkpoints
            checkpoint.save(self.out / "checkpoints", self.prepared, self.plan, self.process, progress, kept=kept)
            self.write(self.record(status))

    def finish(self) -> Measurement:
        """The final weights and the record of the run."""
        if self.out is not None:
            whole = partial(checkpoint.whole, self.prepared, self.plan)
            path = self.out / "weights" / "model.safetensors"
            save_weights(path, checkpoint.shapes(self.plan), whole, first=self.process.first)
        return self.write(self.record("done"))

    def record(self, status: str) -> Measurement:
        """What is known about the run so far."""
        device = self.process.device
        rate = self.samples / self.seconds if self.seconds else None
        return Measurement(
            plan=self.plan,
            status=status,
            device=torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
            versions={"memcalc": memcalc.__version__, "python": platform.python_version(), "torch": torch.__version__},
            losses=self.losses,
            evaluation_loss=self.evaluation_loss,
            samples_per_second=rate,
            tokens_per_second=rate * self.plan.tokens if rate is not None and self.plan.tokens else None,
            ranks=() if self.measured is None else (self.measured,),
        )

    def write(self, record: Measurement) -> Measurement:
        """Rank 0 leaves the record in the run's folder."""
        if self.out is not None and self.process.first:
            record.save(self.out / "run.json")
        return record
