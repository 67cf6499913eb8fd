"""How long a collective takes on the links it really goes over.

Cards of a machine are joined by ``inside`` B/s each; all of them together send ``link`` B/s to other machines. A ring that
goes through several machines sends everything over the slowest of its links, and every group that goes through a machine
has its part of the network (Sergeev and NCCL's rings, one for each port). Each step of a ring also costs a fixed time, so
rings of many ranks and small messages are slow; all-reduces go up and down a tree between machines (NCCL 2.4 on).
"""

from __future__ import annotations

from math import log2

from memcalc.coefficients import Values
from memcalc.rank_hardware import Hardware
from memcalc.traffic import SAMPLE, Collective

__all__ = ["bandwidth", "latency", "seconds"]


def bandwidth(each: Collective, hardware: Hardware, neighbours: int) -> float:
    """Bytes/s one rank sends to the next in its group; ``neighbours`` ranks are in each machine."""
    if each.inside:
        return hardware.inside
    if each.operation in ("send", "all-to-all"):
        return min(hardware.inside, hardware.link / neighbours)
    return min(hardware.inside, hardware.link * min(each.near, neighbours) / neighbours)


def latency(each: Collective, values: Values) -> float:
    """Seconds of one call beside its bytes.

    >>> from memcalc.coefficient_table import COEFFICIENTS
    >>> fixed = {name: row.value for name, row in COEFFICIENTS.items()}
    >>> ring = Collective(what="", operation="all-gather", bytes=0, ranks=16, near=8)
    >>> latency(ring, fixed) == 14 * fixed["hop-seconds-inside"] + 1 * fixed["hop-seconds"]
    True
    """
    inside, between = values["hop-seconds-inside"], values["hop-seconds"]
    near = each.ranks if each.inside else each.near
    machines = each.ranks / near
    if each.operation == "send":
        return inside if each.inside else between
    if each.operation == "all-to-all":
        return inside if each.inside else between
    if each.operation == "all-reduce":
        return 2 * ((near - 1) * inside + log2(machines) * between)
    return (each.ranks - machines) * inside + (machines - 1) * between


def seconds(each: Collective, hardware: Hardware, neighbours: int, values: Values) -> tuple[float, float]:
    """Seconds for the bytes, and for the calls, of one collective as often as it says."""
    share = values["tensor-share"] if each.per == SAMPLE and each.operation == "all-reduce" else 1.0
    return each.sent / (share * bandwidth(each, hardware, neighbours)), each.calls * latency(
        each, values
    ) * hardware.hops
