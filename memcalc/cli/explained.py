"""``memcalc recommend --explain``: where the time and the memory of the first plan go, and how the others fell."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from memcalc.cli.plans_table import times_known
from memcalc.units import format_both, format_count

if TYPE_CHECKING:
    from memcalc.recommend import Choice, Recommendation

__all__ = ["explained"]

PARTS = {
    "compute": "matrix products and attention",
    "recompute": "blocks computed again",
    "traffic": "what narrow products lose to memory",
    "pointwise": "norms, activations and the loss",
    "kernels": "fixed time of operations on the card",
    "hooks": "hooks of the engine",
    "tensor": "sent among ranks that share samples",
    "bubble": "pipeline stages waiting",
    "exposed": "sent for data parallel and not hidden",
    "optimizer": "the optimizer's step",
    "offload": "to and from the host",
}
"""Fields of a StepTime that add up to its total, but for what hides behind the host."""


def explained(found: Recommendation) -> Iterator[str]:
    """Lines for the first plan and for the search."""
    if found.plans:
        yield from _time(found.plans[0])
        yield from _memory(found.plans[0])
    looked = found.looked
    yield (
        f"of {format_count(looked.plans)} plans in {format_count(looked.structures)} structures: "
        f"{format_count(looked.by_states)} fell by an equal share of their states alone, {format_count(looked.by_forward)} by "
        f"what their first forward passes leave, {format_count(looked.refuted)} by their ledger; the ledgers of "
        f"{format_count(looked.ledgers)} were looked at; {format_count(looked.slower)} were left alone, for even at the "
        "largest micro batch left to them they are slower than what fits"
    )
    yield (
        "laws it rests on: a larger micro batch never needs less; layers that are alike allocate alike; at one micro "
        "batch nothing that computes again is faster"
    )


def _time(choice: Choice) -> Iterator[str]:
    time = choice.time
    parts = {said: float(getattr(time, name)) for name, said in PARTS.items() if getattr(time, name)}
    shares = [f"{said} {seconds / time.total:.0%}" for said, seconds in parts.items() if seconds / time.total >= 0.005]
    if times_known(choice.plan):
        yield f"time of 1: {time.total:.4g} s a step: {', '.join(shares)}; Python starting operations takes {time.host:.4g} s meanwhile"
    else:
        yield f"time of 1, in parts, for its seconds are not known here: {', '.join(shares)}"


def _memory(choice: Choice) -> Iterator[str]:
    from memcalc.peaks import fullest_of

    peak = fullest_of(choice.plan)
    parts = sorted(peak.by_category.items(), key=lambda item: -item[1])
    yield f"memory of 1, at the peak in {peak.moment}: {', '.join(f'{name} {format_both(size)}' for name, size in parts if size)}"
