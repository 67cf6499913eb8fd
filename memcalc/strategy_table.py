"""One job under every strategy: memory by category, bytes sent, relative speed, and the smallest card that holds it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from memcalc.assumptions import activations_known, limits
from memcalc.errors import PlanError
from memcalc.estimate import estimate, holding_gpus
from memcalc.open_choices import default_precisions
from memcalc.plan import Plan
from memcalc.precision import PRECISIONS
from memcalc.strategies import STRATEGIES, Strategy
from memcalc.throughput import step_time
from memcalc.timeline import CATEGORIES, MOMENTS
from memcalc.traffic import Collective, collectives, sent_bytes

__all__ = ["OTHER", "SHOWN", "Line", "Refused", "divided", "recipes", "strategy_table", "usual_recipes"]

SHOWN = ("parameters", "gradients", "optimizer", "activations", "communication")
OTHER = tuple(name for name in CATEGORIES if name not in SHOWN)
_MASTERS = {"amp-bf16": "bf16-master", "amp-fp16": "fp16-master"}
"""DeepSpeed and Megatron keep float32 copies of 16-bit weights where torch.autocast casts float32 ones."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """One strategy; bytes are of the fullest rank."""

    plan: Plan
    by_category: dict[str, int]
    """At the peak, which they add up to."""
    most: dict[str, int]
    """Of each category at any moment: a strategy that peaks in backward holds gradients all the same."""
    peak: int
    """Allocated."""
    device: int
    """The high end of what nvidia-smi shows."""
    sent: int
    """By one rank in an optimizer step."""
    collectives: tuple[Collective, ...]
    seconds: float | None
    """Of one sample over all ranks, by the time model; None where it cannot tell."""
    bound: bool
    """The time model lacks this engine's own work on the host, so that the seconds are at least these."""
    counted: bool
    """Activations are known, so that the bytes are all of them; else no card holds it for sure."""
    limits: tuple[str, ...]
    """What stays whole, or out, because the model's layers are not known."""
    smallest: str | None
    """The smallest card that holds it for sure and computes its dtype; None when none of the catalog does."""
    verdict: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Refused:
    """A strategy that this job cannot take, and why."""

    strategy: str
    why: str


def strategy_table(
    plan: Callable[[str, str], Plan], precisions: Iterable[str], names: Iterable[str] | None = None
) -> tuple[list[Line], list[Refused]]:
    """A line for every strategy, in the catalog's order; ``plan`` makes the job's plan from a strategy and a precision, of
    which each strategy takes the first that it can. A PlanError is why it can take none; others are raised."""
    lines: list[Line] = []
    refused: list[Refused] = []
    tried = tuple(precisions)
    for name in names or (row.name for row in STRATEGIES.values() if row.parallel):
        why = ""
        for precision in tried:
            try:
                made = plan(name, precision)
            except PlanError as error:
                why = why or str(error)
                continue
            why = _pointless(made)
            if not why:
                lines.append(_line(made))
            break
        if why:
            refused.append(Refused(strategy=name, why=why))
    return lines, refused


def recipes(precision: str) -> tuple[str, ...]:
    """A precision, and what engines with master copies take in its place."""
    return tuple(filter(None, (precision, _MASTERS.get(precision))))


def usual_recipes(base: Plan) -> tuple[str, ...]:
    """Where no precision is said: what ``memcalc.search`` takes for this job, and the same with master copies."""
    usual = default_precisions(base)[0]
    return (usual, f"{usual}-master") if f"{usual}-master" in PRECISIONS else recipes(usual)


def _pointless(plan: Plan) -> str:
    if plan.strategy_row.replicates and plan.shards == plan.ranks:
        twin = plan.strategy.replace("hybrid-shard-grad", "shard-grad").replace("hybrid", "full")
        return f"one group of ranks is {twin}; more come with --nodes or --replicas"
    if plan.strategy_row.one_process and plan.nodes > 1:
        return "one process drives the GPUs of one machine only"
    return ""


def _line(plan: Plan) -> Line:
    found = estimate(plan)
    # A time with offloaded states would lack the link to the host and the CPU's step.
    seconds = None if plan.offload.on else step_time(plan).seconds_per_sample
    return Line(
        plan=plan,
        by_category=found.peak.by_category,
        most={name: max(found.timeline.at_moment(moment, name) for moment in MOMENTS) for name in CATEGORIES},
        peak=found.peak.bytes,
        device=found.device.high,
        sent=sent_bytes(plan),
        collectives=tuple(collectives(plan)),
        seconds=seconds,
        bound=plan.strategy_row.engine != "torch" or plan.strategy_row.one_process,
        counted=(counted := activations_known(plan)),
        limits=tuple(limits(plan)),
        smallest=_smallest(plan) if counted and not limits(plan) else None,
        verdict=found.verdict,
    )


def _smallest(plan: Plan) -> str | None:
    open_plan = replace(plan, gpu=None) if plan.gpu else plan
    bfloat16 = plan.precision_row.compute == "bfloat16"
    cards = holding_gpus(open_plan, estimate(open_plan).reserved)
    return next((gpu.name for gpu, sure in cards if sure and (gpu.bfloat16 or not bfloat16)), None)


def divided(row: Strategy) -> str:
    """What a strategy divides over ranks, in words.

    >>> divided(STRATEGIES["fsdp-shard-grad-op"]), divided(STRATEGIES["ddp"])
    ('parameters between steps, gradients, states', 'nothing')
    """
    between = row.shards_parameters and not row.reshards
    parts = {
        "parameters between steps" if between else "parameters": row.shards_parameters,
        "gradients": row.shards_gradients,
        "states": row.shards_optimizer,
    }
    return ", ".join(name for name, divides in parts.items() if divides) or "nothing"
