"""Faults to plant into memcalc: each takes one named term away, and some test must fail then.

One file for each area of the code; a new fault goes into the file of what it breaks.
"""

from __future__ import annotations

from . import files, layouts, meters, models, optimizers, pictures, sharding, speeds, tape, ui
from .fault import Fault

__all__ = ["FAULTS", "Fault"]

AREAS = (tape, models, sharding, layouts, optimizers, meters, files, speeds, pictures, ui)
FAULTS = [fault for area in AREAS for fault in area.FAULTS]
