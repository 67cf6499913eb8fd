"""The parts of the page: each a pure function from what is known to HTML."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from memcalc.compare import REST, Comparison, Row
from memcalc.estimate import Estimate
from memcalc.palette import ORDER
from memcalc.pictures.page.html import Html, element, join, table
from memcalc.pictures.page.timeline import readout, timeline
from memcalc.pictures.step import Step
from memcalc.plan import Plan
from memcalc.recommend import Recommendation
from memcalc.timeline import MOMENTS
from memcalc.units import format_both, format_bytes, format_count, things

__all__ = ["alternatives", "assumptions", "breakdown", "head", "measured", "meters", "reproduce", "tensors", "the_step"]

Tensor = tuple[str, str, str, int, int]
"""Of tensors alive at the peak: name, category, each, how many, bytes together."""

_VERDICTS = {
    "fits": ("good", "Fits on {}"),
    "tight": ("warn", "Tight on {}: it may fit or not"),
    "does-not-fit": ("bad", "Does not fit on {}"),
    "unknown": ("none", "Whether it fits on {} is not known"),
}

_NO_CARD = {
    "cuda": "No card was named, so there is no verdict",
    "cpu": "It runs on CPU cores: memcalc check says whether it fits in the RAM of a machine",
}


def head(figure: Step, run: Comparison | None) -> Html:
    """The answer in three lines."""
    found, plan = figure.estimate, figure.estimate.plan
    kind, words = _VERDICTS[found.verdict]
    verdict = words.format(plan.gpu) if plan.gpu else _NO_CARD[plan.device]
    peak = f"Peak {format_both(found.peak.bytes)} allocated, in the moment {found.peak.moment}"
    parts = [
        element("h1", plan.model.name),
        element("p", ", ".join(_recipe(found)), class_="muted"),
        element("p", verdict, class_=f"verdict {kind}", id="verdict"),
        element("p", peak, class_="big"),
    ]
    if figure.capacity is not None:
        low, high = (format_bytes(size) for size in (found.device.low, found.device.high))
        ends = low if low == high else f"{low} to {high}"
        parts.append(element("p", f"The device shows {ends}; the run can use {format_both(figure.capacity)}."))
    if run is not None:
        parts.append(element("p", f"Measured: {format_both(run.peak.measured)}, {_off(run.peak)} off the estimate."))
    return element("header", *parts)


def _recipe(found: Estimate) -> Iterator[str]:
    plan = found.plan
    yield f"{format_count(sum(weight.numel for weight in plan.weights))} parameters"
    yield f"{_arranged(plan)} on {plan.ranks} rank{'s' * (plan.ranks > 1)}"
    yield plan.precision
    yield f"{plan.optimizer} ({plan.optimizer_kind})"
    if plan.micro_batch:
        yield f"micro batch {plan.micro_batch}" + f" × {plan.accumulation}" * (plan.accumulation > 1)
    if plan.tokens:
        yield things(plan.tokens, "token")
    yield f"checkpointing {('none', 'full')[plan.checkpoint_every] if plan.checkpoint_every < 2 else f'every {plan.checkpoint_every}'}"


_METERS = {
    "allocated": "torch.cuda.max_memory_allocated",
    "reserved": "torch.cuda.max_memory_reserved",
    "device": "what nvidia-smi shows",
    "host": "buffers counted in RAM, not all of the process",
}


def meters(figure: Step) -> Html:
    """Each meter with a bar against the card."""
    found = figure.estimate
    on_cpu = found.plan.device == "cpu"
    sizes = {
        "allocated": (found.peak.bytes, found.peak.bytes),
        "reserved": (found.reserved.low, found.reserved.high),
        "device": (found.device.low, found.device.high),
        "host": (found.host, found.host),
    }
    whole = max([figure.capacity or 0, *(high for name, (_, high) in sizes.items() if name != "host")], default=1)
    items = []
    for name, (low, high) in sizes.items():
        if on_cpu and name in ("reserved", "device"):
            continue
        text = format_bytes(low) if low == high else f"{format_bytes(low)} to {format_bytes(high)}"
        binary = " to ".join(dict.fromkeys(format_bytes(size, binary=True) for size in (low, high)))
        what = "all tensors" if on_cpu and name == "allocated" else _METERS[name]
        parts = [f"{name} ", element("b", text), element("small", f"{binary} · {what}")]
        if name != "host":
            parts.append(_bar(low, high, whole, figure.capacity or 0))
        items.append(element("li", *parts))
    made = element("ul", *items, class_="meters")
    if figure.capacity is None:
        return _section("In the meters", made)
    note = f"Dark up to the least, pale up to the most; the mark is what {found.plan.gpu} has for it."
    return _section("In the meters", join([made, element("p", note, class_="muted")]))


def _bar(low: int, high: int, whole: int, card: int) -> Html:
    sure, most, edge = (1000 * size // max(whole, 1) for size in (low, high, card))
    parts = [element("rect", x=0, y=0, width=sure, height=10, class_="sure")]
    if most > sure:
        parts.append(element("rect", x=sure, y=0, width=most - sure, height=10, class_="range"))
    if card:
        parts.append(element("rect", x=min(edge, 996), y=0, width=4, height=10, class_="limit"))
    return element("svg", *parts, viewBox="0 0 1000 10", preserveAspectRatio="none", class_="bar", aria_hidden="true")


def the_step(figure: Step) -> Html:
    """The timeline, what moves through it, and what it shows in words."""
    notes = ["From left to right: the order of allocations and frees, not seconds. Point at it, or move the slider."]
    if figure.capacity is not None and not figure.near:
        times = figure.capacity / max(figure.largest, 1)
        notes.append(f"{figure.estimate.plan.gpu} has {format_bytes(figure.capacity)}, {times:.0f} times the peak.")
    lines = {"measured": "The line is what was measured.", "rehearsal": "The dotted line is a rehearsal's."}
    notes += [lines[each.name] for each in figure.curves]
    notes += [f"{figure.drawn}."] * bool(figure.drawn)
    said = element("details", element("summary", "The figure in words"), element("p", figure.text()))
    caption = element("figcaption", " ".join(notes))
    return _section("One step", element("figure", timeline(figure), readout(figure), caption, said))


def breakdown(found: Estimate) -> Html:
    """The most of each category in each moment."""
    line = found.timeline
    moments = [name for name in MOMENTS if name in found.peak.by_moment]
    rows = []
    for name in reversed(ORDER):
        sizes = [line.at_moment(moment, name) for moment in moments]
        if any(sizes):
            rows.append([name, *map(format_bytes, sizes)])
    rows.append(["at once, at most", *(format_bytes(found.peak.by_moment[moment]) for moment in moments)])
    made = table("the most of each category within each moment", ["", *moments], rows, right=range(1, len(moments) + 1))
    return _section("By category and moment", made)


def tensors(rows: Sequence[Tensor], shown: int = 12) -> Html:
    """The largest tensors at the peak."""
    cells = [(name, kind, each, str(count), format_bytes(size)) for name, kind, each, count, size in rows[:shown]]
    rest = sum(size for *_, size in rows[shown:])
    if rest:
        cells.append((f"{len(rows) - shown} more", "", "", "", format_bytes(rest)))
    heads = ("tensor", "category", "each", "count", "together")
    return _section("Largest at the peak", table("tensors alive at the peak", heads, cells, right=(3, 4)))


def alternatives(found: Recommendation | str) -> Html:
    """Other plans for the same job that fit, or why there are none."""
    title = "What else would fit"
    if isinstance(found, str):
        return _section(title, element("p", found))
    if not found.plans:
        return _section(title, element("p", f"None of {found.tried} plans tried fits."))
    rows = [
        (
            _arranged(each.plan),
            ("none", "full")[each.plan.checkpoint_every] if each.plan.checkpoint_every < 2 else str(each.plan.checkpoint_every),
            f"{each.plan.micro_batch} × {each.plan.accumulation}",
            format_bytes(each.peak),
            format_bytes(each.headroom),
            f"{each.speed:.2f}",
            each.reason,
        )
        for each in found.plans
    ]  # fmt: skip
    heads = ("strategy", "checkpointing", "micro batch", "peak", "headroom", "speed", "why")
    said = f"the same samples a step, precision and GPUs; {found.tried} plans tried; speed is predicted, against the fastest"
    return _section(title, table(said, heads, rows, right=(2, 3, 4, 5)))


def _arranged(plan: Plan) -> str:
    """A strategy, and over how many ranks a model is divided beside it."""
    degrees = (("tensor", plan.layout.tensor), ("pipeline", plan.layout.pipeline))
    divided = ", ".join(f"{name} {degree}" for name, degree in degrees if degree > 1)
    return f"{plan.strategy} ({divided})" if divided else plan.strategy


def measured(run: Comparison) -> Html:
    """The estimate against a run, of the fullest rank."""
    rows = [row for row in run.rows if row.rank == run.fullest]
    cells = [
        (
            row.category if row.category != "all" else row.meter,
            row.moment if row.category == "all" or row.category == REST else "before the step",
            format_bytes(row.low) if row.low == row.high else f"{format_bytes(row.low)} to {format_bytes(row.high)}",
            format_bytes(row.measured),
            f"{row.error_bytes:+,} B",
            _off(row),
        )
        for row in rows
    ]
    states = "equal to the byte" if run.states_equal() else "not equal"
    instruments = ", ".join(dict.fromkeys(row.instrument for row in rows))
    notes = [
        f"Parameters, gradients and optimizer states: {states}.",
        f"Measured on rank {run.fullest} of {len(run.measurement.ranks)}, the fullest, by: {instruments}.",
    ]
    if run.first_step_only:
        notes.append("Only the first step was metered, which lacks what lives from the second on.")
    heads = ("", "moment", "estimated", "measured", "error", "of it")
    made = table("the error is estimate minus measurement", heads, cells, right=(2, 3, 4, 5))
    return _section("Estimated against measured", join([made, *(element("p", note) for note in notes)]))


def _off(row: Row) -> str:
    if row.error_percent is None:
        return "-"
    return f"{row.error_percent:+.2f} %".replace("+0.00", "0.00").replace("-0.00", "0.00")


def assumptions(found: Estimate) -> Html:
    """What the estimate takes for granted."""
    return _section("Taken for granted", element("ul", *(element("li", line) for line in found.assumptions)))


def reproduce(command: str, plan: str, version: str, more: Sequence[str]) -> Html:
    """The command that made the page, and the plan as a file."""
    parts = [
        element("pre", element("code", command, id="command"), tabindex="0"),
        element("button", "Copy", type="button", data_copy="command", hidden=True),
        element("p", "Or save the plan as plan.json, and then:"),
        element("pre", element("code", "\n".join(more)), tabindex="0"),
        element("details", element("summary", "plan.json"), element("pre", element("code", plan, id="plan"), tabindex="0"),
                element("button", "Copy", type="button", data_copy="plan", hidden=True)),
        element("p", f"memcalc {version}", class_="muted"),
    ]  # fmt: skip
    return _section("Again", join(parts))


def _section(title: str, content: Html) -> Html:
    return element("section", element("h2", title), content)
