"""What a search may look at when its answer shall be written as a launch file: the plans that the file has words for."""

from __future__ import annotations

from dataclasses import replace

from memcalc.configs.emit import text_of
from memcalc.configs.write import FORMATS
from memcalc.errors import InputError, PlanError
from memcalc.plan import Plan
from memcalc.search import Search
from memcalc.strategies import STRATEGIES
from memcalc.structures import in_the_way, structures
from memcalc.training import Training

__all__ = ["narrowed"]

_COUNTS = ("micro_batch", "accumulation")
"""Fields whose size no file minds."""


def narrowed(job: Search, kind: str, *, named: bool) -> tuple[Search, tuple[str, ...]]:
    """The search among what a file of this kind can say, and the strategies it is left with.

    Where the strategies were not ``named`` and none of them can be said, those that can are searched; a script takes
    what memcalc trains. Raises InputError where nothing is left.
    """
    if kind not in FORMATS:
        return replace(job, runnable=True), job.strategies
    words = _Words(kind)
    found = replace(job, allows=words)
    if not (names := _names(found)):
        if named:
            able = [other for other in FORMATS if other != kind and _names(replace(job, allows=_Words(other)))]
            raise InputError(f"--emit {kind}: {words.lacks(job)}" + f"; take --emit {' or '.join(able)}" * bool(able))
        job = replace(job, strategies=tuple(row.name for row in STRATEGIES.values() if FORMATS[kind].takes(row)))
        found = replace(job, allows=words)
        if not (names := _names(found)):
            raise InputError(f"--emit {kind}: {words.lacks(job)}")
    return found, names


def _names(job: Search) -> tuple[str, ...]:
    made = {each.plan.strategy for each in structures(job)}
    return tuple(name for name in job.strategies if name in made)


class _Words:
    """Whether a file of one kind can say a plan; plans that differ in what no file minds are asked about once."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.known: dict[object, str] = {}
        """Why what is alike cannot be said; blank if it can."""

    def __call__(self, plan: Plan) -> bool:
        return not self.why(plan)

    def why(self, plan: Plan) -> str:
        """Why a plan cannot be said; blank if it can."""
        alike = tuple(getattr(plan, name) for name in Plan.__slots__ if name not in _COUNTS)
        if alike not in self.known:
            try:
                text_of(plan, self.kind, Training())
                self.known[alike] = ""
            except PlanError as error:
                self.known[alike] = str(error)
        return self.known[alike]

    def lacks(self, job: Search) -> str:
        """Why the first plan of a search cannot be said, or is none."""
        first = next(structures(replace(job, allows=None)), None)
        return (self.why(first.plan) if first else in_the_way(job)) or "no plan can be made of these choices"
