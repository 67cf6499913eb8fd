"""Optimizers: the states they keep for each weight, and what one ``step()`` allocates on top.

Temporaries were read in the source files named at each row; those of torch are measured by
``tests/trainers/test_optimizers_measured.py``. Only tensors count: numbers that CPU kernels wrap into
0-dimensional tensors (12 bytes at a time) do not exist on CUDA and are left out.
"""

from __future__ import annotations

from memcalc.catalog import Catalog
from memcalc.optimizers.of_libraries import OF_LIBRARIES
from memcalc.optimizers.of_torch import OF_TORCH
from memcalc.optimizers.row import KINDS, Optimizer

__all__ = ["KINDS", "OPTIMIZERS", "Optimizer"]

OPTIMIZERS: Catalog[Optimizer] = Catalog("optimizer", [*OF_TORCH, *OF_LIBRARIES])
