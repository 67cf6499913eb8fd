"""Layers divided over ranks (torch.distributed.pipelining), each part as it is, in DDP or in FSDP 2, its products divided or not.

torchrun --standalone --nproc-per-node 2 -m trainers PLAN.json OUT   # "layout": {"pipeline": 2}, "accumulation": 2
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B
from torch.distributed.tensor import DTensor

from memcalc.models.mlp import widths
from memcalc.plan import Plan
from memcalc.spec import Weight
from memcalc.stages import Stretch, stage_weights
from memcalc.stages import stage as stage_of
from trainers import optimizers
from trainers.backends import Prepared, composed_mesh, device_of, sharding_mesh
from trainers.backends.ddp import wrap
from trainers.backends.fsdp import shard
from trainers.backends.tensor_parallel import Parts, divide
from trainers.models import criterion, dtype_of, materialise, units
from trainers.models.stretch import Layers, cut

__all__ = ["prepare"]

_SCHEDULES: dict[str, Any] = {
    "gpipe": ScheduleGPipe, "1f1b": Schedule1F1B, "interleaved": ScheduleInterleaved1F1B,
}  # fmt: skip
# Where a schedule can be told so, it does not collect what the last stage says.
_QUIET = {"return_outputs": False} if "return_outputs" in inspect.signature(ScheduleGPipe.step).parameters else {}


def prepare(model: nn.Module, plan: Plan, mesh: DeviceMesh, seed: int) -> Prepared:
    """This rank's stretches of layers, and the schedule that runs them."""
    ranks = composed_mesh(mesh, plan)
    here = stage_of(plan, ranks["pipeline"].get_local_rank())
    layers: list[Layers] = []
    modules: list[nn.Module] = []
    weights: list[Weight] = []
    parts = Parts()
    for stretch in here.chunks:
        part, held = cut(model, plan, stretch)
        layers.append(Layers(part, stretch, plan, _autocast(plan, mesh.device_type)))
        modules.append(_spread(layers[-1], held, plan, mesh, seed, parts))
        weights += held
    whole = nn.ModuleList(modules)
    optimizer = optimizers.make(whole.parameters(), plan)
    runner = _Runner(plan, mesh, layers, modules)
    tied = [
        parameter
        for weight, parameter in zip(weights, whole.parameters(), strict=True)
        if plan.model.tied and weight.name == plan.weights[0].name and (here.first or here.last)
    ]
    names = [weight.name for weight in weights]
    pair = _first_and_last(plan) if plan.model.tied else None

    def run_step(inputs: Tensor, targets: Tensor, mark: Callable[[str], None]) -> Tensor:
        loss = runner.step(inputs, targets, mark)
        for parameter in tied:  # the head's and the embedding's part of one gradient
            assert parameter.grad is not None
            dist.all_reduce(_local(parameter.grad), group=pair)
        return loss

    def clip(limit: float) -> None:
        counted = [each for each in whole.parameters() if here.first or not any(each is copy for copy in tied)]
        squares = parts.norm(counted) ** 2
        dist.all_reduce(squares, group=ranks["pipeline"].get_group())
        torch.nn.utils.clip_grads_with_norm_(whole.parameters(), limit, squares.sqrt())

    return Prepared(
        model=whole,
        optimizer=optimizer,
        states=optimizer,
        casts_itself=True,
        weights=weights,
        run_step=run_step,
        loss=runner.loss,
        clip=clip,
        part_of=parts.part_of,
        whole=lambda name: _whole(name, dict(zip(names, whole.parameters(), strict=True)), parts, plan, ranks),
    )


def _whole(name: str, held: dict[str, Tensor], parts: Parts, plan: Plan, ranks: DeviceMesh) -> Tensor:
    """A weight in full, sent to the first rank by the stage of its pipeline that has it."""
    group = ranks["pipeline"].get_group()
    peers, me = dist.get_process_group_ranks(group), dist.get_rank(group)
    every = [stage_of(plan, index) for index in range(plan.layout.pipeline)]
    holder = next(each.index for each in every if name in {w.name for w in stage_weights(plan.weights, each, False)})
    shape = next(weight.shape for weight in plan.weights if weight.name == name)
    found = torch.empty(shape, dtype=dtype_of(plan.precision_row.weights), device=ranks.device_type)
    if holder == me:
        own = parts.part_of(held[name], held[name].detach())
        found = own.full_tensor() if isinstance(own, DTensor) else own
    if holder and peers[0] == 0:
        if me == holder:
            dist.send(found.contiguous(), 0, group=group)
        elif me == 0:
            dist.recv(found, peers[holder], group=group)
    return found


def _autocast(plan: Plan, kind: str) -> Callable[[], contextlib.AbstractContextManager[object]]:
    precision = plan.precision_row
    if not precision.autocast or plan.strategy_row.gathers:
        return contextlib.nullcontext
    return lambda: torch.autocast(kind, dtype_of(precision.compute))


def _spread(layers: Layers, weights: list[Weight], plan: Plan, mesh: DeviceMesh, seed: int, parts: Parts) -> nn.Module:
    """One stretch on this rank's device, by the plan's strategy."""
    ranks = composed_mesh(mesh, plan)
    if plan.layout.tensor > 1:
        divide(layers.model, plan, ranks["tensor"])
    if plan.strategy_row.gathers:
        shard(layers, units(layers.model, plan), plan, sharding_mesh(mesh, plan))
    materialise(layers, plan, device_of(mesh), seed, weights)
    if plan.strategy != "ddp":
        return layers
    parts.take(layers)
    return wrap(layers, plan, ranks["shard"])


