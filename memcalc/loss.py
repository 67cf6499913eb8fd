"""How the loss is computed where that changes what it keeps: in chunks, in one kernel, or together with the head."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from memcalc.errors import PlanError
from memcalc.groups import Group, knob
from memcalc.units import things

if TYPE_CHECKING:
    from memcalc.plan import Plan

__all__ = ["LOSS_FORMS", "Loss"]

LOSS_FORMS = ("plain", "compiled", "fused", "in-place", "fused-linear", "cut")
_WITH_HEAD = ("fused-linear", "cut")
LARGEST_MULTIPLE = 2**16
"""Vocabularies are padded to 8 to 128 times the ranks of tensor parallel (Megatron-LM, make_vocab_size_divisible_by);
past this the number is a slip."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Loss(Group):
    """How the cross-entropy is computed; ``loss_dtype`` and ``keep_logits`` of the plan stand beside it.

    ``plain`` is ``F.cross_entropy``. ``compiled`` is the same inside torch.compile: one kernel that keeps the logits
    and two numbers a row. ``fused`` is one kernel by hand (flash-attn, Liger, apex), ``in-place`` the same that
    writes the gradient over the logits. ``fused-linear`` takes the head's product along, chunk by chunk, and makes
    the gradients of both its factors in forward (Liger), so that no logits are ever whole; ``cut`` makes both in
    backward and never holds a logit (Apple's cut cross-entropy).
    """

    form: str = knob("plain", "--loss", "How the cross-entropy is computed.", choices=LOSS_FORMS)
    chunks: int = knob(
        0, "--loss-chunks", "Parts the tokens are cut into for it; 0 cuts nothing (fused-linear: by Liger's own rule)."
    )
    chunk_head: bool = knob(False, "--chunk-head", "The head's product is made chunk by chunk too.")
    shift_copy: bool = knob(False, "--shift-logits", "logits[:, :-1] are copied, as transformers did up to 4.49.")
    float32_output: bool = knob(False, "--float32-logits", "The model itself returns its logits in float32.")
    """As transformers up to 4.45 and torchtitan of spring 2024 end their forward pass: 16-bit logits do not live on."""
    converted: bool = knob(
        False, "--convert-output", "The loss is taken inside the model, and its logits then become float32."
    )
    """accelerate/utils/operations.py, ConvertOutputsToFp32, around a model that transformers' Trainer runs in 16 bit."""
    vocab_multiple: int = knob(1, "--vocab-multiple", "The vocabulary is padded to a multiple of this.", least=1)

    def check(self, plan: Plan) -> None:
        if self == Loss():
            return
        if self.vocab_multiple > LARGEST_MULTIPLE:
            raise PlanError(f"vocab multiple {self.vocab_multiple} must be at most {LARGEST_MULTIPLE}")
        if plan.family.unplayed:
            raise PlanError(f"{plan.model.name} takes the loss its code says; leave the forms of the loss out")
        if plan.strategy_row.one_process:
            raise PlanError(f"{plan.strategy} takes the plain loss of all outputs; leave the forms of the loss out")
        if plan.family.reads != "tokens" or not plan.model.says_words:
            raise PlanError(f"{plan.model.name} has no vocabulary; the forms of the loss are for models of tokens")
        if self.chunk_head and not self.chunks:
            raise PlanError("chunk head: into how many chunks is not said; give --loss-chunks")
        if self.chunk_head and self.form in _WITH_HEAD:
            raise PlanError(f"loss {self.form} makes the head's product by itself; leave out --chunk-head")
        if self.chunks and self.form == "cut":
            raise PlanError("loss cut has chunks of its own in its kernel; leave out --loss-chunks")
        if self.chunks > plan.tokens:
            raise PlanError(f"loss chunks {self.chunks} are more than the {things(plan.tokens, 'token')}")
        if self.shift_copy and (self.chunks or not self.whole_logits):
            raise PlanError("shift logits: only whole logits are copied; leave out --loss-chunks")
        if (self.float32_output or self.converted) and not self.whole_logits:
            raise PlanError("float32 logits: there are no whole logits with this loss")
        if plan.keep_logits and not self.whole_logits:
            raise PlanError("keep logits: there are no whole logits to keep with this loss")

    def untrained(self, plan: Plan) -> str:
        if self.form != "plain":
            return f"with a loss that is {self.form}"
        if self.converted:
            return "with logits that become float32 after the loss"
        return "with shifted copies of the logits" if self.shift_copy else ""

    @property
    def takes_head(self) -> bool:
        """The loss makes the head's product; the model's output is what the head multiplies."""
        return self.form in _WITH_HEAD

    @property
    def whole_logits(self) -> bool:
        """The model's output is one tensor of logits."""
        return not self.chunk_head and not self.takes_head
