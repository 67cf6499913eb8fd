"""Products divided over ranks by their columns and rows (torch.distributed.tensor.parallel), for Llama.

torchrun --standalone --nproc-per-node 2 -m trainers PLAN.json OUT   # "layout": {"tensor": 2}
"""

from __future__ import annotations

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

from memcalc.plan import Plan
from trainers import optimizers
from trainers.backends import Prepared, device_of
from trainers.models import materialise
from trainers.models.llama import Block

__all__ = ["divide", "prepare"]


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


def prepare(model: nn.Module, plan: Plan, mesh: DeviceMesh, seed: int) -> Prepared:
    """One model on all ranks."""
    divide(model, plan, mesh)
    materialise(model, plan, device_of(mesh), seed)
    optimizer = optimizers.make(model.parameters(), plan)
    return Prepared(model=model, optimizer=optimizer, states=optimizer)
