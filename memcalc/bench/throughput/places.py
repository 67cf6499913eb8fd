"""The columns ``gpu_type``, ``interconnect``, ``n_gpus`` and ``gpus_per_node``: the card, the nodes and their links."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from memcalc.bench.reading import Reading
from memcalc.coefficients import Values, published
from memcalc.plan import Plan
from memcalc.rank_hardware import Hardware, hardware_of

__all__ = ["Place", "hardware_for", "place_of"]

# gpu_type, in capitals and without dashes → the catalog's card, and what is assumed where the two are not the same.
_CARDS = (
    (r"A100.*40 ?GB?", "a100-40gb", ""),
    (r"A100.*80 ?GB?", "a100-80gb", ""),
    (r"A100\b", "a100-80gb", "an A100 of 80 GB: its memory is not stated"),
    (r"A800\b", "a800-80gb", ""),
    (r"V100.*16 ?GB?", "v100-16gb", ""),
    (r"V100\b", "v100-32gb", ""),
    (r"H100 PCIE", "h100-pcie", ""),
    (r"H100.*500 ?W", "h100-80gb", "an H100 of 700 W: the source's has 500 W and slower memory"),
    (r"H800\b", "h100-80gb", "an H100: the H800 is one with slower links"),
    (r"GH200|H200\b", "h200", ""),
    (r"H100\b", "h100-80gb", ""),
    (r"H20\b", "h20", ""),
    (r"G?B200\b", "b200", ""),
    (r"G?B300\b", "b300", ""),
    (r"A10G\b", "a10g", ""),
    (r"A10\b", "a10", ""),
    (r"A40\b", "a40", ""),
    (r"L40S\b", "l40s", ""),
    (r"L40\b", "l40", ""),
    (r"L4\b", "l4", ""),
    (r"T4\b", "t4", ""),
    (r"P100\b", "p100-16gb", ""),
    (r"TITAN RTX", "titan-rtx", ""),
    (r"RTX 6000 ADA", "rtx-6000-ada", ""),
    (r"RTX 6000", "titan-rtx", "a TITAN RTX: the Quadro RTX 6000 has the same chip and memory"),
    (r"(RTX )?A6000", "rtx-a6000", ""),
    (r"(RTX )?A5000", "rtx-a5000", ""),
    (r"1080 ?TI", "gtx-1080-ti", ""),
    (r"2080 ?TI", "rtx-2080-ti", ""),
    (r"RTX (3060|3090|4080|4090|5090)", "rtx-{}", ""),
    (r"MI250X?", "mi250x", ""),
    (r"MI300X", "mi300x", ""),
)

# Links inside a node that a row names, bytes/s in one direction.
_INSIDE = (
    # H800 and A800 data sheets: NVLink of 400 GB/s, both directions together.
    (r"NVLink \(400 GB/s\)", 200e9),
    # NVIDIA, NVLink bridge of the RTX 30 and Quadro RTX series: 112.5 and 100 GB/s, both directions together.
    (r"NVLink bridge", 50e9),
)

# What one node sends to others, bytes/s in one direction: from the row's own words, else by the network it names.
_PER_NODE = re.compile(r"(?:(\d{1,2})x)?(\d{2,4}) Gb/s [A-Za-z ]*per node")
_PER_GPU = re.compile(r"(\d{2,4}) Gb/s [A-Za-z0-9\- ]*per GPU")
_BETWEEN = re.compile(r"(\d{2,4}) Gb/s [A-Za-z0-9\- ]*between nodes")
_LINKS = re.compile(r"(\d{1,2}) Omni-Path links")
_OMNI_PATH = 12.5e9  # Intel Omni-Path 100 series: 100 Gb/s a link
_NETWORKS = (
    # Jean Zay's V100 nodes (IDRIS, machine description): 4 Omni-Path links of 100 Gb/s, one for each GPU.
    (r"Omni-Path between nodes", 4 * _OMNI_PATH),
    # AWS p5: 3200 Gb/s of EFA a node.
    (r"EFA between nodes", 400e9),
    # Google Cloud a2-highgpu-8g: 100 Gb/s a machine (gVNIC).
    (r"cloud Ethernet", 12.5e9),
    # DGX systems' data sheets: a ConnectX-7 of 400 Gb/s for each of 8 GPUs.
    (r"InfiniBand", 400e9),
)
# GB200 and GB300 NVL72: all 72 GPUs are in one NVLink domain, so that trays of 4 are no nodes of their own.
_DOMAINS = ((r"NVL72", 72),)


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Where a run ran. Bytes/s in one direction, of the data sheet."""

    gpu: str
    ranks: int
    nodes: int
    inside: float | None
    """Between two GPUs of a node, where the row says it is not the card's own link."""
    between: float | None
    """All that one node sends to others; None where that is not stated or there is one node."""
    staged: bool = False
    """That network does not read the cards' memory itself: Omni-Path, or Ethernet without RDMA."""


