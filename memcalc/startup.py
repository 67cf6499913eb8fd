"""What a run does before its first step: how the model comes to be, and what it resumes from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from memcalc.groups import Group, knob

if TYPE_CHECKING:
    from memcalc.plan import Plan

__all__ = ["BUILDS", "COPIES_STATES_UNTIL", "RESUMES", "Startup"]

BUILDS = ("shards", "whole")
RESUMES = ("none", "host", "device")

# Optimizer.load_state_dict made a deep copy of all states before 2.1 (pytorch pull request 106082).
COPIES_STATES_UNTIL = (2, 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class Startup(Group):
    """What a run does before its first step."""

    build: str = knob(
        "shards", "--build", "Each rank makes its shards alone, or the whole model on its GPU first.", choices=BUILDS
    )
    resume: str = knob(
        "none", "--resume-from", "Where the checkpoint of a resumed run is loaded to (map_location).", choices=RESUMES
    )

    def untrained(self, plan: Plan) -> str:
        if self.build != "shards":
            return "a model that each rank first builds whole; its own runs make shards alone"
        return "" if self.resume == "none" else "as a plan that says to resume; give launch --resume instead"
