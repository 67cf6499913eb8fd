"""What a run holds before its first step and not in it: a model built whole, and the checkpoint it resumes from."""

from __future__ import annotations

from memcalc.parallel.replicated import Replicated
from memcalc.plan import Plan
from memcalc.quantised import QUANTISED, stored
from memcalc.startup import COPIES_STATES_UNTIL
from memcalc.tape import Tape

__all__ = ["build_whole", "resume"]


def build_whole(tape: Tape, plan: Plan, hooks: Replicated) -> None:
    """Every parameter in full, given to the hooks, which drop one when they have taken their shard of it.

    That is how ``fully_shard`` goes through a model that is on its device already
    (torch/distributed/fsdp/_fully_shard/_fsdp_param.py, _init_sharded_param).
    """
    if plan.startup.build != "whole" or not plan.strategy_row.shards_parameters:
        return
    tape.moment = "init"
    for weight in hooks.weights:
        shape, dtype = weight.shape, weight.dtype or hooks.dtype
        if dtype in QUANTISED:
            shape, dtype = (sum(size for _, size in stored(dtype, shape)),), "uint8"
        hooks.whole[weight.name] = tape.allocate(
            f"{weight.name} built whole", shape, dtype, "parameters", batched=False
        )


def resume(tape: Tape, plan: Plan, hooks: Replicated) -> None:
    """A checkpoint that ``torch.load`` puts on the device, of this rank's own part, while it is read into the model.

    ``Module.load_state_dict`` copies the parameters. ``Optimizer.load_state_dict`` takes the loaded states as its own,
    and before torch 2.1 deep copies of them.
    """
    if plan.startup.resume != "device":
        return
    tape.moment = "resume"
    copied = ("parameters", "optimizer") if plan.torch_version < COPIES_STATES_UNTIL else ("parameters",)
    loaded = [
        tape.copy_of(held, "of the checkpoint", kind)
        for held in hooks.held
        if (kind := tape.category_of(held)) in copied
    ]
    loaded.clear()
    tape.moment = "start"