def place_of(reading: Reading) -> Place | None:
    """The place of a row, or None after a lack was noted."""
    gpu, ranks = _card(reading), reading.number("n_gpus")
    if not ranks and reading.row["n_gpus"]:
        reading.lack(f"n gpus is {reading.row['n_gpus']!r}, which it cannot be")
    if not gpu or not ranks:
        return None
    words = reading.row["interconnect"]
    each = next((size for pattern, size in _DOMAINS if re.search(pattern, words)), 0)
    each = each or reading.row.whole("gpus_per_node") or min(ranks, 8)
    if not reading.row["gpus_per_node"] and ranks > 1:
        reading.assume(f"{each} GPUs in a node: not stated")
    each = min(each, ranks)
    nodes = -(-ranks // each)
    if ranks % nodes:
        reading.lack(f"{ranks} GPUs do not divide over nodes of {each}")
        return None
    inside = next((speed for pattern, speed in _INSIDE if re.search(pattern, words)), None)
    between = _between(words, each) if nodes > 1 else None
    if nodes > 1 and between is None:
        reading.assume("the network between nodes is not stated: the time model's own")
    staged = re.search("Omni-Path|cloud Ethernet", words) is not None
    return Place(gpu=gpu, ranks=ranks, nodes=nodes, inside=inside, between=between, staged=staged)


def _card(reading: Reading) -> str:
    text = re.sub(r"[-_]", " ", reading.row["gpu_type"]).upper()
    for pattern, name, assumed in _CARDS:
        if found := re.search(rf"\b(?:{pattern})", text):
            if assumed:
                reading.assume(assumed)
            return name.format(*(group.lower() for group in found.groups() if group))
    reading.lack(f"a card memcalc does not know: {reading.row['gpu_type']}" if text else "card is not stated")
    return ""


def _between(words: str, each: int) -> float | None:
    """Bytes/s that a node sends.

    >>> _between("NVLink; 4x100 Gb/s RoCE per node", 8), _between("NVLink; 1600 Gb/s RoCE between nodes", 8)
    (50000000000.0, 200000000000.0)
    """
    if found := _PER_NODE.search(words):
        return int(found[1] or 1) * int(found[2]) * 1e9 / 8
    if found := _PER_GPU.search(words):
        return each * int(found[1]) * 1e9 / 8
    if found := _BETWEEN.search(words):
        return int(found[1]) * 1e9 / 8
    if found := _LINKS.search(words):
        return int(found[1]) * _OMNI_PATH
    return next((speed for pattern, speed in _NETWORKS if re.search(pattern, words)), None)


def hardware_for(plan: Plan, place: Place, coefficients: Values | None = None) -> Hardware:
    """The time model's own speeds of a plan, with the links that the row names in their place."""
    v = published() if coefficients is None else coefficients
    found = hardware_of(plan, v)
    inside = found.inside if place.inside is None else place.inside * v["link-efficiency"]
    if place.nodes == 1:
        return replace(found, inside=inside, link=inside)
    share = v["staged-network-efficiency" if place.staged else "node-efficiency"]
    link = found.link if place.between is None else place.between * share
    return replace(found, inside=inside, link=link)
