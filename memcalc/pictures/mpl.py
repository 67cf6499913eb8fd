"""Figures as PNG and SVG. The only module that imports matplotlib, and only when a figure is drawn."""

from __future__ import annotations

import html
import io
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memcalc.errors import InputError, shorten
from memcalc.files import check_output, write_bytes
from memcalc.palette import CATEGORY, DARK, LIGHT, SERIES, Surface
from memcalc.pictures.step import Step
from memcalc.pictures.sweep import LABEL, Sweep
from memcalc.tables import printable
from memcalc.units import decimal_unit, format_both, format_bytes, format_count, things

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["COLUMNS", "SUFFIXES", "THEMES", "check_target", "save_step", "save_sweep"]

SUFFIXES = (".png", ".svg")
THEMES = {"light": LIGHT, "dark": DARK}
COLUMNS = 360
"""Columns of a step's figure; each is some pixels wide, so that a peak of one event is seen."""

_SIZE = (10.0, 5.4)
_DPI = 120
# Left, bottom, width and height, as parts of the figure; places that are computed from the text would not be the same twice.
_STEP = (0.062, 0.06, 0.703, 0.815)
_BESIDE = (0.778, 0.06, 0.212, 0.815)
_ROW, _ABREAST = 0.044, 2
"""Of a legend: the height of a row, and entries in it."""
_ABOVE = 1.04
"""Room over the highest thing that is drawn."""


def check_target(path: Path) -> None:
    """Raises InputError for a name that says no format, or where matplotlib is not installed, FileError where no file can be."""
    if path.suffix.lower() in (".html", ".htm"):
        raise InputError(f"{shorten(str(path))} is no figure; for a page: memcalc report with the same model and -o")
    if path.suffix.lower() not in SUFFIXES:
        raise InputError(f"{shorten(str(path))} says no format of a figure; end its name in {' or '.join(SUFFIXES)}")
    if find_spec("matplotlib") is None:
        raise InputError(
            "a figure as PNG or SVG needs matplotlib: pip install 'matplotlib>=3.8'; without -o it is drawn as text"
        )
    check_output(path)


def save_step(figure: Step, path: Path, theme: str = "light") -> None:
    """Write the figure of a step, whole or not at all. Raises FileError."""
    with _drawing(THEMES[theme], figure.text(), path) as canvas:
        _draw_step(canvas, figure, THEMES[theme])


def save_sweep(figure: Sweep, path: Path, theme: str = "light") -> None:
    """Write the figure of a sweep, whole or not at all. Raises FileError."""
    with _drawing(THEMES[theme], figure.text(), path) as canvas:
        _draw_sweep(canvas, figure, THEMES[theme])


