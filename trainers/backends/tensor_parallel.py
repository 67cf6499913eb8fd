"""Products divided over ranks by their columns and rows (torch.distributed.tensor.parallel), for Llama.

torchrun --standalone --nproc-per-node 2 -m trainers PLAN.json OUT   # "layout": {"tensor": 2}
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_module
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.utils import clip_grads_with_norm_, parametrize

from memcalc.plan import Plan
from trainers import optimizers
from trainers.backends import Prepared, composed_mesh, device_of
from trainers.backends.ddp import accumulation, wrap
from trainers.models import materialise
from trainers.models.llama import Block

__all__ = ["Parts", "divide", "prepare"]


def divide(model: nn.Module, plan: Plan, mesh: DeviceMesh) -> None:
    """Divide every product of a Llama over a mesh, as torchtitan does (torchtitan/models/llama3/parallelize.py)."""
    stream = Shard(1) if plan.layout.sequence else Replicate()
    top: dict[str, ParallelStyle] = {
        "embed_tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=stream),
        "norm": _norm(plan),
        "lm_head": ColwiseParallel(input_layouts=stream, output_layouts=Replicate()),
    }
    # A stage of a pipeline has some of them.
    parallelize_module(model, mesh, {name: style for name, style in top.items() if getattr(model, name) is not None})
    for module in list(model.modules()):  # checkpoints wrap blocks, so their names differ
        if isinstance(module, Block):
            parallelize_module(module, mesh, _block(plan, stream))


def _block(plan: Plan, stream: Placement) -> dict[str, ParallelStyle]:
    styles: dict[str, ParallelStyle] = {}
    for part, others in (("self_attn", 2), ("mlp", 0)):
        styles[part] = PrepareModuleInput(
            input_layouts=(stream, *[None] * others),
            desired_input_layouts=(Replicate(), *[None] * others),
        )
    for part in ("input_layernorm", "post_attention_layernorm"):
        styles[part] = _norm(plan)
    for part in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj"):
        styles[part] = ColwiseParallel()
    for part in ("self_attn.o_proj", "mlp.down_proj"):
        styles[part] = RowwiseParallel(output_layouts=stream)
    return styles


def _norm(plan: Plan) -> ParallelStyle:
    """Norms see this rank's share of the tokens, or all of them."""
    return SequenceParallel(sequence_dim=1) if plan.layout.sequence else _Whole()


class _Whole(ParallelStyle):
    """Weights are whole on every rank, as tensors of the mesh so that an optimizer can take all weights together."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def enter(module: nn.Module, inputs: tuple[Tensor, ...], mesh: DeviceMesh) -> DTensor:
            return DTensor.from_local(inputs[0], mesh, (Replicate(),), run_check=False)

        def leave(module: nn.Module, output: DTensor, mesh: DeviceMesh) -> Tensor:
            return output.to_local(grad_placements=(Replicate(),))

        return distribute_module(module, device_mesh, None, enter, leave)  # type: ignore[arg-type]


class _Part(nn.Module):
    """A parametrization: a plain tensor that, whenever the module asks for its weight, is a part of one of the mesh."""

    def __init__(self, whole: DTensor) -> None:
        super().__init__()
        self.mesh, self.placements, self.shape, self.stride = (
            whole.device_mesh, whole.placements, whole.shape, whole.stride(),
        )  # fmt: skip

    def forward(self, local: Tensor) -> Tensor:
        return DTensor.from_local(
            local, self.mesh, self.placements, run_check=False, shape=self.shape, stride=self.stride
        )


class Parts:
    """Plain tensors in the place of parameters of a mesh, which DDP's reducer and its buckets need.

    torch's own way (torch/distributed/tensor/parallel/ddp.py, _localize_dtensor) puts new parameters into the model after
    every forward pass, which neither the optimizer nor the reducer knows; a parametrization keeps the same ones.
    """

    def __init__(self) -> None:
        self._parts: dict[Tensor, _Part] = {}

    def take(self, model: nn.Module) -> None:
        """Put plain tensors in the place of a model's parameters of a mesh, if it has any."""
        for module in list(model.modules()):
            for name, parameter in list(module.named_parameters(recurse=False)):
                if isinstance(parameter, DTensor):
                    local = nn.Parameter(parameter.to_local().detach())
                    self._parts[local] = _Part(parameter)
                    setattr(module, name, local)
                    parametrize.register_parametrization(module, name, self._parts[local], unsafe=True)

    def part_of(self, parameter: Tensor, tensor: Tensor) -> Tensor:
        """A tensor of a parameter's shape as a part of the whole one."""
        part = self._parts.get(parameter)
        return tensor if part is None else part(tensor)

    def norm(self, parameters: Iterable[Tensor]) -> Tensor:
        """The norm of all gradients, whatever part of them is here."""
        found = [self.part_of(each, each.grad) for each in parameters if each.grad is not None]
        norm = torch.nn.utils.get_total_norm(found)
        return norm.full_tensor() if isinstance(norm, DTensor) else norm


def prepare(model: nn.Module, plan: Plan, mesh: DeviceMesh, seed: int) -> Prepared:
    """One model on all ranks, or a replica on each group of them, in DDP."""
    ranks = composed_mesh(mesh, plan)
    divide(model, plan, ranks["tensor"])
    materialise(model, plan, device_of(mesh), seed)
    if plan.strategy == "ddp":
        parts = Parts()
        parts.take(model)
        replica = wrap(model, plan, ranks["shard"])
        optimizer = optimizers.make(replica.parameters(), plan)
        return Prepared(
            model=replica,
            optimizer=optimizer,
            states=optimizer,
            accumulate=accumulation(replica, plan),
            clip=lambda limit: clip_grads_with_norm_(replica.parameters(), limit, parts.norm(replica.parameters())),
            part_of=parts.part_of,
        )
    optimizer = optimizers.make(model.parameters(), plan)
    return Prepared(model=model, optimizer=optimizer, states=optimizer)
