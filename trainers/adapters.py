"""Low-rank adapters (Hu et al. 2021) around a model's linear layers, whose own weights are frozen."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from memcalc.plan import Plan

__all__ = ["Lora", "add_adapters"]


class Lora(nn.Module):
    """``base(x) + B(A(dropout(x)))``, as peft/tuners/lora/layer.py writes it; alpha is the rank, so that it scales by 1."""

    scaling = 1.0

    def __init__(self, base: nn.Linear, plan: Plan) -> None:
        super().__init__()
        adapter = plan.adapter
        dtype = torch.float32 if adapter.dtype == "float32" else base.weight.dtype
        self.base, self.dropout = base, adapter.dropout
        self.lora_A = nn.Linear(base.in_features, adapter.rank, bias=False, device=base.weight.device, dtype=dtype)
        self.lora_B = nn.Linear(adapter.rank, base.out_features, bias=False, device=base.weight.device, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        result = self.base(x)
        dtype = result.dtype
        x = x.to(self.lora_A.weight.dtype)
        result = result + self.lora_B(self.lora_A(F.dropout(x, self.dropout, self.training))) * self.scaling
        return result.to(dtype)


def add_adapters(model: nn.Module, plan: Plan) -> None:
    """Freeze the model's weights and wrap the linear layers that the plan names; without an adapter nothing happens."""
    adapter = plan.adapter
    if not adapter.freezes:
        return
    model.requires_grad_(False)
    trained = {weight.name for weight in plan.weights}
    for name, module in list(model.named_modules()):
        if f"{name}.lora_A.weight" in trained:
            assert isinstance(module, nn.Linear)
            parent, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(parent), leaf, Lora(module, plan))
