"""A row of published speeds → the Plan it says and where it ran, or all the reasons why memcalc cannot say it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from memcalc.bench.reading import Lack, Reading
from memcalc.bench.throughput.blanks import filled
from memcalc.bench.throughput.engines import Engine, engine_of
from memcalc.bench.throughput.grammar import Arrangement, parse
from memcalc.bench.throughput.places import Place, hardware_for, place_of
from memcalc.bench.throughput.rows import Timing
from memcalc.bench.throughput.settings import (
    adapter_of,
    checkpointing_of,
    compute_of,
    loss_of,
    offload_of,
    optimizer_of,
    precision_of,
)
from memcalc.bench.throughput.shapes import model_of
from memcalc.errors import InputError
from memcalc.fsdp import Fsdp
from memcalc.layout import Layout
from memcalc.models import FAMILIES
from memcalc.plan import Plan
from memcalc.rank_hardware import Hardware
from memcalc.spec import Model
from memcalc.strategies import STRATEGIES

__all__ = ["Run", "run_of"]

_FSDP = {
    "fsdp_full_shard": "fsdp-full-shard",
    "fsdp_shard_grad_op": "fsdp-shard-grad-op",
    "fsdp_no_shard": "fsdp-no-shard",
    "hsdp": "fsdp-hybrid-shard",
}
# Words in the notes for what no plan says, although it changes the speed.
_UNSAID = (
    (r"DeepEP", "a dispatcher of experts of its own (DeepEP)"),
    (r"overlap on", "Megatron's flags for overlap"),
    (r"wrap min 2K params", "units of FSDP that are no blocks"),
    (r"TF 1\.", "TensorFlow"),
)
_INSTANCES = ("zero-1", "megatron-distributed")  # strategies that can divide states over a part of the ranks
# Megatron's virtual stages on each rank: ``vpp4``, ``VP 5``; of torchtitan's interleaved schedule not stated.
_CHUNKS = re.compile(r"\b(?:vpp ?|VP )(\d{1,3})\b")
_PICTURES = r"resnet|\bvit|convnext|efficientnet"
_TORCHTITAN_CHUNKS = 2  # torchtitan, pipeline_llama.py: two stages a rank for schedules of several


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """A row read."""

    row: Timing
    plan: Plan | None
    """None where something is lacking."""
    hardware: Hardware | None
    place: Place | None
    assumptions: tuple[str, ...]
    lacks: tuple[Lack, ...]

    @property
    def comparable(self) -> bool:
        """Its seconds may be held against the time model's: tier A or B, nothing but the plan differs from what stands beside
        it, and the network is stated, which would otherwise be an assumption that is judged."""
        row, place = self.row, self.place
        if self.plan is None or place is None or row.tier not in ("A", "B") or row.comparison == "partial":
            return False
        return row.cost is not None and (place.nodes == 1 or place.between is not None)

    @property
    def skipped(self) -> str | None:
        """Every reason why there is no plan; None where there is one."""
        return None if self.plan else "; ".join(lack.reason for lack in self.lacks)


def run_of(row: Timing) -> Run:
    """Read a row. Raises nothing: what cannot be said is a reason."""
    whole, sentence = filled(row)
    reading = Reading(whole)
    if sentence:
        reading.assume(sentence)
    engine, said, place = engine_of(row.source), parse(row["strategy"]), place_of(reading)
    if said is None:
        text = row["strategy"]
        reading.lack(f"strategy {text!r} is of no known form" if text else "strategy is not stated")
    elif said.shard and said.kind not in ("hsdp", "zero1"):
        reading.lack(f"strategy {row['strategy']!r}: shards of a part of the ranks")
    elif said.shard and said.kind == "zero1" and engine.zero1 not in _INSTANCES and said.shard < said.data:
        reading.lack("optimizer states of DeepSpeed divided over a part of the ranks")
    elif place and said.ranks != place.ranks:
        reading.lack(f"strategy says {said.ranks} ranks, n_gpus says {place.ranks}")
    for pattern, reason in _UNSAID:
        if re.search(pattern, row["notes"] + row["model"]):
            reading.lack(reason)
    plan = _plan(reading, engine, said, place) if said else None
    plan = None if reading.lacks else plan
    return Run(
        row=row,
        plan=plan,
        hardware=hardware_for(plan, place) if plan and place else None,
        place=place,
        assumptions=tuple(reading.assumptions),
        lacks=tuple(reading.lacks),
    )


def _plan(reading: Reading, engine: Engine, said: Arrangement, place: Place | None) -> Plan | None:
    strategy = _strategy(engine, said)
    row = STRATEGIES[strategy]
    megatron = engine.megatron and row.masters
    tokens = _tokens(reading)
    model = model_of(reading, megatron=megatron, tokens=tokens)
    adapter = adapter_of(reading)
    precision, float8 = precision_of(reading, row, pure=adapter.freezes or engine.pure)
    every, checkpointing = checkpointing_of(reading)
    optimizer, kind, update = optimizer_of(reading)
    offload, compute = offload_of(reading, row), compute_of(reading, float8)
    micro, accumulation = _batch(reading, said)
    if model is None or place is None or reading.lacks:
        return None
    fields: dict[str, Any] = {"adapter": adapter, **loss_of(reading, model, said.tensor)}
    if row.gathers:
        fields["fsdp"] = _fsdp(reading, said, precision, accumulation)
    if model.heads and FAMILIES[model.family].reads == "tokens" and model.family != "t5":
        fields["attention"] = _attention(reading, engine, precision)
    try:
        return Plan(
            model=model, strategy=strategy, ranks=place.ranks, nodes=place.nodes, gpu=place.gpu, precision=precision,
            optimizer=optimizer, optimizer_kind=kind, micro_batch=micro, accumulation=accumulation, tokens=tokens,
            checkpoint_every=every, checkpointing=checkpointing, update=update, compute=compute, offload=offload,
            layout=_layout(reading, engine, said, model), **fields,
        )  # fmt: skip
    except InputError as error:
        reading.lack(f"no sound plan: {error}")
        return None


def _strategy(engine: Engine, said: Arrangement) -> str:
    if said.one_process:
        return "data-parallel"
    if said.kind in _FSDP:
        return _FSDP[said.kind]
    if said.kind == "zero1":
        return engine.zero1
    if said.kind.startswith("zero"):
        return f"deepspeed-{said.kind[-1]}"
    if engine.megatron:
        return engine.plain
    return "single" if said.kind == "single" or said.data == 1 else "ddp"


def _layout(reading: Reading, engine: Engine, said: Arrangement, model: Model) -> Layout:
    chunks = _chunks(reading, said)
    interleaved = said.pipeline > 1 and chunks > 1
    parts = said.pipeline * (chunks if interleaved else 1)
    ends = engine.ends and said.pipeline > 1 and model.layers % parts > 0
    return Layout(
        tensor=said.tensor, pipeline=said.pipeline, context=said.context, expert=said.expert,
        sequence=said.tensor > 1 and (said.sequence or engine.sequence),
        optimizer_instances=_instances(engine, said),
        schedule="interleaved" if interleaved else "1f1b", chunks=chunks if interleaved else 1, ends=ends,
    )  # fmt: skip


def _instances(engine: Engine, said: Arrangement) -> int:
    """Groups of ranks that each hold all optimizer states, where they are divided over some ranks only."""
    parts = said.shard if said.kind == "zero1" and engine.zero1 in _INSTANCES else 0
    return said.data * said.context // parts if parts else 1


def _chunks(reading: Reading, said: Arrangement) -> int:
    if found := _CHUNKS.search(reading.row["notes"]):
        return int(found[1])
    if said.interleaved:
        reading.assume(f"{_TORCHTITAN_CHUNKS} stretches of layers on each rank: torchtitan, pipeline_llama.py")
        return _TORCHTITAN_CHUNKS
    return 1


def _batch(reading: Reading, said: Arrangement) -> tuple[int, int]:
    """(micro batch, accumulation): as stated; the third of micro batch, accumulation and global batch from the other two."""
    row = reading.row
    micro, times, whole = (row.whole(name) for name in ("micro_batch_per_gpu", "grad_accum", "global_batch"))
    if micro and times is None and whole == micro * said.data and said.pipeline > 1 and micro % said.pipeline == 0:
        reading.assume("a pipeline cuts the batch of a rank into as many micro batches as it has stages (torchtitan)")
        return micro // said.pipeline, said.pipeline
    if micro and times is None and whole and whole % (micro * said.data) == 0:
        return micro, whole // (micro * said.data)
    if times and micro is None and whole and whole % (times * said.data) == 0:
        return whole // (times * said.data), times
    if micro and times is None:
        reading.assume("no gradients are accumulated: not stated")
        times = 1
    if not micro:
        text = row["micro_batch_per_gpu"]
        reading.lack(f"micro batch is {text!r}, not a number" if text else "micro batch is not stated")
    return micro or 0, times or 1


def _tokens(reading: Reading) -> int:
    """Tokens of a sample; a limit is taken for the length, and a blank for what the source's script does."""
    if re.search(_PICTURES, reading.row["model"], re.IGNORECASE):
        return 0
    text = reading.row["seq_len"]
    if limit := re.fullmatch(r"<=\s?(\d{1,7})", text):
        reading.assume(f"samples of {limit[1]} tokens: {text}")
        return int(limit[1])
    stated = reading.row.whole("seq_len")
    if stated or text:
        if not stated:
            reading.lack(f"seq len is {text!r}, not one number")
        return stated or 0
    if default := reading.default("seq_len"):
        return int(default)
    reading.lack("seq len is not stated")
    return 0


def _fsdp(reading: Reading, said: Arrangement, precision: str, accumulation: int) -> Fsdp:
    notes = reading.row["notes"]
    version = next((each for each in "12" if f"FSDP{each}" in notes), "") or reading.default("fsdp")
    low = re.search(r"MP mode PURE|bf16 pure/mixed", f"{notes} {reading.row['precision']}")
    return Fsdp(
        version=version,
        replicas=said.data // said.shard if said.kind == "hsdp" else 0,
        reduce_dtype="compute" if low and precision.startswith("amp") else "weights",
        sync_every_micro_batch=accumulation > 1 and reading.default("sync") == "each",
    )


def _attention(reading: Reading, engine: Engine, precision: str) -> str:
    if re.search(r"no flash attention|eager attention", reading.row["notes"]):
        return "eager"
    return "auto" if engine.attention == "flash" and precision == "fp32" else engine.attention
