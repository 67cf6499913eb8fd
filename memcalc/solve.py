"""The largest number of a plan that still fits, or the fewest GPUs that will do: exact to one step.

What a plan needs grows with micro batch, sequence, layers and parameters, and falls with ranks, so the answer is a root:
a line through two ledgers guesses it, and the bracket around it closes from both sides. A replay of the allocator, which may
need more than the published share of reserved memory, has the last word.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import lcm

from memcalc.errors import InputError, PlanError
from memcalc.fitting import exactly_needed, needed_bytes, state_bound
from memcalc.fsdp import Fsdp
from memcalc.hardware import NODE_GPUS
from memcalc.layout import Layout
from memcalc.peaks import peak_of
from memcalc.plan import Plan
from memcalc.sound import MOST_LAYERS
from memcalc.units import things

__all__ = ["QUANTITIES", "Quantity", "Solution", "fewest_ranks", "solve"]

MOST_GPUS = 4096
"""GPUs that are tried at most."""

MOST_BATCH = 2**20
"""Samples of a micro batch that are tried at most."""

MOST_TOKENS = 2**20
"""Tokens of a sequence that are tried at most, where positions do not limit them."""

MOST_PARAMETERS = 10**15 - 1
"""Parameters that are tried at most."""

WALK = 16
"""Steps down that the replay is asked about one by one, before they are halved."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Quantity:
    """Something that can be asked for."""

    name: str
    unit: str
    values: Callable[[Plan], range]
    """Those that a plan can have. Raises InputError where there is nothing to vary."""
    change: Callable[[Plan, int], Plan]
    scale: Callable[[int], float] = float
    """What the need of a plan is nearly a line of."""
    end: Callable[[Plan], str] = lambda plan: ""
    """Why the values do not go on, in words."""
    fewest: bool = False
    """The fewest are asked for that will do; else the most that fit."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Solution:
    """The answer, in ``value``; None when none of the values fits."""

    quantity: Quantity
    value: int | None
    plan: Plan
    """With the value; where none fits, with the one that needs least."""
    needed: int
    """High end of what the device uses with it, in bytes."""
    limit: int
    beyond: int | None
    """What one step further needs; None where there is none."""
    end: str
    """Why there is none, in words; blank where a further one takes more than memcalc counts."""
    tried: int
    """Plans that were played."""


def solve(plan: Plan, quantity: str | Quantity, limit: int) -> Solution:
    """The largest value (of GPUs the smallest) with which a plan needs at most ``limit`` bytes a rank. Raises InputError.

    >>> from memcalc.hardware import GPUS
    >>> from memcalc.models import MODELS
    >>> plan = Plan(model=MODELS["gpt2"], tokens=1024, micro_batch=1, precision="amp-bf16", gpu="t4")
    >>> found = solve(plan, "micro-batch", GPUS["t4"].usable_bytes)
    >>> found.needed <= found.limit < found.beyond
    True
    """
    asked = QUANTITIES[quantity] if isinstance(quantity, str) else quantity
    values = asked.values(plan)
    if not values:
        raise InputError(f"there is no {asked.name} to choose from with this plan")
    order = values if not asked.fewest else values[::-1]  # by rising need
    known: dict[int, int] = {}

    def need(place: int) -> int:
        if place not in known:
            known[place] = _need(asked.change(plan, order[place]), limit)
        return known[place]

    last = len(order) - 1
    # One rank has neither buckets nor communicators, so that it may need less than any number of them.
    if asked.fewest and need(last) <= limit and exactly_needed(asked.change(plan, order[last]), 0, limit) <= limit:
        return _solution(asked, plan, limit, order, last, len(known))
    if need(0) > limit:
        return _solution(asked, plan, limit, order, -1, len(known))
    low, high = 0, len(order)  # the first fits, and what is past the end does not
    halve = False
    while high - low > 1:
        probe = None if halve else _guess(known, low, high, limit, lambda place: asked.scale(order[place]))
        probe = (low + high) // 2 if probe is None else min(max(probe, low + 1), high - 1)
        size = high - low
        low, high = (probe, high) if need(probe) <= limit else (low, probe)
        halve = 2 * (high - low) > size  # a guess that closed the bracket too little is followed by a half
    last = _replayed(
        low, lambda place: exactly_needed(asked.change(plan, order[place]), 0, limit) <= limit, plan.device == "cpu"
    )
    return _solution(asked, plan, limit, order, last, len(known))


def _guess(known: Mapping[int, int], low: int, high: int, limit: int, scale: Callable[[int], float]) -> int | None:
    """Where the line through two known places meets the limit: the bracket's ends, or while nothing is known not to fit the
    last two that do."""
    if len(known) == 1:
        return FIRST
    others = [place for place, needed in known.items() if place != low and needed < _NEVER]
    if not others:
        return None
    other = high if high in others else max(place for place in others)
    if known[other] == known[low]:
        return None
    slope = (scale(other) - scale(low)) / (known[other] - known[low])
    target = scale(low) + (limit - known[low]) * slope
    # Where nothing is known not to fit, one step further, so that the bracket closes.
    return bisect_right(range(low, high), target, key=scale) - 1 + low + (high not in known)


FIRST = 63
"""The second place that is looked at: far enough from the first that rounding to blocks does not decide the slope."""

_NEVER = 2**62
"""Stands for plans that cannot be: more than 4 EiB, or choices that clash."""


def _need(plan: Plan, limit: int) -> int:
    """Bytes of the high end; where states alone are too much, no ledger is played for the rest."""
    try:
        least = needed_bytes(plan, state_bound(plan))
        return least if least > 2 * limit else needed_bytes(plan, peak_of(plan))
    except PlanError:
        return _NEVER


def _replayed(last: int, fits: Callable[[int], bool], known: bool) -> int:
    """The last place that fits by the replay too, at or before one that fits by the published share."""
    if known:
        return last
    for place in range(last, max(last - WALK, -1), -1):
        if fits(place):
            return place
    low, high = -1, max(last - WALK, -1) + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _solution(asked: Quantity, plan: Plan, limit: int, order: range, last: int, tried: int) -> Solution:
    at = asked.change(plan, order[max(last, 0)])
    needed = exactly_needed(at, peak_of(at), limit if last >= 0 else None)
    beyond = None
    if 0 <= last < len(order) - 1:
        try:
            further = asked.change(plan, order[last + 1])
            beyond = exactly_needed(further, peak_of(further))
        except PlanError:  # more than 4 EiB, or nothing that can be
            beyond = None
    return Solution(
        quantity=asked,
        value=order[last] if last >= 0 else None,
        plan=at,
        needed=needed,
        limit=limit,
        beyond=beyond,
        end=asked.end(plan) if last == len(order) - 1 else "",
        tried=tried,
    )


def _batches(plan: Plan) -> range:
    if not plan.micro_batch or plan.model.layer_bytes:
        raise InputError(f"a micro batch changes nothing of {plan.model.name}: no shape of its samples is known")
    return range(1, MOST_BATCH + 1)


def _end_of_lengths(plan: Plan) -> str:
    if not _limited(plan):
        return f"{MOST_TOKENS:,} tokens are the most that solve tries"
    most = plan.model.context - plan.model.position_offset
    return f"{plan.model.name} has {things(most, 'position')}: for more add --context N"


def _limited(plan: Plan) -> bool:
    """Positions end with the model's context: a plan of one token more is refused."""
    try:
        _with_tokens(plan, plan.model.context - plan.model.position_offset + plan.layout.context * plan.layout.tensor)
    except PlanError:
        return True
    return False


