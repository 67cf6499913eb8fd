"""Faults in figures and pages."""

from __future__ import annotations

from .fault import Fault

__all__ = ["FAULTS"]

FAULTS = [
    Fault(
        name="a column of a figure shows its last event, not its fullest",
        file="pictures/layers.py",
        right="order = np.lexsort((-np.arange(len(live)), live))",
        wrong="order = np.arange(len(live))",
    ),
    Fault(
        name="a measured peak is drawn beside the estimate's",
        file="pictures/layers.py",
        right="if meeting is not None and meeting[0] == number:",
        wrong="if False:",
    ),
    Fault(
        name="each rank on CPU cores is given the whole RAM",
        file="gate.py",
        right="int((ram - keep_free) * RAM_SHARE) // ranks",
        wrong="int((ram - keep_free) * RAM_SHARE)",
    ),
    Fault(
        name="what may not fit is drawn as fitting",
        file="pictures/sweep.py",
        right='if _point(base, against, strategy, middle).verdict == "fits":',
        wrong='if _point(base, against, strategy, middle).verdict != "does-not-fit":',
    ),
    Fault(
        name="text in a report is not escaped",
        file="pictures/page/html.py",
        right="else html.escape(_shown(part))",
        wrong="else _shown(part)",
    ),
    Fault(
        name="data in a report ends its element",
        file="pictures/page/html.py",
        right='.replace("<", "\\\\u003c")',
        wrong="",
    ),
    Fault(
        name="the peaks of two sources of one step lie in different columns",
        file="pictures/layers.py",
        right="if meeting is not None and meeting[0] == number:",
        wrong="if meeting is not None and number < 0:",
    ),
]
