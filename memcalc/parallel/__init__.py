"""What a strategy allocates around the model's own work: its hooks on the tape.

One file per way of working, with the same few hooks the real libraries use. ``states`` allocates what
lives between steps; the others are called by the ledger when a block is entered or left, forward and
backward, and when a weight's gradient is finished.
"""

from __future__ import annotations

from collections.abc import Sequence

from memcalc.parallel.before import build_whole, resume
from memcalc.parallel.data_parallel import DataParallel
from memcalc.parallel.ddp import Ddp
from memcalc.parallel.flat_adapters import FlatAdapters
from memcalc.parallel.flat_shard import FlatShard
from memcalc.parallel.flat_units import FlatUnits, flattened
from memcalc.parallel.fully_shard import FullyShard
from memcalc.parallel.megatron import Megatron
from memcalc.parallel.replicated import EMBEDDINGS, ROOT_UNIT, Replicated
from memcalc.parallel.zero import Zero
from memcalc.parallel.zero_0 import Zero0
from memcalc.parallel.zero_3 import Zero3
from memcalc.parallel.zero_bf16 import ZeroBf16
from memcalc.plan import Plan
from memcalc.spec import HEAD, Weight
from memcalc.tape import Tape

__all__ = [
    "EMBEDDINGS",
    "ROOT_UNIT",
    "DataParallel",
    "Ddp",
    "FlatAdapters",
    "FlatShard",
    "FlatUnits",
    "FullyShard",
    "Megatron",
    "Replicated",
    "Zero",
    "Zero0",
    "Zero3",
    "ZeroBf16",
    "build_whole",
    "flattened",
    "make",
    "resume",
    "shard_units",
]


def make(tape: Tape, plan: Plan, units: dict[str, list[Weight]]) -> Replicated:
    """The hooks of the plan's strategy."""
    row = plan.strategy_row
    if row.zero_stage is not None:
        return _zero(plan)(tape, plan, units)
    if plan.gathers_unknown_layers:  # then only what each rank keeps is counted, and the units are shards already
        return Replicated(tape, plan, units)
    if row.gathers and plan.fsdp.version == "1":
        if plan.adapter.freezes and plan.fsdp.adapter_units and plan.shards > 1:
            return FlatAdapters(tape, plan, units)
        # FullyShardedDataParallel switches to NO_SHARD in a world of one (_init_utils.py, _init_core_state).
        return (FlatShard if plan.shards > 1 or plan.offload.on else FlatUnits)(tape, plan, units)
    if row.one_process:
        return DataParallel(tape, plan, units)
    if row.main_grads:
        return Megatron(tape, plan, units)
    if row.gathers:
        return FullyShard(tape, plan, units)
    if row.buckets:
        return Ddp(tape, plan, units)
    return FlatUnits(tape, plan, units) if row.flat_units else Replicated(tape, plan, units)


def _zero(plan: Plan) -> type[Replicated]:
    """DeepSpeed's engine._do_optimizer_sanity_check: which of its optimizers wraps the plan's."""
    stage, summed = plan.strategy_row.zero_stage, plan.deepspeed.grad_accum_dtype
    if stage == 1 and plan.precision == "bf16-master" and summed == "float32" and not plan.offload.on:
        return ZeroBf16
    return {0: Zero0, 1: Zero, 2: Zero, 3: Zero3}[stage or 0]


def shard_units(
    weights: Sequence[Weight], every: int, runs: Sequence[int] = (), separate: bool = False
) -> dict[str, list[Weight]]:
    """Weights by the unit that owns them: consecutive blocks, ``every`` at a time, and the root for the rest.

    ``runs`` are the lengths of the stretches of blocks in a row, where they are not all in one. ``separate`` leaves the
    root nothing: embeddings are a unit before all blocks, and the head with its norm is one after them.

    >>> parts = shard_units([Weight("e", (1,)), Weight("a", (1,), "h.0"), Weight("b", (1,), "h.1")], 2)
    >>> {unit: [weight.name for weight in part] for unit, part in parts.items()}
    {'root': ['e'], 'h.0': ['a', 'b']}
    """
    blocks = list(dict.fromkeys(weight.group for weight in weights if "." in weight.group))
    leader: dict[str, str] = {}
    start = 0
    for run in runs or [len(blocks)]:
        leader |= {blocks[start + index]: blocks[start + index // every * every] for index in range(run)}
        start += run
    units: dict[str, list[Weight]] = {ROOT_UNIT: []}
    for weight in weights:
        rest = ROOT_UNIT if not separate else HEAD if weight.group == HEAD else EMBEDDINGS
        units.setdefault(leader.get(weight.group, rest), []).append(weight)
    return units