def _lengths(plan: Plan) -> range:
    if plan.family.reads != "tokens":
        raise InputError(f"{plan.model.name} reads no tokens; ask for micro-batch or layers")
    step = plan.layout.context * (plan.layout.tensor if plan.layout.sequence else 1)
    most = plan.model.context - plan.model.position_offset if _limited(plan) else MOST_TOKENS
    least = -(-max(plan.loss.chunks, 1) // step) * step
    return range(least, most + 1, step)


def _depths(plan: Plan) -> range:
    if not plan.model.layers or plan.model.layers != plan.model.blocks:
        raise InputError(f"layers alone cannot be changed of {plan.model.name}; ask for another quantity")
    return range(plan.layout.pipeline * plan.layout.chunks, MOST_LAYERS + 1)


def _sizes(plan: Plan) -> range:
    if plan.model.family != "size":
        raise InputError(f"params are for a model known by its size: leave {plan.model.name} out, or ask for layers")
    return range(1, MOST_PARAMETERS + 1)


def _counts(plan: Plan) -> range:
    if plan.device == "cpu":
        raise InputError("ranks on CPUs share one machine's RAM; name a GPU with --gpu to ask for gpus")
    each = fewest_ranks(plan.layout, plan.fsdp, plan.nodes)
    return range(each, MOST_GPUS + 1, each)


def fewest_ranks(layout: Layout, fsdp: Fsdp, nodes: int = 1) -> int:
    """The fewest ranks that can be arranged so, on so many machines; all other counts are multiples of them.

    >>> fewest_ranks(Layout(tensor=2, pipeline=3), Fsdp(), 4)
    12
    """
    instances = layout.tensor * layout.pipeline * lcm(layout.context, layout.optimizer_instances, max(fsdp.replicas, 1))
    return lcm(layout.model_parallel, layout.pipeline * layout.expert, instances, nodes)


def _with_tokens(plan: Plan, count: int) -> Plan:
    return replace(plan, tokens=count)


def _with_layers(plan: Plan, count: int) -> Plan:
    name = f"{plan.model.name} ({count} layers)" if count != plan.model.layers else plan.model.name
    return replace(plan, model=replace(plan.model, layers=count, name=name))


def _with_ranks(plan: Plan, count: int) -> Plan:
    """So many ranks on full machines, or on the plan's where those are several; on one rank nothing is divided, and any
    strategy is the plain one."""
    nodes = plan.nodes if plan.nodes > 1 else -(-count // NODE_GPUS)
    while count % nodes:  # as few machines as hold equal parts of them
        nodes += 1
    strategy = "ddp" if count > plan.layout.model_parallel and not plan.strategy_row.parallel else plan.strategy
    return replace(plan, ranks=count, nodes=nodes, strategy=strategy)


def _with_parameters(plan: Plan, count: int) -> Plan:
    return replace(plan, model=replace(plan.model, parameters=count, name=f"{count:,} parameters"))


QUANTITIES: Mapping[str, Quantity] = {
    each.name: each
    for each in (
        Quantity(name="micro-batch", unit="sample per GPU", values=_batches,
                 change=lambda plan, value: replace(plan, micro_batch=value),
                 end=lambda plan: f"{things(MOST_BATCH, 'sample')} are the most that solve tries"),
        Quantity(name="seq-len", unit="token per sample", values=_lengths, change=_with_tokens, end=_end_of_lengths),
        Quantity(name="gpus", unit="GPU", values=_counts, change=_with_ranks,
                 scale=lambda value: 1 / value, fewest=True),
        Quantity(name="layers", unit="layer", values=_depths, change=_with_layers,
                 end=lambda plan: f"{things(MOST_LAYERS, 'layer')} are the most that memcalc takes"),
        Quantity(name="params", unit="parameter", values=_sizes, change=_with_parameters,
                 end=lambda plan: f"{things(MOST_PARAMETERS, 'parameter')} are the most that solve tries"),
    )
}  # fmt: skip
"""What ``solve`` answers, by name."""
