"""One colour for each kind of memory, the same in every figure, page and terminal.

Nine colours that people who lack a cone tell apart as well: seven of Okabe and Ito, "Color Universal Design" (2008), a slate
in the place of their black, which a dark page would swallow, and a violet. What lasts between steps (parameters, gradients, optimizer) is cool, what
comes and goes is warm. No figure says by colour alone what it says: areas have a thin edge, legends stand in the order of
the stack, and each figure has a text.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

__all__ = ["CATEGORY", "DARK", "LETTER", "LIGHT", "ORDER", "SERIES", "Surface", "contrast", "luminance"]

CATEGORY: Mapping[str, str] = MappingProxyType({
    "parameters": "#0072b2",  # blue
    "gradients": "#56b4e9",  # sky blue
    "optimizer": "#009e73",  # bluish green
    "activations": "#e69f00",  # orange
    "inputs": "#f0e442",  # yellow
    "communication": "#cc79a7",  # reddish purple
    "temporary": "#d55e00",  # vermilion
    "buffers": "#5f6672",  # slate, for their black
    "workspaces": "#8844cc",  # violet, a ninth
})  # fmt: skip
"""sRGB as hexadecimal, by category."""

LETTER: Mapping[str, str] = MappingProxyType({
    "parameters": "P", "gradients": "G", "optimizer": "O", "activations": "A", "inputs": "I", "communication": "C",
    "temporary": "T", "buffers": "B", "workspaces": "W",
})  # fmt: skip
"""What fills a category's area where there are no colours."""

ORDER = (
    "parameters",
    "buffers",
    "workspaces",
    "optimizer",
    "gradients",
    "inputs",
    "activations",
    "communication",
    "temporary",
)
"""From the bottom of a stack to its top: what lasts longest lies lowest, so that areas have few steps below them."""

SERIES = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#5f6672")
"""Lines that are not categories, such as several strategies, in the order in which they are taken."""


class Surface(NamedTuple):
    """What a page or a figure is drawn on and with."""

    page: str
    card: str
    text: str
    muted: str
    """Text of less weight."""
    rule: str
    good: str
    warn: str
    bad: str


LIGHT = Surface("#ffffff", "#f6f7f9", "#15181d", "#525b68", "#d5dae1", "#00694c", "#7a5200", "#b3261e")
DARK = Surface("#14171c", "#1e232b", "#eef1f5", "#aab4c2", "#3a424e", "#5fd3ac", "#f1bc4b", "#ff8f85")


def luminance(colour: str) -> float:
    """Relative luminance of an sRGB colour, 0 for black and 1 for white (WCAG 2.2).

    >>> round(luminance("#ffffff"), 3), luminance("#000000")
    (1.0, 0.0)
    """
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return sum(share * part for share, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def contrast(one: str, other: str) -> float:
    """Contrast of two colours, from 1 to 21; text wants 4.5 (WCAG 2.2, 1.4.3).

    >>> round(contrast("#000000", "#ffffff"), 1)
    21.0
    """
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)
