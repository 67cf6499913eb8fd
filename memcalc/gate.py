"""Does the high end of a plan fit, on its card or in a machine's RAM? The answer that a build can stop at."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from memcalc.assumptions import activations_known
from memcalc.errors import InputError
from memcalc.estimate import Estimate, usable_bytes
from memcalc.hints import hints, machine_host
from memcalc.plan import Plan
from memcalc.units import format_both, format_bytes

__all__ = ["Gate", "gate"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Gate:
    """What a plan may need of a card, what it may take, and the verdict. Bytes."""

    verdict: str
    """``fits``, ``tight`` (between the bounds), ``does-not-fit``, or ``unknown`` where not all of it is counted."""
    low: int
    high: int
    """What the device shows, at the least and at the most."""
    limit: int
    """What may be taken: the card's memory less what shall stay free; of RAM the part of one rank."""
    gpu: str
    """Blank for a run on CPU cores."""
    said: str
    """The verdict in a line."""
    hints: tuple[str, ...] = ()
    """What it has to be read with, and what could be done about it, in sentences."""

    @property
    def passes(self) -> bool:
        """The high end of the estimate fits."""
        return self.verdict == "fits"

    def to_dict(self) -> dict[str, Any]:
        """As plain JSON values."""
        return {
            "verdict": self.verdict, "passes": self.passes, "needed_low_bytes": self.low, "needed_high_bytes": self.high,
            "limit_bytes": self.limit, "gpu": self.gpu, "line": self.said,
            "hints": list(self.hints),
        }  # fmt: skip


def gate(found: Estimate, keep_free: int = 0, ram: int = 0) -> Gate:
    """The verdict on an estimate with so many bytes of its card kept free; on CPU cores, of the ``ram`` of their machine,
    of which recommend's part is shared by the ranks. Raises InputError without a card, or without RAM.

    >>> from memcalc.estimate import estimate
    >>> from memcalc.models import MODELS
    >>> from memcalc.plan import Plan
    >>> plan = Plan(model=MODELS["gpt2"], tokens=1024, micro_batch=8, precision="amp-bf16", gpu="a100-40gb")
    >>> gate(estimate(plan)).verdict, gate(estimate(plan), keep_free=35 * 10**9).verdict
    ('fits', 'does-not-fit')
    """
    plan, row = found.plan, found.plan.gpu_row
    if plan.device == "cpu":
        return _in_ram(found, keep_free, ram)
    if row is None:
        raise InputError("it is not known what the plan should fit on; give --gpu NAME")
    there = usable_bytes(plan, row)
    if not 0 <= keep_free < there:
        raise InputError(f"{format_both(keep_free)} cannot be kept free of the {format_both(there)} of {row.name}")
    low, high, limit = found.device.low, found.device.high, there - keep_free
    verdict = found.verdict
    if low > limit and verdict != "unknown":
        verdict = "does-not-fit"
    elif high > limit and verdict == "fits":
        verdict = "tight"
    whole = f"the {format_both(limit)} that {row.name} has"
    if keep_free:
        whole = f"{format_both(limit)}: {row.name} less {format_bytes(keep_free)} that stay free"
    beside = [*hints(plan, verdict, high=high, limit=limit, keep_free=keep_free), machine_host(plan, found.host)]
    return replace(_gate(found, verdict, low, high, limit, whole), hints=tuple(filter(None, beside)))


def _in_ram(found: Estimate, keep_free: int, ram: int) -> Gate:
    # What recommend gives ranks on CPU cores, and what it counts of each: its process, too.
    from memcalc.fitting import needed_bytes
    from memcalc.search import RAM_SHARE

    plan = found.plan
    if not ram:
        raise InputError("this machine does not say how much RAM it has, so a run on its CPU cores cannot be checked")
    if not 0 <= keep_free < ram:
        raise InputError(f"{format_both(keep_free)} cannot be kept free of this machine's {format_both(ram)} of RAM")
    ranks = -(-plan.ranks // plan.nodes)
    limit = int((ram - keep_free) * RAM_SHARE) // ranks
    low, high = found.device.low, needed_bytes(plan, found.peak.bytes)
    verdict = "fits" if high <= limit else "does-not-fit" if low > limit else "tight"
    if verdict != "does-not-fit" and not (found.whole and _counted(plan)):
        verdict = "unknown"
    of_it = f" less {format_bytes(keep_free)} that stay free" if keep_free else ""
    each = "it" if ranks == 1 else f"each of {ranks} ranks"
    whole = f"the {format_both(limit)} that {each} may take of this machine's {format_both(ram)} of RAM{of_it}"
    return _gate(found, verdict, low, high, limit, whole)


def _counted(plan: Plan) -> bool:
    return bool(plan.model.module.factory) or activations_known(plan)


def _gate(found: Estimate, verdict: str, low: int, high: int, limit: int, whole: str) -> Gate:
    said = {
        "fits": f"fits: it needs up to {format_both(high)} of {whole}",
        "tight": f"may not fit: it needs {format_both(low)} to {format_both(high)} of {whole}",
        "does-not-fit": f"does not fit: it needs at least {format_both(low)} of {whole}",
        "unknown": f"not known to fit: what is counted needs {format_both(low)} to {format_both(high)} of {whole}, "
        "and not all of it is counted (memcalc estimate says what is not)",
    }[verdict]
    return Gate(verdict=verdict, low=low, high=high, limit=limit, gpu=found.plan.gpu or "", said=said)
