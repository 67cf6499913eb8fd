"""One colour for each category, told apart by everybody, and text that can be read on every surface."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from numpy.typing import NDArray

from memcalc.palette import CATEGORY, DARK, LETTER, LIGHT, ORDER, SERIES, Surface, contrast
from memcalc.timeline import CATEGORIES

# Machado, Oliveira and Fernandes (2009), "A physiologically-based model for simulation of color vision deficiency", table 1,
# severity 1.0; for linear RGB.
VISION = {
    "usual": np.eye(3),
    "protanopia": np.array([[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]),
    "deuteranopia": np.array([[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]),
    "tritanopia": np.array([[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]]),
}  # fmt: skip
JUST_NOTICED = 2.3
"""Distance in CIELAB that people just notice (Mahy, van Eycken and Oosterlinck 1994)."""
# sRGB to CIE XYZ, D65 (IEC 61966-2-1).
TO_XYZ = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])


def lab(colour: str, seen: NDArray[np.float64]) -> NDArray[np.float64]:
    """CIELAB of an sRGB colour as somebody sees it."""
    parts = np.array([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    linear = np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)
    white = TO_XYZ @ np.ones(3)
    xyz = TO_XYZ @ np.clip(seen @ linear, 0, 1) / white
    f = np.where(xyz > (6 / 29) ** 3, np.cbrt(xyz), xyz * (29 / 6) ** 2 / 3 + 4 / 29)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


def test_every_category_has_a_colour_a_letter_and_a_place() -> None:
    assert set(CATEGORY) == set(LETTER) == set(ORDER) == set(CATEGORIES)
    assert len(set(CATEGORY.values())) == len(set(LETTER.values())) == len(ORDER) == len(CATEGORIES)


@pytest.mark.parametrize("vision", VISION)
def test_neighbours_in_a_stack_and_all_other_pairs_differ(vision: str) -> None:
    seen = {name: lab(colour, VISION[vision]) for name, colour in CATEGORY.items()}
    apart = {(a, b): float(np.linalg.norm(seen[a] - seen[b])) for a, b in combinations(ORDER, 2)}
    near = min(apart, key=lambda pair: apart[pair])
    assert apart[near] > 6 * JUST_NOTICED, f"{near} are {apart[near]:.1f} apart"


@pytest.mark.parametrize("surface", [LIGHT, DARK], ids=["light", "dark"])
@pytest.mark.parametrize("role", ["text", "muted", "good", "warn", "bad"])
def test_text_can_be_read(surface: Surface, role: str) -> None:
    colour = getattr(surface, role)
    assert min(contrast(colour, surface.page), contrast(colour, surface.card)) >= 4.5


def test_lines_are_seen() -> None:
    """By WCAG 2.2, 1.4.11, on the dark page; on the light one two of seven are below it and have their labels."""
    for colour in SERIES:
        assert max(contrast(colour, LIGHT.page), contrast(colour, DARK.page)) >= 3
