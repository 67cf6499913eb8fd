"""The column ``strategy``: its grammar, and which layouts memcalc has a strategy for."""

from __future__ import annotations

import re
from math import prod

from memcalc.bench.reading import Reading
from memcalc.layout import Layout
from memcalc.plan import Plan
from memcalc.strategies import STRATEGIES

__all__ = ["parse_layout", "stage_of", "strategy_of"]

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
    "hsdp": "fsdp-hybrid-shard",
}
_LACKING = {
    "gemini": "ColossalAI's Gemini",
    "ep": "expert parallel",
    "etp": "expert parallel",
}
# Stretches of a pipeline on one rank, and experts, which the ranks of data parallel divide.
_NO_RANKS = ("vp", "ep", "etp")
# What a framework means by its kind of data parallel.
_ENGINES = {
    ("megatron", "ddp"): "megatron-ddp",
    ("megatron", "zero1"): "megatron-distributed",
    **{("deepspeed", f"zero{stage}"): f"deepspeed-{stage}" for stage in range(4)},
}
_NOTES = {
    "thunder fsdp": "thunder's own FSDP",
    "fairscale": "fairscale's FSDP",
    "colossalai": "ColossalAI's ZeRO",
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


def strategy_of(reading: Reading) -> tuple[str, int, Layout]:
    """The strategy's name, its ranks and how they are arranged."""
    text = reading.row["strategy"]
    if "not stated" in text or not text:
        reading.lack("strategy is not stated")
        return "single", 1, Layout()
    parsed = parse_layout(text)
    if parsed is None:
        reading.lack(f"strategy {text!r} is of no known form")
        return "single", 1, Layout()
    degrees, notes = parsed
    for note, reason in _NOTES.items():
        if note in notes:
            reading.lack(reason)
    if "zero1" in degrees and "zeroredundancyoptimizer" in notes:
        degrees["zero-1"] = degrees.pop("zero1")
    layout = _layout(reading, degrees)
    engine = reading.default("zero") or "deepspeed"  # whose word ZeRO's stages are
    degrees = {_ENGINES.get((engine, kind), kind): degree for kind, degree in degrees.items()}
    if "dataparallel" in notes and "dp" in degrees:
        degrees["data-parallel"] = degrees.pop("dp")
    # By full name: "dp" is a degree here, and short for a strategy in the catalog.
    kinds = [kind for kind in degrees if kind in _STRATEGIES or kind in set(STRATEGIES)]
    alone = degrees.get("dp") == 1 and layout.model_parallel > 1
    if alone and not kinds:
        kinds = [{"megatron": "megatron-ddp", "deepspeed": "deepspeed-0"}.get(reading.default("zero"), "single")]
    if not kinds and not any(kind in _LACKING for kind in degrees):
        reading.lack("data parallel of a kind that is not stated")
    for kind, degree in degrees.items():
        if kind in _LACKING and (degree > 1 or not kind.endswith("p") or kind == "hsdp"):
            reading.lack(_LACKING[kind])
    name = kinds[0] if kinds else "single"
    ranks = _ranks(reading, name, degrees)
    return _STRATEGIES.get(name, name), ranks, layout


def _chunks(reading: Reading, degrees: dict[str, int], pipeline: int) -> int:
    """Stretches of layers on each rank: the degree, or what Megatron's layers per virtual stage come to."""
    found = re.search(r"virtual pipeline (\d{1,3})", reading.row["notes"])
    layers = reading.row.whole("layers") or 0
    if found is None or pipeline == 1:
        return degrees.get("vp") or 1
    each = max(int(found[1]), 1)
    reading.assume(f"virtual pipeline {each}: layers of each virtual stage (--num-layers-per-virtual-pipeline-stage)")
    return max(layers // (pipeline * each), 1)


def stage_of(reading: Reading, plan: Plan | None) -> int | None:
    """The pipeline stage that was read, as the notes or the source say; whether a run fits the fullest one decides."""
    if plan is None or plan.layout.pipeline == 1 or reading.row.meter == "boundary":
        return None
    notes = reading.row["notes"].lower()
    if re.search(r"last (rank|pipeline stage)", notes):
        return plan.layout.pipeline - 1
    if "stage without word embedding" in notes:
        return 1 if plan.layout.pipeline > 2 else None
    if re.search(r"stage with word embedding|embedding-holding", notes):
        return 0
    return 0 if reading.default("stage") == "first" else None


def _layout(reading: Reading, degrees: dict[str, int]) -> Layout:
    """Tensor, context and pipeline degrees; sequence parallel where the notes or the framework say so."""
    tensor, pipeline = degrees.get("tp") or 1, degrees.get("pp") or 1
    chunks = _chunks(reading, degrees, pipeline)
    says_so = re.search(r"\bsequence parallel", reading.row["notes"]) or reading.default("sequence") == "yes"
    ends = {
        f"{end}_layers": int(found[1]) if found else 0
        for end in ("first", "last")
        for found in [re.search(rf"decoder-{end}-pipeline-num-layers=(\d{{1,4}})", reading.row["notes"])]
    }
    return Layout(
        tensor=tensor,
        sequence=tensor > 1 and bool(says_so),
        loss_parallel=tensor > 1 and reading.default("loss_parallel") == "yes",
        context=degrees.get("cp") or 1,
        pipeline=pipeline,
        chunks=chunks if pipeline > 1 else 1,
        schedule="interleaved" if pipeline > 1 and chunks > 1 else "1f1b",
        **ends,
        ends=pipeline > 1 and bool(re.search(r"transformer\|embedding", reading.row["notes"])),
    )


def _ranks(reading: Reading, name: str, degrees: dict[str, int]) -> int:
    if name == "single" and "dp" not in degrees:
        return 1
    stated = prod(degree for kind, degree in degrees.items() if degree and kind not in _NO_RANKS)
    cards = reading.row.whole("n_gpus")
    if not any(degrees.values()):
        stated = reading.number("n_gpus")
    elif cards is not None and cards != stated:
        reading.lack(f"strategy says {stated} ranks, n_gpus says {cards}")
    return stated
