"""How the model's code is written where that changes what it keeps: norms, GELU, gated products, rotary positions, heads."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from memcalc.errors import PlanError
from memcalc.groups import Group, knob
from memcalc.spec import Model

if TYPE_CHECKING:
    from memcalc.plan import Plan

__all__ = ["Implementation"]

_LLAMAS = ("llama", "decoder", "moe", "llava")
# Families whose modules in trainers/ have GELU as one kernel only.
_ONE_KERNEL = ("t5", "bert", "vit")
# Families each field says something about; what is said of another would change nothing.
_FAMILIES = {
    "norm": (*_LLAMAS, "t5"),
    "gelu": ("gpt2", "decoder", *_ONE_KERNEL),
    "gate_up": ("llama", "decoder", "llava"),
    "rotary": _LLAMAS,
    "grouped": _LLAMAS,
    "softmax": (*_LLAMAS, "gpt2", "bert", "vit", "clip", "whisper"),
    "megatron": ("megatron", "megatron-t5"),
}

# Softmaxes of one published model's code.
_OWN = ("scripted", "clamped")


@dataclass(frozen=True, kw_only=True, slots=True)
class Implementation(Group):
    """How the model's code is written where that changes what it keeps; ``auto`` is what trainers/models does.

    >>> Implementation(norm="python").norm
    'python'
    """

    norm: str = knob(
        "auto", "--norm", "RMSNorm: auto (F.rms_norm), fused (one kernel), chain (float32), python (as transformers).",
        choices=("auto", "fused", "chain", "python"),
    )  # fmt: skip
    """``fused`` keeps its input (apex, Triton, F.rms_norm on CUDA from torch 2.9); ``chain`` keeps two float32 tensors of
    its size (F.rms_norm before that, litgpt, Gemma); ``python`` one and the normalised one in the model's dtype."""
    gelu: str = knob(
        "auto", "--gelu", "GELU: auto, fused (one kernel), python (gelu_new of transformers, written out).",
        choices=("auto", "fused", "python"),
    )  # fmt: skip
    gate_up: str = knob(
        "auto", "--gate-up", "SwiGLU: auto (two operations), kernel (one that keeps its inputs only, as Liger's).",
        choices=("auto", "kernel"),
    )  # fmt: skip
    rotary: str = knob(
        "auto", "--rotary", "Rotary positions: auto (x cos + rotated x sin), complex (float32 pairs), kernel (in place).",
        choices=("auto", "complex", "kernel"),
    )  # fmt: skip
    grouped: str = knob(
        "auto", "--grouped", "Grouped queries: auto (repeated where the kernel needs it), repeat (always copied).",
        choices=("auto", "repeat"),
    )  # fmt: skip
    softmax: str = knob(
        "auto", "--softmax", "Where attention is written out: auto (model's dtype), float32, scripted (StarCoder), clamped (OPT).",
        choices=("auto", "float32", "scripted", "clamped"),
    )  # fmt: skip
    """``scripted``: float32, scaled and masked in one function that TorchScript differentiates; ``clamped``: scores no
    less than the lowest number, which keeps them, and float32 where they are float16 (memcalc/softmaxes.py)."""

    megatron: str = knob(
        "auto", "--megatron", "Megatron's layers: auto (of before its core), core, transformer-engine.",
        choices=("auto", "core", "transformer-engine"),
    )  # fmt: skip
    """``core`` keeps the tensor that scores are made in for the whole run (parallel_state.get_global_memory_buffer);
    Transformer Engine has a cuBLAS workspace of its own. With both, the mask of each sample is part of the batch."""

    def check(self, plan: Plan) -> None:
        """A field says something about the plan's model, or is ``auto``."""
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            misfit = _misfit(field.name, value, plan.model)
            if value != "auto" and misfit:
                raise PlanError(f"{field.metadata['option']} {value}: {misfit}")

    @classmethod
    def suited(cls, model: Model, values: Mapping[str, str]) -> Implementation:
        """Of several values those that say something about the model.

        >>> from memcalc.models import MODELS
        >>> Implementation.suited(MODELS["gpt2"], {"norm": "python", "gelu": "python"}) == Implementation(gelu="python")
        True
        """
        return cls(**{field: value for field, value in values.items() if not _misfit(field, value, model)})

    def untrained(self, plan: Plan) -> str:
        if self.norm == "fused" or (self.norm == "chain" and plan.device == "cuda"):
            return f"with --norm {self.norm}"
        if self.softmax in _OWN:
            return f"with --softmax {self.softmax}"
        if self.gate_up == "kernel":
            return "with --gate-up kernel"
        if self.gelu == "python" and plan.model.family in _ONE_KERNEL:
            return f"a model of the family {plan.model.family} with --gelu python"
        return "" if self.rotary == "auto" else f"with --rotary {self.rotary}"


def _misfit(field: str, value: str, model: Model) -> str:
    """Why a field's value says nothing about a model; blank when it does."""
    families = _FAMILIES[field]
    if model.family not in families:
        return f"not of the {model.family} family, only of {', '.join(families)}"
    if value in _OWN and model.family != "decoder":
        return f"not of the {model.family} family, only of decoder"
    if field == "norm" and model.norm == "layer":
        return f"{model.name} has LayerNorm, which is one kernel everywhere"
    if field == "gelu" and model.family == "t5" and not (model.gated and model.activation in ("", "gelu")):
        return f"{model.name} has no GELU"
    if field == "gelu" and (model.activation == "relu" or (model.family == "decoder" and model.activation != "gelu")):
        return f"{model.name} has no GELU"
    if field == "rotary" and model.positions not in ("", "rotary"):
        return f"{model.name} has no rotary positions"
    if field == "gate_up" and model.family == "decoder" and not model.gated:
        return f"{model.name} has no gate"
    return ""
