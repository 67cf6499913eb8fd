"""Recommended plans held against a rehearsal: the first that fits by both is the one to take."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from memcalc.plan import Plan
from memcalc.recommend import Choice, Recommendation, needed_bytes
from memcalc.rehearsal import Rehearsal, rehearse

__all__ = ["Confirmation", "confirmations"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Confirmation:
    """A recommended plan and what its rehearsal says."""

    choice: Choice
    rehearsal: Rehearsal
    peak: int
    """Allocated bytes of the rehearsal's fullest moment, those before the steady step included."""
    needed: int
    """High end of what the device (or, on a CPU, the process) uses by the rehearsal, in bytes."""
    limit: int
    """Bytes there are."""

    @property
    def fits(self) -> bool:
        return self.needed <= self.limit


def confirmations(found: Recommendation, run: Callable[[Plan], Rehearsal] = rehearse) -> Iterator[Confirmation]:
    """Rehearse the plans in their order up to the first that fits; what is given last fits, if any does."""
    for choice in found.plans:
        rehearsal = run(choice.plan)
        before = rehearsal.measurement.init_peak if rehearsal.measurement else 0
        peak = max(rehearsal.peak.bytes, before or 0)
        needed = needed_bytes(choice.plan, peak)
        if choice.plan.device == "cuda" and rehearsal.device:
            needed = max(needed, rehearsal.device.high)
        one = Confirmation(
            choice=choice, rehearsal=rehearsal, peak=peak, needed=needed, limit=found.search.limit(choice.plan)
        )
        yield one
        if one.fits:
            return
