"""Runs of which only the outcome is known: those that ran out of memory, and those that fitted.

A torch message is more than an outcome. What was allocated and what was tried are together a lower bound of the peak.
Rows whose model states alone exceed the card say little of an estimator, so the others, the *open* ones, are counted
apart.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from memcalc.bench.score import Score
from memcalc.timeline import CATEGORIES, MOMENTS, Timeline

__all__ = ["REACHES", "Outcomes", "outcomes", "states"]

REACHES = 0.97
"""The share of allocated and tried memory that an estimate must reach."""

_STATES = [CATEGORIES.index(name) for name in ("parameters", "gradients", "optimizer")]


def states(timeline: Timeline) -> int:
    """Bytes of parameters, gradients and optimizer states when the optimizer's step begins."""
    begun = np.flatnonzero(timeline.moment == MOMENTS.index("step"))
    upto = int(begun[0]) if len(begun) else len(timeline.delta)
    return int(timeline.delta[:upto][np.isin(timeline.category[:upto], _STATES)].sum())


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcomes:
    """How many boundary rows came out right; all of them are counts of rows that could be estimated."""

    state_bound: int
    """Out of memory, and the model states alone exceed the card."""
    open_ooms: int
    """Out of memory, and they do not."""
    open_refused: int
    """Of these, said ``does-not-fit`` or ``tight``."""
    fitted: int
    fitted_accepted: int
    """Of these, said ``fits`` or ``tight``."""
    messages: int
    """Out of memory, and the message says what was allocated and what was tried."""
    messages_reached: int
    """Of these, the estimated peak is at least REACHES of the two together."""

    def to_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__dataclass_fields__}


def outcomes(scores: Iterable[Score]) -> Outcomes | None:
    """Counted over the boundary rows among the scores; None where there are none.

    >>> oom = Score(id="a", metric="OOM", measured_gib=None, verdict="tight", needed_gib=10.0, allocated_gib=9.8)
    >>> found = outcomes([oom])
    >>> found.open_ooms, found.open_refused, found.messages_reached
    (1, 1, 1)
    """
    kept = [score for score in scores if score.metric in ("fits", "OOM") and score.skipped is None]
    if not kept:
        return None
    ooms = [score for score in kept if score.metric == "OOM"]
    free = [score for score in ooms if not score.state_bound]
    fitted = [score for score in kept if score.metric == "fits"]
    messages = [score for score in ooms if score.needed_gib is not None]
    return Outcomes(
        state_bound=len(ooms) - len(free),
        open_ooms=len(free),
        open_refused=sum(score.verdict in ("does-not-fit", "tight") for score in free),
        fitted=len(fitted),
        fitted_accepted=sum(score.verdict in ("fits", "tight") for score in fitted),
        messages=len(messages),
        messages_reached=sum((s.allocated_gib or 0) >= REACHES * (s.needed_gib or 0) for s in messages),
    )
