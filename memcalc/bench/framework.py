"""One framework and its documented defaults, and those of PyTorch, which lie below all of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

__all__ = ["PYTORCH", "Default", "Framework"]


class Default(NamedTuple):
    """One documented value."""

    value: str
    source: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Framework:
    """One row: a framework at the time its numbers were published."""

    name: str
    sources: tuple[str, ...]
    """Beginnings of the column ``source``, a blank and ``gpu_type`` that mean this framework; the longest that fits wins.
    A page that was measured on each card with another version is told apart by the card."""
    defaults: Mapping[str, Default] = field(default_factory=dict)

    def default(self, key: str) -> Default | None:
        """The framework's own default, else PyTorch's."""
        return self.defaults.get(key) or PYTORCH.get(key)


# Below every framework lies PyTorch.
PYTORCH = {
    "allocator": Default("", "PYTORCH_CUDA_ALLOC_CONF is not set"),
    "activation_checkpointing": Default("none", "torch.utils.checkpoint acts only where it is called"),
    "attention": Default("sdpa", "torch.nn.functional.scaled_dot_product_attention chooses its kernel"),
    "compile": Default("no", "torch.compile acts only where it is called"),
    "fsdp units": Default("", "blocks and the root, as in all examples of torch"),
    "fsdp": Default("1", "FullyShardedDataParallel; fully_shard became public in torch 2.6"),
    "grad_accum": Default("1", "torch accumulates only when zero_grad is not called"),
    "loss": Default("float32", "memcalc's own: cross_entropy on float32 logits"),
    "offload": Default("none", "torch keeps tensors where they were made"),
    "adapters": Default("", "torch has none"),
    "policy": Default("", "FullyShardedDataParallel casts where it is given a MixedPrecision"),
    "reentrant": Default("", "torch.utils.checkpoint is told which form to take"),
    "quantised": Default("", "the blocks' linear layers, by a MatMul4Bit that keeps no input"),
    "lora_dropout": Default("", "not stated"),
    "lora_targets": Default("", "not stated"),
    "quantisation": Default("", "as the cell says"),
    "selective": Default("op", "torchtitan's word without another: by operation"),
    "optimizer_kind": Default("foreach", "torch.optim, _default_to_fused_or_foreach: foreach for CUDA parameters"),
    "sync": Default("each", "torch/distributed/fsdp reduces gradients in every backward that is not in no_sync"),
    "compiled loss": Default("", "torch.compile acts only where it is called"),
    "torch": Default("2.13", "memcalc's own"),
}
