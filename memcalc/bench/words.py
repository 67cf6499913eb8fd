"""A row's cells → the Plan they say, or all the reasons why memcalc cannot say it yet."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from memcalc.adapters import Adapter
from memcalc.bench.adapters import adapter_of, settle_base
from memcalc.bench.cards import card_of
from memcalc.bench.layouts import stage_of, strategy_of
from memcalc.bench.lengths import settle_length
from memcalc.bench.losses import GPT_BIGCODE, loss_of
from memcalc.bench.megatron import megatron_run, tokens_of
from memcalc.bench.perceptrons import dropout_of
from memcalc.bench.pictures import images_of
from memcalc.bench.reading import Lack, Reading
from memcalc.bench.rows import Row
from memcalc.bench.shapes import model_of
from memcalc.bench.sharded import masters_of, sharded_of
from memcalc.bench.training import attention_of, checkpointing_of, compute_of, optimizer_of, precision_of, update_of
from memcalc.checkpointing import Checkpointing
from memcalc.errors import InputError
from memcalc.hardware import Bounds
from memcalc.implementation import Implementation
from memcalc.models import FAMILIES
from memcalc.plan import Plan
from memcalc.spec import Model

__all__ = ["Said", "say"]

# (pattern in the notes, what is missing, whether it only takes memory away).
_NOTED = (
    (r"; thunder|thunder-|;[^;]*\+(nvfuser|cudnn)|delayed-te", "thunder's own compiler", False),
    (r"frozen embeddings", "frozen embeddings", True),
)  # fmt: skip
# fms-acceleration, plugins/fused-ops-and-kernels: RMSNorm that keeps its input, rotary positions in place.
_KERNELS = "norm=fused, rotary=kernel"
# Models of a family whose code in transformers has defaults of its own.
_OWN_CODE = ((GPT_BIGCODE, "gpt_bigcode"), (r"^opt-", "opt"))


@dataclass(frozen=True, kw_only=True, slots=True)
class Said:
    """What a row says: the plan unless something forbids it, and what was assumed or lacks."""

    plan: Plan | None
    assumptions: tuple[str, ...]
    lacks: tuple[Lack, ...]
    usable: Bounds | None
    """Bytes torch can use of the row's card, so that a verdict and a full card mean something; None: not known."""
    stage: int | None = None
    """The pipeline stage the row was read on; None where that is not said, and the fullest is taken."""
    context: Bounds | None = None
    """Bytes outside of torch that the source itself states."""


def say(row: Row) -> Said:
    """Read a row. For the ``allocated`` meter a plan is there also when all that lacks only takes memory away."""
    reading = Reading(row)
    settle_length(reading)
    quantize = settle_base(reading)
    built = model_of(reading)
    gpu, usable = card_of(reading)
    plan = _plan(reading, built, gpu, quantize)
    context = _context(reading) if row.meter == "device" else None
    lacks = tuple(reading.lacks)
    return Said(
        # What was reserved depends on all moments, not on the fullest alone.
        plan=plan if not lacks or (row.meter == "allocated" and all(lack.only_less for lack in lacks)) else None,
        assumptions=tuple(reading.assumptions),
        lacks=lacks,
        usable=usable,
        stage=stage_of(reading, plan),
        context=context,
    )


