"""Two steps of the trainers' own loop for one rank of a job that nobody has to start: its memory, without its GPUs.

    rehearse(plan)                  on fake tensors, as the plan's device would do it; or on a real GPU
    rehearse_module(make, batch)    any nn.Module

python -m trainers.rehearsal PLAN.json OUT.json leaves the RankMeasurement of ``rehearse`` in a file.
"""

from __future__ import annotations

from trainers.rehearsal.modules import rehearse_module
from trainers.rehearsal.run import rehearse

__all__ = ["rehearse", "rehearse_module"]
