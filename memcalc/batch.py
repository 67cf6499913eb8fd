"""One micro batch on the tape: inputs, what goes beside them, and targets."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memcalc.graph import Tensor
from memcalc.tape import Tape

if TYPE_CHECKING:
    from memcalc.plan import Plan

__all__ = ["Batch", "make_batch"]

Batch = tuple[Tensor, Tensor]


def make_batch(t: Tape, plan: Plan, times: int = 1) -> Batch:
    """Inputs and targets of a micro batch, of which the device holds ``times`` as many as the model sees.

    What is beside the tokens, images or frames of sound, is ``Tape.sensed``.
    """
    family, model, floats = plan.family, plan.model, plan.precision_row.weights
    if family.reads == "tokens":
        inputs, dtype = (family.sequences * plan.tokens,), "int64"
        targets = 1 if model.answers_once else plan.tokens
    else:
        inputs, dtype, targets = (model.features,), floats, int(model.answers_once)
    if shape := family.beside_tokens(model):
        beside = t.allocate("inputs beside the tokens", (shape[0] * times, *shape[1:]), floats, "inputs")
        t.sensed = Tensor(beside, shape, floats, None)
        del beside
    held = t.allocate("inputs", (inputs[0] * times,), dtype, "inputs")
    wanted = t.allocate("targets", (targets * times,), "int64", "inputs")
    return Tensor(held, inputs, dtype, None), Tensor(wanted, (targets * times,), "int64", None)
