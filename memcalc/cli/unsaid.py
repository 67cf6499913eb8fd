"""What the words of a plan leave open, taken alike by every command, and how that is said."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from memcalc.hardware import usual_nodes

if TYPE_CHECKING:
    from memcalc.plan import Plan
    from memcalc.strategies import Strategy

__all__ = ["unsaid", "unsaid_nodes"]


def unsaid_nodes(row: Strategy, device: str, ranks: int, gpu: str | None) -> int:
    """Machines where nobody says how many; ranks on CPU cores, and the GPUs of one process, are in one."""
    return 1 if device == "cpu" or row.one_process else usual_nodes(ranks, gpu)


def unsaid(words: Mapping[str, Any], plan: Plan) -> list[str]:
    """What these words leave open, and other commands take otherwise, in sentences."""
    from memcalc.open_choices import unsaid_precision

    said = "" if words.get("precision") else unsaid_precision(plan)
    spread = plan.nodes > 1 and words.get("nodes") is None
    machines = f"{plan.ranks} GPUs are taken to be in {plan.nodes} machines; --nodes says otherwise" * spread
    return [each for each in (said, machines) if each]
