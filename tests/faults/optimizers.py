"""Faults in optimizer states and the step's temporaries."""

from __future__ import annotations

from .fault import Fault

__all__ = ["FAULTS"]

FAULTS = [
    Fault(
        name="Adam has one moment",
        file="optimizers/of_torch.py",
        right='library="torch.optim.AdamW",\n    states=copies(2),',
        wrong='library="torch.optim.AdamW",\n    states=copies(1),',
    ),
    Fault(
        name="the foreach temporary is lost",
        file="optimizers/of_torch.py",
        right='"foreach": since((2, 1), lists(_ROOT), lists(_ROOT, "denominator")),',
        wrong='"foreach": since((2, 1), nothing, lists(_ROOT, "denominator")),',
    ),
    Fault(
        name="scales of 8-bit moments are lost",
        file="optimizers/of_libraries.py",
        right="return [count] * moments + [4 * -(-count // 256)] * moments",
        wrong="return [count] * moments",
    ),
    Fault(
        name="Muon's matrices have Adam's moments",
        file="optimizers/row.py",
        right="return self if self.rest is None or hidden else self.rest",
        wrong="return self if self.rest is None else self.rest",
    ),
    Fault(
        name="paged states are on the device",
        file="optimizers/row.py",
        right="return bool(self.paged_from) and weight.numel >= self.paged_from",
        wrong="return False",
    ),
    Fault(
        name="decay of gradients is in place",
        file="optimizers/row.py",
        right='if not l2 or kind == "fused":',
        wrong="if True:",
    ),
]
