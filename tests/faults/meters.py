"""Faults in meters: reserved and host memory, snapshots, what a verdict says."""

from __future__ import annotations

from .fault import Fault

__all__ = ["FAULTS"]

FAULTS = [
    Fault(
        name="whole gradients of micro batches are kept silent about",
        file="hints.py",
        right="accumulates and not plan.fsdp.sync_every_micro_batch",
        wrong="False and accumulates",
    ),
    Fault(
        name="host memory of a machine is that of one rank",
        file="hints.py",
        right="{format_both(each * host)}",
        wrong="{format_both(host)}",
    ),
    Fault(
        name="a search leaves out what neither the replay nor published shares see",
        file="fitting.py",
        right="    return highest(plan, timeline.peak().bytes, found.peak_reserved) + rest.high",
        wrong="    return max(found.peak_reserved, most_reserved(plan, timeline.peak().bytes)) + rest.high",
    ),
    Fault(
        name="what a pipeline's engine holds on to piles up from step to step",
        file="reserved.py",
        right="return [event, (replaced[ident] - size, -delta)] if delta > 0 and ident in replaced else [event]",
        wrong="return [event]",
    ),
    Fault(
        name="pinned memory is not rounded",
        file="host.py",
        right="    return 1 << (size - 1).bit_length() if size else 0",
        wrong="    return size",
    ),
    Fault(
        name="states are made in the first step even of a resumed run",
        file="reserved.py",
        right='lazy = plan.startup.resume == "none" and not plan.strategy_row.masters',
        wrong="lazy = True",
    ),
    Fault(
        name="kept gradients are made with the model",
        file="reserved.py",
        right="found[ident] = kept.pop(name)[0]",
        wrong="kept.pop(name)",
    ),
    Fault(
        name="reserved knows no card",
        file="estimate.py",
        right="capacity=capacity, free=held)",
        wrong="capacity=None, free=held)",
    ),
    Fault(
        name="all groups of ranks have one communicator",
        file="outside.py",
        right="len(communicators(plan))",
        wrong="min(len(communicators(plan)), 1)",
    ),
    Fault(
        name="kernels are loaded when used in every torch",
        file="outside.py",
        right="if plan.torch_version < LAZY_SINCE and",
        wrong="if not plan.torch_version and",
    ),
    Fault(
        name="a recorded segment's address is ignored",
        file="allocator_history.py",
        right='entry.address if own and action == "segment_alloc" else None',
        wrong="None",
    ),
    Fault(
        name="a rehearsal on fake tensors has no workspaces",
        file="rehearsal.py",
        right='if device == "fake" and (kept := workspaces(plan)):',
        wrong='if device == "none" and (kept := workspaces(plan)):',
    ),
    Fault(
        name="a plan that its rehearsal refuses is taken",
        file="confirmation.py",
        right="return self.needed <= self.limit",
        wrong="return self.needed > 0",
    ),
    Fault(
        name="what a ring lost is not found in the segments",
        file="snapshot_timeline.py",
        right="for entry, frames in _older(snapshot, set(final)):",
        wrong="for entry, frames in _older(snapshot, set(final))[:0]:",
    ),
    Fault(
        name="what outlives backward is no gradient",
        file="snapshot_timeline.py",
        right="name = source.passing if passing else source.lasting",
        wrong="name = source.passing",
    ),
    Fault(
        name="a module that was not rehearsed may fit",
        file="assumptions.py",
        right="        or not model.module.factory\n",
        wrong="        or True\n",
    ),
    Fault(
        name="a rehearsal lacks cuBLAS's workspaces",
        file="estimate.py",
        right="    held = workspaces(plan)\n",
        wrong="    held: list[tuple[str, int]] = []\n",
    ),
    Fault(
        name="what a rehearsed step frees for good is freed in every step",
        file="reserved.py",
        right="                if last or ident not in gone\n",
        wrong="",
    ),
    Fault(
        name="what is known not to be counted may fit",
        file="estimate.py",
        right=" or uncounted(plan):\n",
        wrong=":\n",
    ),
]
