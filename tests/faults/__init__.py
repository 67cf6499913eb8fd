"""Faults to plant into memcalc: each takes one named term away, and some test must fail then.

One file for each area of the code; a new fault goes into the file of what it breaks.
"""

from __future__ import annotations

<<<<<<< HEAD
from . import files, layouts, meters, models, optimizers, sharding, tape, ui
=======
from . import files, layouts, meters, models, optimizers, pictures, sharding, speeds, tape
>>>>>>> main
from .fault import Fault

__all__ = ["FAULTS", "Fault"]

<<<<<<< HEAD
FAULTS = [fault for area in (tape, models, sharding, layouts, optimizers, meters, files, ui) for fault in area.FAULTS]
=======
AREAS = (tape, models, sharding, layouts, optimizers, meters, files, speeds, pictures)
FAULTS = [fault for area in AREAS for fault in area.FAULTS]
>>>>>>> main
