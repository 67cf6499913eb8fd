"""Number formats, and the recipes people train with.

Only a recipe says how many bytes a parameter costs: 16-bit *weights* halve the model states, 16-bit
*compute* (autocast) does not, because weights, gradients and moments stay in float32.
"""

from __future__ import annotations

from dataclasses import dataclass

from memcalc.catalog import Catalog

__all__ = ["DTYPE_BYTES", "PRECISIONS", "Precision"]

# Size of one element. Source: IEEE 754, bfloat16 and the torch.dtype documentation.
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int64": 8, "uint8": 1, "bool": 1}


@dataclass(frozen=True, kw_only=True, slots=True)
class Precision:
    """One recipe: the dtype weights are kept in and the dtype matrix products run in."""

    name: str
    weights: str
    """dtype of parameters, gradients and optimizer states."""
    compute: str
    """dtype of matrix products; differs from ``weights`` only under autocast (or FSDP's policy)."""
    loss_scaling: bool = False
    """True where the trainers use a GradScaler."""
    master: bool = False
    """The optimizer updates float32 copies of 16-bit weights, and its states are float32."""
    summary: str

    @property
    def autocast(self) -> bool:
        """True when weights and compute differ, so that casts exist."""
        return self.weights != self.compute


PRECISIONS: Catalog[Precision] = Catalog(
    "precision",
    [
        Precision(name="fp32", weights="float32", compute="float32", summary="everything in float32"),
        Precision(
            name="bf16",
            weights="bfloat16",
            compute="bfloat16",
            summary="pure bfloat16: weights, gradients and moments too, but for adapters in float32 (model.to(bfloat16))",
        ),
        Precision(
            name="fp16",
            weights="float16",
            compute="float16",
            summary="pure float16: weights, gradients and moments too, but for adapters in float32; rarely stable",
        ),
        Precision(
            name="amp-bf16",
            weights="float32",
            compute="bfloat16",
            summary="float32 weights and states, bfloat16 compute (torch.autocast, or FSDP's policy)",
        ),
        Precision(
            name="amp-fp16",
            weights="float32",
            compute="float16",
            loss_scaling=True,
            summary="float32 weights and states, float16 compute with a GradScaler",
        ),
        Precision(
            name="bf16-master",
            weights="bfloat16",
            compute="bfloat16",
            master=True,
            summary="bfloat16 weights, float32 master copies and states (DeepSpeed, Megatron)",
        ),
        Precision(
            name="fp16-master",
            weights="float16",
            compute="float16",
            loss_scaling=True,
            master=True,
            summary="float16 weights, float32 master copies and states (DeepSpeed, Megatron)",
        ),
    ],
)
