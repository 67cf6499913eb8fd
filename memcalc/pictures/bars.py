"""A sweep as text: a bar for each plan, with the card's edge in each."""

from __future__ import annotations

from memcalc.pictures.sweep import LABEL, Line, Point, Sweep
from memcalc.tables import heading, printable
from memcalc.units import format_both, format_bytes, format_count

__all__ = ["sweep_text"]

_LEAST = 16
_OVER = 1.5
"""Bars are cut at so many times the card."""


def sweep_text(figure: Sweep, width: int, *, colours: bool = False) -> str:
    """Bars of ``#`` up to the allocated peak and of ``-`` up to the most that the device may show; ``|`` is the card."""
    values = [format_count(point.value) for line in figure.lines for point in line.points]
    left = max(map(len, values), default=0) + 2
    right = max((len(_said(point)) for line in figure.lines for point in line.points), default=0)
    room = max(width - left - right - 4, _LEAST)
    limit = figure.top if figure.capacity is None else min(figure.top, int(_OVER * figure.capacity))
    bounded = figure.capacity is not None
    card = f"{figure.base.gpu} has {format_both(figure.capacity)}" if figure.capacity is not None else figure.unbounded
    lines = [heading(printable(f"{figure.base.model.name}: memory against {LABEL[figure.against]}")), printable(card)]
    for line in figure.lines:
        lines += ["", printable(f"{line.strategy}: {figure.edge(line)}" if bounded else line.strategy)]
        lines += [_bar(figure, line, point, left, room, limit, colours) for point in line.points]
    return "\n".join([*lines, "", *_legend(figure), *([f"  {printable(figure.ends)}"] * bool(figure.ends))])


def _bar(figure: Sweep, line: Line, point: Point, left: int, room: int, limit: int, colours: bool) -> str:
    def cells(size: int) -> int:
        return min(-(-size * room // max(limit, 1)), room)

    bar = list(("#" * cells(point.peak)).ljust(cells(point.high), "-").ljust(room))
    if figure.capacity is not None:
        bar[min(cells(figure.capacity), room - 1)] = "|"
    if point.high > limit:
        bar[-1] = ">"
    text = "".join(bar)
    if colours:
        text = f"\033[38;5;{_COLOUR.get(point.verdict, 250)}m{text}\033[0m"
    return f"{format_count(point.value):>{left}}  {text}  {_said(point)}".rstrip()


_COLOUR = {"fits": 35, "tight": 178, "does-not-fit": 166}
"""Of the 256 that terminals have; the word stands beside the bar."""


def _said(point: Point) -> str:
    verdict = "" if point.verdict == "unknown" else f"  {point.verdict}"
    return f"{format_bytes(point.peak)} to {format_bytes(point.high)}{verdict}"


def _legend(figure: Sweep) -> list[str]:
    edge = "; | the card" * (figure.capacity is not None)
    cut = "; > goes on" * any(point.high > figure.top for line in figure.lines for point in line.points)
    return [f"  # allocated; - up to the most that the device may show{edge}{cut}"]