def _first_and_last(plan: Plan) -> dist.ProcessGroup:
    """The group of this rank's pipeline that has both copies of a tied table. Every rank makes all of them."""
    stages, tensor = plan.layout.pipeline, plan.layout.tensor
    firsts = [first + part for first in range(0, plan.ranks, stages * tensor) for part in range(tensor)]
    group, _ = dist.new_subgroups_by_enumeration([[first, first + (stages - 1) * tensor] for first in firsts])
    return group


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class _Stage(PipelineStage):
    """A stage that says when a pass begins."""

    mark: Callable[[str], None]

    def forward_one_chunk(self, *args: Any, **options: Any) -> Any:
        """One micro batch."""
        self.mark("forward")
        return super().forward_one_chunk(*args, **options)

    def backward_one_chunk(self, *args: Any, **options: Any) -> Any:
        """One micro batch."""
        self.mark("backward")
        return super().backward_one_chunk(*args, **options)


class _Runner:
    """The schedule of one rank, and a plain forward pass beside it."""

    def __init__(self, plan: Plan, mesh: DeviceMesh, layers: list[Layers], modules: list[nn.Module]) -> None:
        self.plan, self.layers, self.modules, self.device = plan, layers, modules, device_of(mesh)
        self.group: dist.ProcessGroup = composed_mesh(mesh, plan)["pipeline"].get_group()
        self.criterion, self.mark = criterion(plan), lambda moment: None
        self.losses: list[Tensor] = []
        stages = [self.stage(part, module) for part, module in zip(layers, modules, strict=True)]
        self.stages = stages
        self.schedule = _SCHEDULES[plan.layout.schedule](
            stages if plan.layout.chunks > 1 else stages[0],
            plan.accumulation,
            loss_fn=self.share_of_loss,
            scale_grads=False,
        )

    @property
    def first(self) -> bool:
        return self.layers[0].stretch.first

    @property
    def last(self) -> bool:
        return self.layers[-1].stretch.last

    def index(self, stretch: Stretch) -> int:
        """The place of a stretch of this rank among all."""
        at = [each.stretch for each in self.layers].index(stretch)
        return at * self.plan.layout.pipeline + dist.get_rank(self.group)

    def stage(self, layers: Layers, module: nn.Module) -> _Stage:
        """A stretch as the schedule knows it; shapes are said, so that it does not run the model to learn them."""
        plan, stretch = self.plan, layers.stretch
        batch = (plan.micro_batch, plan.tokens) if plan.tokens else (plan.micro_batch,)

        def passed(block: int) -> Tensor:
            return torch.empty(
                *self.stream(block, plan.micro_batch), dtype=self.dtype, device="meta", requires_grad=True
            )

        inputs = torch.empty(batch, dtype=torch.int64, device="meta")
        if not plan.tokens:
            weights = dtype_of(plan.precision_row.weights)
            inputs = torch.empty(*batch, plan.model.features, dtype=weights, device="meta")
        wide = torch.float32 if plan.loss.float32_output else dtype_of(plan.precision_row.compute)
        says = plan.model.vocab if plan.tokens else plan.model.classes
        outputs = torch.empty(*batch, says, dtype=wide, device="meta", requires_grad=True)
        return _Stage(
            module, self.index(stretch), plan.layout.pipeline * plan.layout.chunks, self.device,
            input_args=inputs if stretch.first else passed(stretch.start),
            output_args=outputs if stretch.last else passed(stretch.stop),
            group=self.group,
        )  # fmt: skip

    def stream(self, block: int, samples: int) -> tuple[int, ...]:
        """Shape of what goes into a block from another stage."""
        layout = self.plan.layout
        if not self.plan.tokens:
            return samples, widths(self.plan.model)[block]
        return samples, self.plan.tokens // (layout.tensor if layout.sequence else 1), self.plan.model.hidden

    @property
    def dtype(self) -> torch.dtype:
        """FSDP casts what comes in; under autocast a residual stream stays as the embedding is, and a layer's output is as
        its product."""
        precision, plan = self.plan.precision_row, self.plan
        return dtype_of(precision.compute if plan.strategy_row.gathers or not plan.tokens else precision.weights)

    def share_of_loss(self, output: Tensor, targets: Tensor) -> Tensor:
        """A micro batch's part of the mean over all of them."""
        self.mark("loss")
        return self.criterion(output, targets) / self.plan.accumulation

    def step(self, inputs: Tensor, targets: Tensor, mark: Callable[[str], None]) -> Tensor:
        """All micro batches forward and backward."""
        self.mark = mark
        for each in self.stages:
            each.mark = mark
        losses: list[Tensor] = []
        given = {"target": targets, "losses": losses} if self.last else {}
        self.schedule.step(*([inputs] if self.first else []), **given, **_QUIET)
        return torch.stack([loss.detach() for loss in losses]).sum() if losses else torch.zeros((), device=self.device)

    def loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """The mean loss of one batch, known to all stages."""
        x, ranks, me = inputs, dist.get_process_group_ranks(self.group), dist.get_rank(self.group)
        for layers, module in zip(self.layers, self.modules, strict=True):
            if not layers.stretch.first:
                x = torch.empty(self.stream(layers.stretch.start, len(inputs)), dtype=self.dtype, device=self.device)
                dist.recv(x, ranks[me - 1], group=self.group)
            x = module(x)
            if not layers.stretch.last:
                dist.send(x.contiguous(), ranks[(me + 1) % len(ranks)], group=self.group)
        loss = self.criterion(x, targets).float() if self.last else torch.zeros((), device=self.device)
        dist.broadcast(loss, ranks[-1], group=self.group)
        return loss
