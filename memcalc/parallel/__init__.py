"""What a strategy allocates around the model's own work: its hooks on the tape.

One file per way of working, with the same few hooks the real libraries use. ``states`` allocates what
lives between steps; the others are called by the ledger when a block is entered or left, forward and
backward, and when a weight's gradient is finished.
"""

from __future__ import annotations

from collections.abc import Sequence

from memcalc.parallel.before import build_whole, resume
from memcalc.parallel.ddp import Ddp
from memcalc.parallel.flat_units import FlatUnits, flattened
from memcalc.parallel.fully_shard import FullyShard
from memcalc.parallel.megatron import Megatron
from memcalc.parallel.replicated import ROOT_UNIT, Replicated
from memcalc.plan import Plan
from memcalc.spec import Weight
from memcalc.tape import Tape

__all__ = [
    "ROOT_UNIT",
    "Ddp",
    "FlatUnits",
    "FullyShard",
    "Megatron",
    "Replicated",
    "build_whole",
    "flattened",
    "make",
    "resume",
    "shard_units",
]


def make(tape: Tape, plan: Plan, units: dict[str, list[Weight]]) -> Replicated:
    """The hooks of the plan's strategy."""
    row = plan.strategy_row
    if plan.gathers_unknown_layers:  # then only what each rank keeps is counted, and the units are shards already
        return Replicated(tape, plan, units)
    if row.main_grads:
        return Megatron(tape, plan, units)
    if row.gathers:
        return FullyShard(tape, plan, units)
    if row.buckets:
        return Ddp(tape, plan, units)
    return FlatUnits(tape, plan, units) if row.flat_units else Replicated(tape, plan, units)


def shard_units(weights: Sequence[Weight], every: int) -> dict[str, list[Weight]]:
    """Weights by the unit that owns them: consecutive blocks, ``every`` at a time, and the root for the rest.

    >>> parts = shard_units([Weight("e", (1,)), Weight("a", (1,), "h.0"), Weight("b", (1,), "h.1")], 2)
    >>> {unit: [weight.name for weight in part] for unit, part in parts.items()}
    {'root': ['e'], 'h.0': ['a', 'b']}
    """
    blocks = list(dict.fromkeys(weight.group for weight in weights if "." in weight.group))
    leader = {block: blocks[index // every * every] for index, block in enumerate(blocks)}
    units: dict[str, list[Weight]] = {ROOT_UNIT: []}
    for weight in weights:
        units.setdefault(leader.get(weight.group, ROOT_UNIT), []).append(weight)
    return units