@contextmanager
def _drawing(surface: Surface, text: str, path: Path) -> Iterator[Figure]:
    """An empty figure, which is written to ``path`` with its text when the block ends well."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    settings = {
        "font.family": "DejaVu Sans", "font.size": 9.5, "text.parse_math": False, "svg.hashsalt": "memcalc",
        "svg.fonttype": "path", "text.color": surface.text, "axes.labelcolor": surface.muted, "xtick.color": surface.muted,
        "ytick.color": surface.muted, "axes.edgecolor": surface.rule, "axes.facecolor": surface.page,
        "figure.facecolor": surface.page, "savefig.facecolor": surface.page, "axes.spines.top": False,
        "axes.spines.right": False, "axes.spines.left": False, "grid.color": surface.rule, "grid.linewidth": 0.7,
        "axes.axisbelow": True, "legend.frameon": False,
    }  # fmt: skip
    with rc_context(settings), warnings.catch_warnings():
        # A name in letters that the font lacks is shown with boxes; the figure's text has it whole.
        warnings.simplefilter("ignore", UserWarning)
        figure = Figure(figsize=_SIZE, dpi=_DPI)
        yield figure
        written = io.BytesIO()
        if path.suffix.lower() == ".png":
            figure.savefig(written, format="png", metadata={"Description": text, "Software": "memcalc"})
            write_bytes(path, written.getvalue())
        else:
            figure.savefig(written, format="svg", metadata={"Date": None, "Creator": "memcalc"})
            write_bytes(path, _told(written.getvalue().decode(), text).encode())


def _told(svg: str, text: str) -> str:
    """The figure with its text where screen readers look for it."""
    head, rest = svg.split("<svg ", 1)
    opening, body = rest.split(">", 1)
    said = html.escape(printable(text))
    return f'{head}<svg role="img" aria-label="{said}" {opening}>\n <title>{said}</title>{body}'


def _draw_step(canvas: Figure, figure: Step, surface: Surface) -> None:
    import numpy as np

    found, layers = figure.estimate, figure.layers
    axes, beside = canvas.add_axes(_STEP), canvas.add_axes(_BESIDE)
    unit, factor = decimal_unit(figure.top)
    count = len(layers.event)
    edges = np.repeat(np.arange(count + 1) / max(count, 1), 2)[1:-1]  # both ends of each column
    names = figure.categories
    if count and names:
        heights = [np.repeat(figure.of(name), 2) / factor for name in names]
        colours = [CATEGORY[name] for name in names]
        axes.stackplot(edges, *heights, colors=colours, edgecolor=surface.page, linewidth=0.3)
    styles: dict[str, dict[str, Any]] = {
        "rehearsal": {"color": surface.text, "linestyle": (0, (1, 1.2)), "linewidth": 1.6},
        "measured": {"color": surface.text, "linestyle": "-", "linewidth": 1.3},
    }
    for each in figure.curves:
        if each.live is not None:
            axes.plot(
                edges,
                np.repeat(each.live, 2) / factor,
                label=f"{each.name}: peak {format_bytes(each.peak)}",
                **styles[each.name],
            )
        else:
            _by_moment(axes, figure, each.by_moment, factor, styles[each.name], f"{each.name}, by moment")
    top = figure.top * _ABOVE / factor
    axes.set_xlim(0, 1)
    axes.set_ylim(0, top * 1.06)
    _capacity(axes, figure, factor, surface)
    _moments(axes, figure, surface)
    if count:
        at, peak = (layers.peak + 0.5) / count, found.peak.bytes / factor
        axes.plot([at], [peak], "o", color=surface.text, markersize=5, zorder=5, clip_on=False)
        side, align = (-9, "right") if at > 0.6 else (9, "left")
        axes.annotate(
            f"peak {format_bytes(found.peak.bytes)}", (at, peak), xytext=(side, 3), textcoords="offset points",
            ha=align, va="bottom", weight="bold",
        )  # fmt: skip
    axes.set_ylabel(unit)
    axes.grid(axis="y")
    axes.tick_params(length=0)
    if figure.curves:
        axes.legend(loc="upper right", fontsize=8.5)
    _at_peak(beside, figure, surface)
    _title(
        canvas, f"{figure.name}: peak {format_both(found.peak.bytes)} in {found.peak.moment}", _verdict(figure), surface
    )


def _verdict(figure: Step) -> str:
    found = figure.estimate
    plan = found.plan
    batch = f", micro batch {plan.micro_batch}" if plan.micro_batch else ""
    tokens = f" of {things(plan.tokens, 'token')}" if plan.tokens else ""
    card = "" if plan.gpu is None else f" · {found.verdict.replace('-', ' ')} on {plan.gpu}"
    return f"{plan.precision}, {plan.optimizer}{batch}{tokens} · the fullest rank{card}{f' · {figure.drawn}' * bool(figure.drawn)}"


def _title(canvas: Figure, title: str, below: str, surface: Surface) -> None:
    canvas.text(0.012, 0.982, printable(title), va="top", weight="bold", fontsize=12.5)
    canvas.text(0.012, 0.932, printable(below), va="top", color=surface.muted)


def _by_moment(axes: Axes, figure: Step, most: dict[str, int], factor: int, style: dict[str, Any], label: str) -> None:
    """The fullest point of each moment as a level, where there is no curve."""
    for phase in figure.layers.phases:
        if phase.moment in most:
            axes.hlines(most[phase.moment] / factor, phase.left, phase.right, label=label, **style)
            label = ""


def _capacity(axes: Axes, figure: Step, factor: int, surface: Surface) -> None:
    size, card = figure.capacity, figure.estimate.plan.gpu
    if size is None:
        return
    said = f"{card} has {format_bytes(size)} for it"
    if not figure.near:
        times = size / max(figure.largest, 1)
        axes.text(
            0.004, 0.985, f"{said}, {times:.0f} times the peak", transform=axes.transAxes, va="top", color=surface.muted
        )
        return
    colour = surface.bad if figure.estimate.verdict == "does-not-fit" else surface.text
    axes.axhline(size / factor, color=colour, linewidth=1.4, linestyle=(0, (5, 3)))
    _said_above(axes, said, size / factor, surface, colour)


def _said_above(axes: Axes, said: str, level: float, surface: Surface, colour: str) -> None:
    """Words on a level line, on a ground of their own."""
    axes.annotate(
        said, (0.004, level), xycoords=("axes fraction", "data"), xytext=(0, 4), textcoords="offset points",
        color=colour, va="bottom", bbox={"facecolor": surface.page, "edgecolor": "none", "pad": 1.5, "alpha": 0.85},
    )  # fmt: skip


def _moments(axes: Axes, figure: Step, surface: Surface) -> None:
    """Names of the moments under their phases, where they have room, and thin lines between."""
    ticks, labels = [], []
    for phase in figure.layers.phases:
        if phase.left > 0:
            axes.axvline(phase.left, color=surface.rule, linewidth=0.7, zorder=0.5)
        if phase.right - phase.left > 0.0095 * len(phase.moment):
            ticks.append((phase.left + phase.right) / 2)
            labels.append(phase.moment)
    axes.set_xticks(ticks, labels)


def _at_peak(axes: Axes, figure: Step, surface: Surface) -> None:
    """The peak's parts, largest first, which is also the legend; then the other meters."""
    found = figure.estimate
    parts = found.peak.by_category
    rows = [(CATEGORY[name], name, format_bytes(parts[name])) for name in reversed(figure.categories)]
    meters = [("allocated", format_bytes(found.peak.bytes))]
    if found.plan.device == "cuda":
        meters += [
            (name, _ends(part.low, part.high))
            for name, part in (("reserved", found.reserved), ("device", found.device))
        ]
    axes.axis("off")
    axes.set_xlim(0, 1)
    axes.set_ylim(16, 0)
    axes.text(0, 0.6, "at the peak", color=surface.muted)
    at = 1.6
    for colour, name, size in rows:
        axes.add_patch(_patch((0, at - 0.36), 0.09, 0.62, colour))
        axes.text(0.13, at, name, va="center")
        axes.text(1, at, size, va="center", ha="right", fontsize=8.5)
        at += 1
    at = max(at + 0.8, 10.6)
    axes.text(0, at, "meters", color=surface.muted)
    for name, size in meters:
        at += 1
        axes.text(0, at, name, va="center")
        axes.text(1, at, size, va="center", ha="right", fontsize=8.5)


