"""The column ``strategy``: its grammar, and which layouts memcalc has a strategy for."""

from __future__ import annotations

import re
from math import prod

from memcalc.bench.reading import Reading

__all__ = ["parse_layout", "strategy_of"]

_PART = re.compile(
    r"(single|ddp|fsdp_full_shard|fsdp_shard_grad_op|fsdp_no_shard|fsdp|hsdp|gemini|zero[0-3]|[dtpcev]p|sp|etp|offload)\[?(\d{0,6})\]?"
)
_NOTE = re.compile(r"\(([^)]*)\)")

_STRATEGIES = {
    "single": "single",
    "ddp": "ddp",
    "fsdp_full_shard": "fsdp-full-shard",
    "fsdp": "fsdp-full-shard",
    "fsdp_shard_grad_op": "fsdp-shard-grad-op",
    "fsdp_no_shard": "fsdp-no-shard",
}
_LACKING = {
    "hsdp": "hybrid sharding",
    "gemini": "ColossalAI's Gemini",
    "zero0": "DeepSpeed without sharding",
    "zero1": "DeepSpeed's or Megatron's ZeRO 1",
    "zero2": "DeepSpeed's ZeRO 2",
    "zero3": "DeepSpeed's ZeRO 3",
    "tp": "tensor parallel",
    "pp": "pipeline parallel",
    "cp": "context parallel",
    "sp": "sequence parallel",
    "ep": "expert parallel",
    "etp": "expert parallel",
    "vp": "pipeline parallel",
    "offload": "offload cpu",
}
_NOTES = {
    "thunder fsdp": "thunder's own FSDP",
    "fairscale": "fairscale's FSDP",
    "colossalai": "ColossalAI's ZeRO",
    "dataparallel": "DataParallel, one process for all cards",
    "tried": "several strategies in one row",
    "naive": "layers spread over GPUs without a schedule",
}


def parse_layout(text: str) -> tuple[dict[str, int], str] | None:
    """Degrees by kind and the note in brackets; 0 where a degree was left out; None when it is no layout.

    >>> parse_layout("fsdp_full_shard8 (FSDP2)")
    ({'fsdp_full_shard': 8}, 'fsdp2')
    >>> parse_layout("zero1+dp4+tp1")
    ({'zero1': 0, 'dp': 4, 'tp': 1}, '')
    >>> parse_layout("some cluster") is None
    True
    """
    notes = " ".join(_NOTE.findall(text)).lower()
    degrees: dict[str, int] = {}
    for part in re.split(r"[+\s]+", _NOTE.sub("", text).strip().lower().replace("cpu offload", "offload")):
        match = _PART.fullmatch(part)
        if match is None:
            return None
        degrees[match[1]] = int(match[2] or 0)
    return degrees, notes


def strategy_of(reading: Reading) -> tuple[str, int]:
    """The strategy's name and its ranks."""
    text = reading.row["strategy"]
    if "not stated" in text or not text:
        reading.lack("strategy is not stated")
        return "single", 1
    parsed = parse_layout(text)
    if parsed is None:
        reading.lack(f"strategy {text!r} is of no known form")
        return "single", 1
    degrees, notes = parsed
    for note, reason in _NOTES.items():
        if note in notes:
            reading.lack(reason)
    if "zero1" in degrees and "zeroredundancyoptimizer" in notes:
        degrees["zero-1"] = degrees.pop("zero1")
    kinds = [kind for kind in degrees if kind in _STRATEGIES or kind == "zero-1"]
    if not kinds and not any(kind in _LACKING for kind in degrees):
        reading.lack("data parallel of a kind that is not stated")
    for kind, degree in degrees.items():
        if kind in _LACKING and (degree > 1 or not kind.endswith("p") or kind == "hsdp"):
            reading.lack(_LACKING[kind])
    name = kinds[0] if kinds else "single"
    return _STRATEGIES.get(name, name), _ranks(reading, name, degrees, notes)


def _ranks(reading: Reading, name: str, degrees: dict[str, int], notes: str) -> int:
    if name == "single":
        return 1
    stated = prod(degree for degree in degrees.values() if degree)
    cards = reading.row.whole("n_gpus")
    if not any(degrees.values()):
        stated = reading.number("n_gpus")
    elif cards is not None and cards != stated:
        reading.lack(f"strategy says {stated} ranks, n_gpus says {cards}")
    if name.startswith("fsdp") and name != "fsdp_no_shard":
        two = "fsdp2" in notes or ("fsdp1" not in notes and reading.default("fsdp") == "2")
        if not two:
            reading.assume("FSDP 1 is counted as fully_shard (FSDP 2)")
    return stated
