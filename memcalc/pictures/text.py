"""A step as text: one letter for each cell of a terminal, coloured where the terminal has colours."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from memcalc.palette import CATEGORY, LETTER
from memcalc.pictures.step import Step
from memcalc.tables import heading, printable
from memcalc.units import format_both, format_bytes

__all__ = ["HEIGHT", "MARKS", "inner", "painted", "step_text"]

HEIGHT = 18
"""Rows of a figure where the terminal has room for them."""

MARKS = {"rehearsal": "o", "measured": "*"}
"""What stands where another source's curve runs, by source."""

_GUTTER = 11
"""Columns left of the axis: a size such as ``999.999 MB`` and a space."""
_LEAST = 20


def step_text(figure: Step, width: int, height: int = HEIGHT, *, colours: bool = False) -> str:
    """The figure in ``width`` columns, of which ``figure.layers`` should have what the axis leaves: ``inner(width)``."""
    columns = len(figure.layers.event)
    cells = _filled(figure, columns, height)
    for row, size in _sizes(figure, height).items():
        if figure.near and size == figure.capacity:
            cells[row] = np.where(cells[row] == " ", "=", cells[row])
    for each in figure.curves:
        if each.live is not None and columns:
            known = np.flatnonzero(each.live >= 0)
            cells[[_row(figure, int(size), height) for size in each.live[known]], known] = MARKS[each.name]
    labels = {row: format_bytes(size) for row, size in _sizes(figure, height).items()}
    body = [
        f"{labels.get(row, ''):>{_GUTTER - 1}} {'+' if row in labels else '|'}{_painted(cells[row], colours)}"
        for row in range(height)
    ]
    return "\n".join([*_head(figure), "", *body, *_axis(figure, columns), "", *_legend(figure, width, colours)])


def inner(width: int) -> int:
    """Columns of a figure in a terminal of so many."""
    return max(width - _GUTTER - 1, _LEAST)


def _head(figure: Step) -> list[str]:
    found = figure.estimate
    verdict = f"; {found.verdict} on {found.plan.gpu}" if found.plan.gpu else ""
    lines = [heading(printable(f"peak {format_both(found.peak.bytes)} in the moment {found.peak.moment}{verdict}"))]
    return [*lines, printable(figure.name)]


def _row(figure: Step, size: int, height: int) -> int:
    """The row whose cell holds the upper end of ``size`` bytes; the first row is the top."""
    filled = -(-size * height // max(figure.top, 1))
    return height - min(max(filled, 1), height)


def _filled(figure: Step, columns: int, height: int) -> NDArray[np.str_]:
    """The letters, shape (height, columns): each cell is of the category at its middle."""
    cells = np.full((height, columns), " ", dtype="<U1")
    edges = np.cumsum([figure.of(name) for name in figure.categories], axis=0)
    for row in range(height):
        middle = (2 * (height - row) - 1) * figure.top / (2 * height)
        for name, upper in reversed(list(zip(figure.categories, edges, strict=True))):
            cells[row] = np.where(upper >= middle, LETTER[name], cells[row])
    if columns and figure.categories:  # whatever else is rounded away, the peak reaches its row
        top = _row(figure, int(edges[-1][figure.layers.peak]), height)
        last = [name for name in figure.categories if figure.of(name)[figure.layers.peak]][-1:]
        if last and cells[top, figure.layers.peak] == " ":
            cells[top, figure.layers.peak] = LETTER[last[0]]
    return cells


def _sizes(figure: Step, height: int) -> dict[int, int]:
    """Rows that say how much they are, and how much: the top, the peak, the card and, where there is room, the half."""
    found = {_row(figure, figure.estimate.peak.bytes, height): figure.estimate.peak.bytes}
    if figure.near and figure.capacity is not None:
        found.setdefault(_row(figure, figure.capacity, height), figure.capacity)
    half = figure.top // 2
    row = _row(figure, half, height)
    if all(abs(row - other) > 1 for other in found):
        found[row] = half
    return found


def _axis(figure: Step, columns: int) -> list[str]:
    """The line below the figure with the moments, where they fit, and a mark under the peak."""
    line, names = ["-"] * columns, [" "] * columns
    for phase in figure.layers.phases:
        left, right = round(phase.left * columns), round(phase.right * columns)
        if left < columns:
            line[left] = "+"
        if right - left > len(phase.moment):
            names[left : left + len(phase.moment)] = phase.moment
    if columns:
        line[figure.layers.peak] = "^"
    edge = " " * _GUTTER
    return [f"{edge}+{''.join(line)}", f"{edge} {''.join(names)}".rstrip()]


def _legend(figure: Step, width: int, colours: bool) -> list[str]:
    """Letters with their categories and bytes at the peak, as many to a line as fit; then the marks."""
    found = figure.estimate
    parts = [
        (LETTER[name], f"{name} {format_bytes(found.peak.by_category[name])}") for name in reversed(figure.categories)
    ]
    each = max((len(text) for _, text in parts), default=0) + 4
    line = max((width - _GUTTER) // max(each, 1), 1)
    rows = [parts[at : at + line] for at in range(0, len(parts), line)]
    edge = " " * _GUTTER
    said = [
        edge + "".join(f"{painted(letter, colours)} {text:<{each - 2}}" for letter, text in row).rstrip()
        for row in rows
    ]
    said += [f"{edge}^ the peak, of which the sizes above are"]
    if figure.drawn:
        said.append(f"{edge}{figure.drawn}")
    for curve in figure.curves:
        where = "" if curve.live is not None else " (of each moment, without a curve)"
        said.append(f"{edge}{MARKS[curve.name]} {curve.name}: peak {format_both(curve.peak)}{where}")
    if figure.capacity is not None:
        card = f"{found.plan.gpu}, of which the run can use {format_both(figure.capacity)}"
        said.append(f"{edge}= {card}" if figure.near else f"{edge}{card}: far above this figure")
    return said


def _painted(cells: NDArray[np.str_], colours: bool) -> str:
    """A row of cells; runs of one letter are coloured together."""
    if not colours:
        return "".join(cells).rstrip()
    starts = [0, *(np.flatnonzero(cells[1:] != cells[:-1]) + 1).tolist(), len(cells)]
    runs = ["".join(cells[a:b]) for a, b in zip(starts, starts[1:], strict=False)]
    return "".join(painted(run, colours) for run in runs).rstrip()


def painted(run: str, colours: bool) -> str:
    """Equal letters on their category's colour, of the 256 that terminals have; other text as it is.

    >>> painted("AA", colours=True)
    '\\x1b[30;48;5;178mAA\\x1b[0m'
    >>> painted("==", colours=True)
    '=='
    """
    name = next((name for name, letter in LETTER.items() if run[:1] == letter), None)
    return f"\033[30;48;5;{_of_256(CATEGORY[name])}m{run}\033[0m" if colours and name else run


def _of_256(colour: str) -> int:
    """The nearest of xterm's cube of 6 x 6 x 6, whose steps are 0, 95, 135, 175, 215 and 255."""
    steps = (0, 95, 135, 175, 215, 255)
    parts = [int(colour[i : i + 2], 16) for i in (1, 3, 5)]
    red, green, blue = (min(range(6), key=lambda i: abs(steps[i] - part)) for part in parts)
    return 16 + 36 * red + 6 * green + blue