def _patch(corner: tuple[float, float], width: float, height: float, colour: str) -> Any:
    from matplotlib.patches import Rectangle

    return Rectangle(corner, width, height, facecolor=colour)


def _ends(low: int, high: int) -> str:
    """Both ends of a range with one unit, short enough for a column."""
    unit, factor = decimal_unit(high)
    return f"{low / factor:.3g}\u2013{high / factor:.3g} {unit}" if low < high else format_bytes(low)


_CARDS = 2
"""The y axis of a sweep shows so many times the card's memory at most; doublings that go a step past it mostly end below."""


def _draw_sweep(canvas: Figure, figure: Sweep, surface: Surface) -> None:
    below = _ROW * (-(-len(figure.lines) // _ABREAST) + 0.5)
    axes = canvas.add_axes((0.062, 0.105 + below, 0.926, 0.765 - below))
    shown = figure.top if figure.capacity is None else min(figure.top, _CARDS * figure.capacity)
    unit, factor = decimal_unit(shown)
    values = sorted({point.value for line in figure.lines for point in line.points})
    for line, colour in zip(figure.lines, cycle(SERIES), strict=False):
        x = [point.value for point in line.points]
        low = [point.peak / factor for point in line.points]
        high = [point.high / factor for point in line.points]
        label = f"{line.strategy}: {figure.edge(line)}"
        axes.fill_between(x, low, high, color=colour, alpha=0.16, linewidth=0)
        axes.plot(x, low, color=colour, linewidth=0.9, linestyle=(0, (4, 2)))
        axes.plot(x, high, "o-", color=colour, linewidth=2, markersize=4.5, label=label)
        if line.edge is not None and figure.capacity is not None:
            axes.vlines(line.edge, 0, figure.capacity / factor, color=colour, linewidth=1.2, linestyle=(0, (1, 1.5)))
            axes.plot([line.edge], [figure.capacity / factor], "v", color=colour, markersize=8, clip_on=False, zorder=5)
    axes.set_xscale("log", base=2)
    axes.set_xticks(values, [format_count(value) for value in values])
    axes.minorticks_off()
    axes.set_ylim(0, shown * 1.1 / factor)
    above = [(line.strategy, max(point.high for point in line.points)) for line in figure.lines if line.points]
    if said := ", ".join(f"{name} {format_bytes(most)}" for name, most in above if most > shown * 1.1):
        axes.text(
            0.996, 0.975, f"go on above: {said}", transform=axes.transAxes, ha="right", va="top", color=surface.muted,
            bbox={"facecolor": surface.page, "edgecolor": "none", "pad": 1.5, "alpha": 0.85},
        )  # fmt: skip
    if figure.capacity is not None:
        axes.axhline(figure.capacity / factor, color=surface.text, linewidth=1.4, linestyle=(0, (5, 3)))
        said = f"{figure.base.gpu} has {format_bytes(figure.capacity)} for it"
        _said_above(axes, said, figure.capacity / factor, surface, surface.text)
    axes.set_xlabel(LABEL[figure.against])
    axes.set_ylabel(f"{unit} on the fullest rank")
    axes.grid(axis="y")
    axes.tick_params(length=0)
    canvas.legend(loc="lower left", ncols=_ABREAST, bbox_to_anchor=(0.052, 0.0), borderaxespad=0.3)
    plan = figure.base
    words = f"{plan.precision}, {plan.optimizer} · dashed: allocated; solid: the most that the device may show"
    _title(canvas, f"{plan.model.name}: memory against {LABEL[figure.against]}", words, surface)
