"""``memcalc recommend``: its rehearsals, what it says of them, and all of it as JSON."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import click

from memcalc.cli.plans_table import clock
from memcalc.cli.progress import waiting
from memcalc.units import format_both, format_bytes

if TYPE_CHECKING:
    from memcalc.confirmation import Confirmation
    from memcalc.plan import Plan
    from memcalc.recommend import Choice, Recommendation
    from memcalc.rehearsal import Rehearsal

__all__ = ["as_dict", "confirm", "numbers_of"]


def confirm(found: Recommendation, brief: Callable[[Plan], str]) -> list[Confirmation]:
    """Rehearse until a plan fits, with a line before each that says the plan in ``brief``."""
    from memcalc.confirmation import confirmations
    from memcalc.rehearsal import rehearse

    def run(plan: Plan) -> Rehearsal:
        click.echo(f"memcalc: rehearses {plan.strategy}: {brief(plan)}", err=True)
        with waiting("still rehearses"):
            return rehearse(plan)

    return list(confirmations(found, run))


def numbers_of(confirmed: list[Confirmation]) -> Iterator[str]:
    """The ledger's peak beside the rehearsal's, plan by plan."""
    for number, each in enumerate(confirmed, 1):
        peak, ledger = format_both(each.peak), format_both(each.choice.peak)
        if each.rehearsal.source == "ledger":
            yield f"{number}: {each.rehearsal.remarks[0]}"
        elif each.fits:
            yield f"{number}: its rehearsal takes {peak} (ledger {ledger}) and fits"
        else:
            yield (
                f"{number}: fits by the ledger ({ledger}), but its rehearsal takes {peak} and up to "
                f"{format_bytes(each.needed)} of {format_bytes(each.limit)}: not taken"
            )


def _rehearsals(confirmed: list[Confirmation]) -> list[dict[str, Any]]:
    """What rehearsals say, in bytes."""
    return [
        {
            "source": each.rehearsal.source,
            "ledger_peak_bytes": each.choice.peak,
            "peak_bytes": each.peak,
            "needed_bytes": each.needed,
            "fits": each.fits,
        }
        for each in confirmed
    ]


def as_dict(found: Recommendation, confirmed: list[Confirmation], tokens: int = 0) -> dict[str, Any]:
    """A recommendation as plain JSON values, with what rehearsals say where there are any."""
    return {
        "capacity_bytes": found.search.capacity,
        "keep_free_bytes": found.search.keep_free,
        "tried": found.tried,
        **({"rehearsals": _rehearsals(confirmed)} if confirmed else {}),
        "plans": [_choice(each, tokens) for each in found.plans],
        "fewest": None if found.fewest is None else _choice(found.fewest, tokens),
        "change": None
        if found.change is None
        else {
            "plan": json.loads(found.change.plan.to_json()),
            "missing_bytes": found.change.missing,
            "relative_speed": found.change.speed,
            "smallest_gpu": found.change.card,
        },
        "looked": {**dataclasses.asdict(found.looked), "slower": found.looked.slower},
        "refused": [
            {
                "plan": json.loads(r.plan.to_json()),
                "peak_bytes": r.peak,
                "needed_bytes": r.needed,
                "missing_bytes": r.missing,
                "moment": r.moment,
                "largest": r.category,
                "largest_bytes": r.category_bytes,
            }
            for r in found.refused
        ],
    }


def _choice(c: Choice, tokens: int) -> dict[str, Any]:
    return {
        "plan": json.loads(c.plan.to_json()),
        "runnable": not c.plan.untrained,
        "peak_bytes": c.peak,
        "needed_bytes": c.needed,
        "headroom_bytes": c.headroom,
        "relative_speed": c.speed,
        **clock(c, tokens),
        "reason": c.reason,
    }
