"""``memcalc recommend``: how a recommendation is shown."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from memcalc.cli.confirmed import as_dict, numbers_of
from memcalc.cli.plans_table import also, checkpointing, clock, hours, knobs, plans_table, times_known
from memcalc.hints import CLOSE_SAID, close, frozen
from memcalc.precision import PRECISIONS
from memcalc.tables import columns, folded, heading, printable, render
from memcalc.units import format_both, format_bytes, format_count

if TYPE_CHECKING:
    from memcalc.confirmation import Confirmation
    from memcalc.plan import Plan
    from memcalc.recommend import Choice, Recommendation, Refusal
    from memcalc.search import Search

__all__ = ["brief", "follow_up", "nothing", "shown"]


def shown(found: Recommendation, confirmed: list[Confirmation], format: str, tokens: int, explain: bool) -> str:
    """The answer as text of one format; ``tokens`` are of the whole training, 0 where they are not said."""
    if format == "json":
        return json.dumps(as_dict(found, confirmed, tokens), indent=2)
    if format == "csv":
        return _csv(found, confirmed, tokens)
    parts, room, missing = [_title(found, format)], columns() if format == "table" else None, list[str]()
    if found.plans:
        table, missing = plans_table(found.plans, tokens, format, room)
        parts.append(table)
    mark = "- " if format == "markdown" else "  "
    lines = [
        *numbers_of(confirmed),
        *_reasons(found.plans, "also" not in missing),
        *_others(found, tokens),
        *_refusals(found),
        *_remarks(found),
        *_legend(found, missing),
    ]
    if explain:
        from memcalc.cli.explained import explained

        lines += explained(found)
    parts.append("\n".join(folded(printable(line), mark, room) for line in lines))
    return "\n\n".join(part for part in parts if part)


def _csv(found: Recommendation, confirmed: list[Confirmation], tokens: int) -> str:
    names = ["also", "runnable", "peak_bytes", "needed_bytes", "headroom_bytes"]
    numbers: list[tuple[object, ...]] = [
        (also(c.plan), not c.plan.untrained, c.peak, c.needed, c.headroom, *clock(c, tokens).values(),
         round(c.speed, 4), c.reason)
        for c in found.plans
    ]  # fmt: skip
    if found.plans:
        names += clock(found.plans[0], tokens)
    names += ["relative_speed", "reason"]
    if confirmed:
        names += ["rehearsed_peak_bytes", "rehearsed_needed_bytes"]
        by_both = {c.choice.plan.to_json(): (c.peak, c.needed) for c in confirmed}
        both = [by_both.get(c.plan.to_json(), (None, None)) for c in found.plans]
        numbers = [(*n, *more) for n, more in zip(numbers, both, strict=True)]
    rows = [(*knobs(c.plan).values(), *n) for c, n in zip(found.plans, numbers, strict=True)]
    chosen = [name.replace(" ", "_") for name in knobs(found.search.base)]
    return render(rows, [*chosen, *names], "csv")


def _title(found: Recommendation, format: str) -> str:
    base, job = found.search.base, found.search
    first = "no plan fits" if not found.plans else f"{found.plans[0].plan.strategy}: {brief(found.plans[0].plan)}"
    title = f"**{printable(first)}**" if format == "markdown" else heading(printable(first))
    count = sum(weight.numel for weight in base.family.weights(base.model))
    where = f"{format_both(job.capacity)} each" if base.device == "cuda" else f"{format_both(job.capacity)} of RAM"
    free = f" of which {format_both(job.keep_free)} stay free" if job.keep_free else ""
    ranks = " or ".join(map(str, job.ranks)) if len(job.ranks) < 4 else f"{job.ranks[0]} to {job.ranks[-1]}"
    machines = max(map(job.nodes, job.ranks))
    over = f" on {'up to ' * (len(job.ranks) > 1)}{machines} machines" * (machines > 1)
    place = (
        f"{ranks} x {base.gpu or 'GPU'}{over}"
        if base.device == "cuda"
        else f"{ranks} rank{'s' * (job.ranks[-1] > 1)} on CPU cores"
    )
    size = f"{format_count(count)} parameters"
    name = size if base.model.name == size else f"{base.model.name}: {size}"
    return f"{title}\n{printable(f'{name} on {place}, {where}{free}; {format_count(found.tried)} plans tried')}"


def brief(plan: Plan) -> str:
    """A plan in a line."""
    batch = f"micro batch {plan.micro_batch}" if plan.micro_batch else "micro batch not given"
    times = f" x {plan.accumulation}" if plan.accumulation > 1 else ""
    more = "" if also(plan) == "-" else f", {also(plan)}"
    return f"{batch}{times} on {plan.ranks} rank{'s' * (plan.ranks > 1)}, {plan.precision}, checkpointing {checkpointing(plan)}{more}"


def _reasons(plans: tuple[Choice, ...], as_column: bool) -> Iterator[str]:
    """Each plan's own reason, with what else is not as usual unless that is a column of the table; how several of them are
    carried out alike is said once."""
    from memcalc.reasons import FORMS

    of = {form: [str(n) for n, choice in enumerate(plans, 1) if form in choice.reason] for form in FORMS}
    shared = {form: numbers for form, numbers in of.items() if len(numbers) > 1}
    for number, choice in enumerate(plans, 1):
        reason = choice.reason
        for form in shared:
            reason = reason.replace(f"; {form}", "")
        more = "" if as_column or also(choice.plan) == "-" else f" ({also(choice.plan)})"
        yield f"{number}{more}: {reason}"
    for form, numbers in shared.items():
        yield f"{', '.join(numbers)}: {form}"


def _others(found: Recommendation, tokens: int) -> Iterator[str]:
    """The plan on fewest ranks, and what would change the answer."""
    if found.fewest is not None and len(found.search.ranks) > 1:
        few = found.fewest
        cost = f", {hours(few, tokens)} GPU-hours" if tokens and times_known(few.plan) else ""
        yield f"fewest ranks: {few.plan.strategy}, {brief(few.plan)}, at {few.speed:.2f} of the speed{cost}"
    if (change := found.change) is not None and (change.card or change.plan.device == "cpu"):  # else nobody can have it
        has = f" ({change.card} has so much)" if change.card else ""
        yield (
            f"what would change it: {format_both(change.missing)} more on each{has}, for {change.plan.strategy}, "
            f"{brief(change.plan)}, {change.speed - 1:.0%} faster"
        )


def _refusals(found: Recommendation) -> Iterator[str]:
    """The closest plan of each strategy of which no form fits."""
    works: set[tuple[str, int]] = set()
    for refusal in found.refused:
        key = (refusal.plan.strategy, refusal.plan.ranks)
        if not refusal.has_others and key not in works:
            works.add(key)
            yield f"does not fit: {_breaks(refusal)}"


def _remarks(found: Recommendation) -> Iterator[str]:
    from memcalc.assumptions import activations_known, in_one_machine, limits, measured_here, uncounted

    tried = [*(choice.plan for choice in found.plans), *(refusal.plan for refusal in found.refused)]
    if not activations_known(found.search.base):
        yield "activations are not counted because no shape was given"
    yield from uncounted(found.search.base)
    yield from measured_here(found.search.base)
    yield from _frozen_in(found.search)
    yield from filter(None, [frozen(found.search.base)])
    most = max(tried, key=lambda plan: plan.ranks)
    yield from in_one_machine(most)
    for limit in dict.fromkeys(limit for plan in tried for limit in limits(plan)):
        names = dict.fromkeys(plan.strategy for plan in tried if limit in limits(plan))
        yield f"{', '.join(names)}: {limit}"
    for said in dict.fromkeys(plan.untrained for plan in tried if plan.untrained):
        yield f"estimated only: memcalc cannot train {said}"
    yield from _close(found)


def _legend(found: Recommendation, missing: list[str]) -> Iterator[str]:
    """What the columns mean, and which a terminal had no room for."""
    from memcalc.recommend import TIE

    if found.plans:
        meanings = {
            "peak": "peak is allocated memory",
            "headroom": "headroom is what is left at the high end of what the device may show",
            "step": _worth(found.plans[0].plan),
            "speed": f"speed is samples per second against the fastest plan that fits; of plans within {TIE:.0%} the simplest goes first",
        }
        yield "; ".join(said for name, said in meanings.items() if name not in missing)
    if lost := [name for name in missing if name != "also"]:
        yield f"{', '.join(lost)} had no room on this terminal: --format markdown has all"


def _worth(plan: Plan) -> str:
    """How often a predicted range held what was measured, or why there is none."""
    from memcalc.coefficients import coverage

    if not times_known(plan):
        return (
            "no seconds are said, because CPU cores differ and no published run was on one: memcalc calibrate measures "
            "these"
        )
    if plan.device == "cpu":
        return "step is a range, by what memcalc calibrate measured here; no published run says how often it holds"
    found = coverage()
    (_, fitted), (count, others) = found["calibration"], found["never used"]
    return f"step is a range, predicted: it holds {fitted:.0f} % of the published runs it was fitted on, and {others:.0f} % of {count} others"


def _close(found: Recommendation) -> Iterator[str]:
    """Plans that leave next to nothing of the card."""
    job = found.search
    numbers = [str(n) for n, choice in enumerate(found.plans, 1) if close(choice.headroom, job.capacity)]
    if numbers and not job.keep_free and job.base.device == "cuda":
        yield f"{', '.join(numbers)}: {CLOSE_SAID}"


def _frozen_in(job: Search) -> Iterator[str]:
    """What frozen weights and their adapters are held in, where they differ."""
    adapter, rows = job.base.adapter, [PRECISIONS[name] for name in job.precisions]
    low = [row for row in rows if row.weights != "float32"]
    if adapter.freezes and adapter.dtype == "float32" and low and adapter.quantize != "none":
        yield (
            f"what is not quantised is held in {low[0].weights} and adapters in float32; PEFT holds both in float32: "
            f"--precision amp-{low[0].name}"
        )
    elif adapter.freezes and adapter.dtype == "float32" and low:
        yield (
            f"frozen weights are held in {low[0].weights} and adapters in float32, as PEFT does; "
            f"--precision amp-{low[0].name} holds both in float32"
        )


def _breaks(refusal: Refusal) -> str:
    """Which plan, how much too much, and the largest term at its peak."""
    plan = refusal.plan
    return (
        f"{plan.strategy}, {brief(plan)}: at the high end at least {format_bytes(refusal.missing)} too much; at the peak in "
        f"{refusal.moment} the largest part is {refusal.category}, {format_both(refusal.category_bytes)}"
    )


def nothing(found: Recommendation) -> str:
    """Why nothing fits, and what would do."""
    from memcalc.remedies import remedies

    cures = remedies(found.search)
    cure = f"what would do: {', or '.join(cures)}" if cures else "no single change would do; take a smaller model"
    return f"nothing fits; the closest is {_breaks(found.refused[0])}; {cure}"


def follow_up(plan: Plan, saved: Path | None) -> Iterator[str]:
    """What to type next."""
    yield "next:" if saved else "next: add --save-plan plan.json, then"
    name = shlex.quote(str(saved or "plan.json"))
    yield f"  memcalc estimate --plan {name} --explain"
    if plan.untrained:
        yield f"  memcalc can estimate it, but cannot train {plan.untrained}"
    elif plan.model.family != "size":
        yield f"  memcalc launch {name} --steps 200 --out run"
