"""The columns ``gpu_type`` and ``gpu_gib``: which card of the catalog that is."""

from __future__ import annotations

import re

from memcalc.bench.reading import Reading

__all__ = ["gpu_of"]

# gpu_type → card; with several sizes, the catalog names by gpu_gib.
_CARDS = (
    (r"\bA100\b", {80: "a100-80gb", 40: "a100-40gb"}),
    (r"\bV100\b", {32: "v100-32gb", 16: "v100-16gb"}),
    (r"\bH100\b", {80: "h100-80gb"}),
    (r"\bH200\b", {141: "h200"}),
    (r"\bA800\b", {80: "a800-80gb"}),
    (r"\bG?B200\b", {180: "b200"}),
    (r"\bT4\b", {16: "t4"}),
    (r"\bA10\b", {24: "a10"}),
    (r"\bA10G\b", {24: "a10g"}),
    (r"\bA40\b", {48: "a40"}),
    (r"\bL40S\b", {48: "l40s"}),
    (r"\bA6000\b", {48: "rtx-a6000"}),
    (r"\b3090\b", {24: "rtx-3090"}),
    (r"\b4090\b", {24: "rtx-4090"}),
    (r"\bMI300X\b", {192: "mi300x"}),
)  # fmt: skip


def gpu_of(reading: Reading) -> tuple[str | None, bool]:
    """The catalog's name, and whether its memory is that of the row's card.

    None where the catalog has no such card; a boundary row cannot do without.
    """
    row = reading.row
    text = re.sub(r"[-_]", " ", row["gpu_type"]).upper()
    sizes = next((sizes for pattern, sizes in _CARDS if re.search(pattern, text)), None)
    size = float(row["gpu_gib"]) if re.fullmatch(r"\d{1,5}(\.\d{1,9})?", row["gpu_gib"]) else None
    if sizes is None:
        if row.meter == "boundary":
            reading.lack(f"a card memcalc does not know: {row['gpu_type']}" if text else "card is not stated")
        return None, False
    nominal = min(sizes, key=lambda known: abs(known - (size or max(sizes))))
    same = size is not None and abs(size - nominal) <= 0.1 * nominal
    if not same and row.meter == "boundary":
        reading.lack(f"a card memcalc does not know: {row['gpu_type']} of {row['gpu_gib'] or 'unknown'} GiB")
    elif not same:
        memory = f"has {row['gpu_gib']} GiB" if size else "is of unknown memory"
        reading.assume(f"the card is counted as {sizes[nominal]}, but {memory}")
    return sizes[nominal], same
