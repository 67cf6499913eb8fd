"""The columns ``gpu_type``, ``gpu_gib`` and ``capacity_gib``: which card of the catalog that is, and what torch can use of it."""

from __future__ import annotations

import re
from typing import NamedTuple

from memcalc.bench.reading import Reading
from memcalc.hardware import GPUS, Bounds

__all__ = ["Card", "card_of"]

# gpu_type → card; with several sizes, the catalog names by gpu_gib.
_CARDS = (
    (r"\bA100\b", {80: "a100-80gb", 40: "a100-40gb"}),
    (r"\bV100\b", {32: "v100-32gb", 16: "v100-16gb"}),
    (r"\bP100\b", {16: "p100-16gb"}),
    (r"\bH100\b", {80: "h100-80gb"}),
    (r"\bH200\b", {141: "h200"}),
    (r"\bH20\b", {96: "h20"}),
    (r"\bA800\b", {80: "a800-80gb"}),
    (r"\bG?B200\b", {180: "b200"}),
    (r"\bT4\b", {16: "t4"}),
    (r"\bL4\b", {24: "l4"}),
    (r"\bL40\b", {48: "l40"}),
    (r"\bA10\b", {24: "a10"}),
    (r"\bA10G\b", {24: "a10g"}),
    (r"\bA40\b", {48: "a40"}),
    (r"\bL40S\b", {48: "l40s"}),
    (r"\bA5000\b", {24: "rtx-a5000"}),
    (r"\bA6000\b", {48: "rtx-a6000"}),
    (r"\b1080 ?TI\b", {11: "gtx-1080-ti"}),
    (r"\b2080\b", {11: "rtx-2080-ti", 8: "rtx-2080"}),
    (r"\bTITAN RTX\b", {24: "titan-rtx"}),
    (r"\b3060\b", {12: "rtx-3060"}),
    (r"\b3090\b", {24: "rtx-3090"}),
    (r"\b4080\b", {16: "rtx-4080"}),
    (r"\b4090\b", {24: "rtx-4090"}),
    (r"\b5090\b", {32: "rtx-5090"}),
    (r"\b7900 XTX\b", {24: "rx-7900-xtx"}),
    (r"\bMI250X?\b", {64: "mi250x", 128: "mi250x"}),
    (r"\bMI300X\b", {192: "mi300x"}),
)  # fmt: skip
# A card's name says at most this much more than torch can use of it: a T4 of 16 GB has 14.56 GiB.
_USABLE = 0.9


class Card(NamedTuple):
    """What a row says of its card."""

    gpu: str | None
    """The catalog's name, for context, NCCL and workspaces; None where it has no such card."""
    usable: Bounds | None
    """Bytes torch can use of the row's own card, least and most; None where that is not known."""


def card_of(reading: Reading) -> Card:
    """The row's card. A boundary row cannot do without a size; a lack is noted."""
    row = reading.row
    text = re.sub(r"[-_]", " ", row["gpu_type"]).upper()
    sizes = next((sizes for pattern, sizes in _CARDS if re.search(pattern, text)), {})
    size = float(row["gpu_gib"]) if re.fullmatch(r"\d{1,5}(\.\d{1,9})?", row["gpu_gib"]) else None
    nominal = min(sizes, key=lambda known: abs(known - (size or max(sizes))), default=0)
    gpu = sizes.get(nominal)
    same = gpu is not None and size is not None and abs(size - nominal) <= 0.1 * nominal
    if gpu and not same:
        memory = f"has {row['gpu_gib']} GiB" if size else "is of unknown memory"
        reading.assume(f"the card is counted as {gpu}, but {memory}")
    usable = _usable(reading, gpu if same else None, size)
    if usable is None and row.meter == "boundary":
        known = f"{row['gpu_type']} of {row['gpu_gib'] or 'unknown'} GiB"
        reading.lack(f"a card memcalc does not know: {known}" if text else "card is not stated")
    return Card(gpu, usable)


def _usable(reading: Reading, gpu: str | None, size: float | None) -> Bounds | None:
    """What the message of the card itself says, else the catalog, else a size that is a reading or a nominal one."""
    stated = reading.row.gib("capacity_gib")
    if stated:
        return Bounds(round(stated * 2**30), round(stated * 2**30))
    if gpu:
        return Bounds(GPUS[gpu].usable_bytes, GPUS[gpu].usable_bytes)
    if size and not size.is_integer():
        return Bounds(round(size * 2**30), round(size * 2**30))
    alike = [card.usable_bytes for card in GPUS.values() if _USABLE <= card.usable_bytes / 2**30 / (size or 1) <= 1]
    if not size or not alike:
        return None
    reading.assume(f"a card of {size:.0f} GB that is not named leaves torch what those of the catalog do")
    return Bounds(min(alike), max(alike))