def _plan(reading: Reading, built: Model | None, gpu: str | None, quantize: str) -> Plan | None:
    strategy, ranks, layout = strategy_of(reading)
    precision = masters_of(reading, strategy, precision_of(reading, built))
    optimizer, kind = optimizer_of(reading)
    checkpoint, checkpointing = checkpointing_of(reading)
    adapter = adapter_of(reading, quantize, checkpointed=checkpoint > 0)
    attention = attention_of(reading, built)
    batch = images_of(reading)
    tokens = tokens_of(reading, built)
    accumulation = reading.number("grad_accum") if reading.row["grad_accum"] else int(reading.default("grad_accum"))
    _extras(reading)
    update, compute = update_of(reading), compute_of(reading)
    sharded = sharded_of(reading, strategy, ranks, precision, built) if built else {}
    if built is None or any(not lack.only_less for lack in reading.lacks):
        return None
    fields: dict[str, Any] = {
        "dropout": _dropout(reading, built),
        "set_to_none": _set_to_none(reading, reading.default("torch")),
        "implementation": _implementation(reading, built, adapter),
        "reentrant": checkpoint > 0 and checkpointing == Checkpointing() and _reentrant(reading, built),
    }
    if built.family.startswith("megatron"):
        fields |= megatron_run(reading, layout.tensor)
    elif FAMILIES[built.family].reads == "tokens" and not built.classes and strategy != "data-parallel":
        fields |= loss_of(reading, precision, tokens)
    try:
        return Plan(
            model=built,
            strategy=strategy,
            ranks=ranks,
            precision=precision,
            optimizer=optimizer,
            optimizer_kind=kind,
            micro_batch=batch,
            accumulation=accumulation,
            tokens=tokens,
            checkpoint_every=checkpoint,
            checkpointing=checkpointing,
            adapter=adapter,
            attention=attention,
            gpu=gpu,
            torch=reading.default("torch"),
            allocator=reading.default("allocator"),
            layout=layout,
            update=update,
            compute=compute,
            **fields,
            **sharded,
        )
    except InputError as error:
        reading.lack(f"no sound plan: {error}")
        return None


def _extras(reading: Reading) -> None:
    row = reading.row
    if re.search(r"peak active|active bytes", row["notes"]):
        reading.assume("peak active bytes are counted as allocated: no block waits for a stream")
    for pattern, reason, only_less in _NOTED:
        if re.search(pattern, row["notes"]):
            reading.lack(reason, only_less=only_less)


def _dropout(reading: Reading, built: Model) -> float:
    """What the name of an MLP states, else the framework's for the family."""
    return dropout_of(reading.row["model"]) or float(reading.default(f"dropout {_code(reading, built)}") or 0)


def _code(reading: Reading, built: Model) -> str:
    """Whose code a framework's defaults speak of: a family's, or that of one kind of it."""
    own = (name for pattern, name in _OWN_CODE if re.search(pattern, reading.row["model"], re.IGNORECASE))
    return next(own, built.family)


def _set_to_none(reading: Reading, torch: str) -> bool:
    """torch/optim/optimizer.py: zero_grad keeps the gradients, as zeros, before 2.0."""
    keeps = int(torch.split(".")[0]) < 2
    if keeps:
        reading.assume("gradients stay allocated: zero_grad sets them to zero before torch 2.0")
    return not keeps


def _reentrant(reading: Reading, built: Model) -> bool:
    """The form of checkpointing that the framework takes where nothing is said."""
    return built.family != "t5" and reading.default("reentrant") == "yes"


def _implementation(reading: Reading, built: Model, adapter: Adapter) -> Implementation:
    """How the framework writes the family's layers; torch.compile makes no difference between norms or positions."""
    kernels = re.search("fused Triton|Liger RMSNorm", reading.row["notes"])
    said = _KERNELS if kernels else reading.default(f"implementation {_code(reading, built)}")
    values = dict(pair.split("=") for pair in said.split(", ")) if said else {}
    if adapter.fused and adapter.targets == "all-linear":
        values["gate_up"] = "kernel"
    if "flash" in reading.row["attention"] and reading.default("flash") == "grouped":
        values.pop("grouped", None)
    if reading.said("compile").startswith("yes"):
        values = {field: value for field, value in values.items() if field == "softmax"}
    return Implementation.suited(built, values)


def _context(reading: Reading) -> Bounds | None:
    text = reading.default("context")
    if not text:
        return None
    low, high = (int(part) * 2**20 for part in text.split("-"))
    return Bounds(low, high)
