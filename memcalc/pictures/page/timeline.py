"""A step's timeline as inline SVG, with the numbers that the page's script shows for each of its columns."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from memcalc.palette import CATEGORY
from memcalc.pictures.page.html import Html, data, element, join
from memcalc.pictures.step import Step
from memcalc.units import format_bytes

__all__ = ["COLUMNS", "readout", "style", "timeline"]

COLUMNS = 360
HEIGHT = 1000
"""The figure's own units: one to a column across, and 1000 from nothing to its top."""

_ROOM = 1.08
"""Above the highest thing that is drawn."""
_NARROW = 0.09
"""A phase with less of the width has its name on wide pages only."""
_HIDDEN = 0.035


def timeline(figure: Step) -> Html:
    """The figure, its axis, and the slider that moves through it."""
    count = len(figure.layers.event)
    svg = element(
        "svg", *_areas(figure), *_curves(figure), *_card(figure), *_cursor(figure), viewBox=f"0 0 {max(count, 1)} {HEIGHT}",
        preserveAspectRatio="none", role="img", aria_label=figure.text(), id="step",
    )  # fmt: skip
    names = [
        element("span", phase.moment, class_=f"moment m{index}{' narrow' * (phase.right - phase.left < _NARROW)}")
        for index, phase in enumerate(figure.layers.phases)
        if phase.right - phase.left > _HIDDEN
    ]
    sizes = [element("span", label, class_=f"size s{index}") for index, (label, _) in enumerate(_sizes(figure))]
    slider = element(
        "input", type="range", id="at", min=0, max=max(count - 1, 0), value=figure.layers.peak, step=1,
        aria_label="Position in the step",
    )  # fmt: skip
    return join([
        element("div", svg, *sizes, class_="plot"),
        element("div", *names, class_="moments", aria_hidden="true"),
        slider,
        data("columns", _data(figure)),
    ])  # fmt: skip


def style(figure: Step) -> str:
    """Rules for this figure's places and colours, which no attribute may hold where a policy forbids inline styles."""
    rules = [f".c-{name}{{fill:{colour};background:{colour}}}" for name, colour in CATEGORY.items()]
    for index, phase in enumerate(figure.layers.phases):
        rules.append(f".m{index}{{left:{100 * phase.left:.2f}%;width:{100 * (phase.right - phase.left):.2f}%}}")
    for index, (_, size) in enumerate(_sizes(figure)):
        rules.append(f".s{index}{{bottom:{100 * size / _top(figure):.2f}%}}")
    return "\n".join(rules)


def readout(figure: Step) -> Html:
    """A table of categories: where the slider stands, at the peak, and the most at any point; the first is the script's."""
    found, layers = figure.estimate.peak, figure.layers

    def row(swatch: Html, name: str, key: str, peak: int, most: int) -> Html:
        cells = [
            element("td", format_bytes(peak), class_="n", id=f"now-{key}"),
            element("td", format_bytes(peak), class_="n"),
            element("td", format_bytes(most), class_="n most"),
        ]
        return element("tr", element("th", swatch, name, scope="row"), *cells)

    rows = [
        row(element("span", class_=f"swatch c-{name}"), name, name, found.by_category[name], figure.most(name))
        for name in reversed(figure.categories)
    ]
    rows.append(row(Html(""), "in use", "total", found.bytes, found.bytes))
    for each in figure.curves:
        now = "" if each.live is None else format_bytes(int(each.live[layers.peak]))
        cells = [
            element("td", now, class_="n", id=f"now-{each.name}"),
            element("td", format_bytes(each.peak), class_="n"),
            element("td", format_bytes(each.peak), class_="n most"),
        ]
        rows.append(element("tr", element("th", each.name, scope="row"), *cells))
    heads = [element("th", text, scope="col", class_=kind) for text, kind in _HEADS]
    moment = layers.moments[layers.peak] if layers.moments else ""
    now = element("output", f"{moment}: {format_bytes(found.bytes)}", id="now", for_="at", aria_live="polite")
    body = element("table", element("thead", element("tr", *heads)), element("tbody", *rows), class_="readout")
    return join([element("p", now, class_="now"), body])


_HEADS = (("category", None), ("here", "n"), ("at the peak", "n"), ("at most", "n most"))


def _top(figure: Step) -> float:
    return max(figure.top * _ROOM, 1.0)


def _y(figure: Step, size: int) -> str:
    return f"{HEIGHT * (1 - size / _top(figure)):.1f}"


def _areas(figure: Step) -> list[Html]:
    """A stack of areas with level steps, one for each category."""
    made, below = [], np.zeros(len(figure.layers.event), dtype=np.int64)
    for name in figure.categories:
        above = below + figure.of(name)
        there = _steps(figure, above)
        back = _steps(figure, below)[::-1]
        made.append(element("polygon", points=" ".join([*there, *back]), class_=f"c-{name}"))
        below = above
    return made


def _steps(figure: Step, sizes: NDArray[np.int64], first: int = 0) -> list[str]:
    """Corners of a line with level steps, from column ``first`` on; equal neighbours share one."""
    if not len(sizes):
        return []
    edges = [0, *(np.flatnonzero(np.diff(sizes)) + 1).tolist(), len(sizes)]
    return [
        f"{first + x},{_y(figure, int(sizes[left]))}"
        for left, right in zip(edges, edges[1:], strict=False)
        for x in (left, right)
    ]


def _curves(figure: Step) -> list[Html]:
    made = []
    for each in figure.curves:
        if each.live is not None:
            known = int(np.flatnonzero(each.live >= 0)[0])
            points = " ".join(_steps(figure, each.live[known:], known))
            made.append(element("polyline", points=points, class_=f"curve {each.name}"))
            continue
        for phase in figure.layers.phases:
            if phase.moment in each.by_moment:
                y = _y(figure, each.by_moment[phase.moment])
                x = [f"{edge * len(figure.layers.event):.1f}" for edge in (phase.left, phase.right)]
                made.append(element("line", x1=x[0], x2=x[1], y1=y, y2=y, class_=f"curve {each.name}"))
    return made


def _card(figure: Step) -> list[Html]:
    lines = [
        element("line", x1=(x := f"{phase.left * len(figure.layers.event):.1f}"), x2=x, y1=0, y2=HEIGHT, class_="edge")
        for phase in figure.layers.phases[1:]
    ]
    if not figure.near or figure.capacity is None:
        return lines
    y = _y(figure, figure.capacity)
    return [*lines, element("line", x1=0, x2=len(figure.layers.event), y1=y, y2=y, class_="card")]


def _cursor(figure: Step) -> list[Html]:
    x = figure.layers.peak + 0.5
    return [element("line", x1=x, x2=x, y1=0, y2=HEIGHT, class_="cursor", id="cursor")]


def _sizes(figure: Step) -> list[tuple[str, int]]:
    """Levels with a label: the card, or how far it is above; the peak."""
    found = figure.estimate
    sizes = [(f"peak {format_bytes(found.peak.bytes)}", found.peak.bytes)]
    if figure.capacity is not None and figure.near:
        sizes.append((f"{found.plan.gpu} {format_bytes(figure.capacity)}", figure.capacity))
    return sizes


def _data(figure: Step) -> dict[str, Any]:
    layers = figure.layers
    return {
        "peak": layers.peak,
        "moments": list(layers.moments),
        "names": list(layers.names),
        "held": {name: figure.of(name).tolist() for name in figure.categories},
        "curves": {each.name: each.live.tolist() for each in figure.curves if each.live is not None},
    }
