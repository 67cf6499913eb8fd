"""A row's cells → the Plan they say, or all the reasons why memcalc cannot say it yet."""

from __future__ import annotations

import re
from dataclasses import dataclass

from memcalc.allocator_options import AllocatorOptions
from memcalc.bench.layouts import strategy
from memcalc.bench.reading import Lack, Reading
from memcalc.bench.rows import Row
from memcalc.bench.shapes import model
from memcalc.errors import InputError
from memcalc.hardware import Bounds
from memcalc.optimizers import OPTIMIZERS
from memcalc.plan import FUSED_RMS_NORM_SINCE, Plan
from memcalc.precision import PRECISIONS
from memcalc.spec import Model

__all__ = ["Said", "say"]

# (param_dtype, compute_dtype) → precision.
_PRECISION = {
    ("fp32", "fp32"): "fp32",
    ("fp32", "bf16"): "amp-bf16",
    ("fp32", "amp_bf16"): "amp-bf16",
    ("fp32", "bf16 autocast"): "amp-bf16",
    ("fp32", "fp16"): "amp-fp16",
    ("fp32", "fp16 amp"): "amp-fp16",
    ("fp32", "fp16 autocast"): "amp-fp16",
    ("bf16", "bf16"): "bf16",
    ("fp16", "fp16"): "fp16",
}
_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
# What a dtype cell holds → what is missing for it.
_DTYPE_LACKS = (
    (r"fp8|nvfp4|mxfp8", "8-bit and 4-bit matrix products"),
    (r"nf4|int4|4-bit|gptq|bnb", "quantised weights"),
    (r"master|cpu", "16-bit weights with float32 master copies"),
)
# optimizer → (name, kind); a blank kind is the framework's default.
_OPTIMIZERS = {
    "adamw": ("adamw", ""),
    "adam": ("adam", ""),
    "adamw (fused)": ("adamw", "fused"),
    "adam (fused)": ("adam", "fused"),
    "sgd": ("sgd", ""),
    "sgd momentum": ("sgd-momentum", ""),
    # composer/optim/decoupled_weight_decay.py: one weight at a time, with torch's own two temporaries.
    "decoupled_adamw": ("adamw", "for-loop"),
    "adam8bit (bnb)": ("adamw-8bit", "fused"),
    "adamw8bit (bnb)": ("adamw-8bit", "fused"),
}
_ATTENTION = {
    "sdpa": "auto",
    "sdpa/flash": "auto",
    "default (sdpa)": "auto",
    "flash": "flash",
    "flash/triton": "flash",
    "eager": "eager",
}
# (pattern in the notes, what is missing, whether it only takes memory away).
_NOTED = (
    (r"\bQ?LoRA\b", "LoRA", False),
    (r"\bAdapter\b", "adapters", False),
    (r"fused in backward|optimizer_in_bwd", "the optimizer's step inside backward", False),
    (r"; thunder|thunder-|;[^;]*\+(nvfuser|cudnn)|delayed-te", "thunder's own compiler", False),
    (r"(fused|chunked) (linear )?(cross.entropy|CE\b)|chunked loss", "fused or chunked loss", True),
    (r"fused Triton", "Triton kernels for norm, rotary positions and loss", True),
)  # fmt: skip
# The framework's loss → what differs from memcalc's, which drops the logits before backward.
_LOSSES = {
    "16-bit": "the loss is counted on float32 logits, which is more than the source needs",
    "float32, kept": "the source keeps its float32 logits through backward, which is not counted",
}
# gpu_type → card; with several sizes, the catalog names by gpu_gib.
_CARDS = (
    (r"\bA100\b", {80: "a100-80gb", 40: "a100-40gb"}),
    (r"\bV100\b", {32: "v100-32gb", 16: "v100-16gb"}),
    (r"\bH100\b", {80: "h100-80gb"}),
    (r"\bH200\b", {141: "h200"}),
    (r"\bA800\b", {80: "a800-80gb"}),
    (r"\bB200\b", {180: "b200"}),
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Said:
    """What a row says: the plan unless something forbids it, and what was assumed or lacks."""

    plan: Plan | None
    assumptions: tuple[str, ...]
    lacks: tuple[Lack, ...]
    allocator: AllocatorOptions
    context: Bounds | None = None
    """Bytes outside of torch that the source itself states."""


def say(row: Row) -> Said:
    """Read a row. For the ``allocated`` meter a plan is there also when all that lacks only takes memory away."""
    reading = Reading(row)
    built = model(reading)
    plan = _plan(reading, built)
    context = _context(reading) if row.meter == "device" else None
    allocator = AllocatorOptions.parse("" if row.meter == "allocated" else reading.default("allocator"))
    lacks = tuple(reading.lacks)
    return Said(
        # What was reserved depends on all moments, not on the fullest alone.
        plan=plan if not lacks or (row.meter == "allocated" and all(lack.only_less for lack in lacks)) else None,
        assumptions=tuple(reading.assumptions),
        lacks=lacks,
        allocator=allocator,
        context=context,
    )


def _plan(reading: Reading, built: Model | None) -> Plan | None:
    name, ranks = strategy(reading)
    precision = _precision(reading, built)
    optimizer, kind = _optimizer(reading)
    checkpoint = _checkpointing(reading)
    attention = _attention(reading, built)
    batch = reading.number("micro_batch_per_gpu")
    tokens = reading.number("seq_len") if built and built.family in ("gpt2", "llama") else 0
    accumulation = int(accumulated) if (accumulated := reading.said("grad_accum")).isdecimal() else 1
    _extras(reading)
    torch = _torch(reading)
    gpu = _gpu(reading)
    if built is None or any(not lack.only_less for lack in reading.lacks):
        return None
    try:
        return Plan(
            model=built,
            strategy=name,
            ranks=ranks,
            precision=precision,
            optimizer=optimizer,
            optimizer_kind=kind,
            micro_batch=batch,
            accumulation=accumulation,
            tokens=tokens,
            checkpoint_every=checkpoint,
            attention=attention,
            gpu=gpu,
            torch=torch,
        )
    except InputError as error:
        reading.lack(f"no sound plan: {error}")
        return None


def _precision(reading: Reading, built: Model | None) -> str:
    weights, compute = reading.said("param_dtype"), re.sub(r"[()]", "", reading.said("compute_dtype"))
    missing = [reason for pattern, reason in _DTYPE_LACKS if re.search(pattern, f"{weights} {compute}")]
    for reason in missing:
        reading.lack(reason)
    if missing:
        return "fp32"
    if not weights or not compute:
        reading.lack("dtypes are not stated")
        return "fp32"
    if (weights, compute) == ("bf16", "bf16 autocast") and built and built.family == "llama":
        reading.assume(
            "autocast over bfloat16 weights is counted as plain bfloat16: norm, softmax and loss are float32 either way"
        )
        compute = "bf16"
    precision = _PRECISION.get((weights, compute))
    if precision is None:
        reading.lack(f"weights in {weights} with compute in {compute}")
        return "fp32"
    kept = PRECISIONS[precision].weights
    for column in ("grad_dtype", "optimizer_state_dtype", "reduce_dtype"):
        text = reading.row[column]
        if text and _DTYPES.get(text) != kept and not (column[0] == "o" and text == "int8"):
            reading.lack(f"{column.replace('_', ' ')} {text} beside weights in {weights}")
    return precision


def _optimizer(reading: Reading) -> tuple[str, str]:
    text = reading.row["optimizer"]
    if not text:
        reading.lack("optimizer is not stated")
        return "adamw", "foreach"
    found = _OPTIMIZERS.get(text.lower())
    if found is None:
        reading.lack(f"optimizer {text}")
        return "adamw", "foreach"
    name, kind = found
    row = OPTIMIZERS[name]
    return name, kind or (reading.default("optimizer_kind") if len(row.kinds) > 1 else row.kinds[0])


def _checkpointing(reading: Reading) -> int:
    text = reading.said("activation_checkpointing")
    if text.startswith("full"):
        if text != "full":
            reading.assume(f"activation checkpointing: {text}")
        return 1
    if text != "none":
        reading.lack("selective activation checkpointing" if text.startswith("selective") else f"checkpointing {text}")
    return 0


def _attention(reading: Reading, built: Model | None) -> str:
    if built is None or built.family not in ("gpt2", "llama"):
        return "auto"
    text = reading.said("attention")
    if text not in _ATTENTION:
        reading.lack(f"attention {text}")
    return _ATTENTION.get(text, "auto")


def _extras(reading: Reading) -> None:
    row = reading.row
    if row["lora_rank"]:
        reading.lack("LoRA")
    offload = reading.said("offload")
    if offload not in ("none", ""):
        reading.lack(f"offload {offload}")
    if re.search(r"peak active|active bytes", row["notes"]):
        reading.assume("peak active bytes are counted as allocated: no block waits for a stream")
    for pattern, reason, only_less in _NOTED:
        if re.search(pattern, row["notes"]):
            reading.lack(reason, only_less=only_less)
    if row["vocab"]:  # only a model with a vocabulary has logits of a size that counts
        loss = reading.default("loss")
        if loss in ("chunked", "fused"):
            reading.lack("fused or chunked loss", only_less=True)
        elif loss in _LOSSES:
            reading.assume(_LOSSES[loss])


def _torch(reading: Reading) -> str:
    release = reading.default("torch")
    if reading.said("compile") != "yes":
        return release
    since = "{}.{}".format(*FUSED_RMS_NORM_SINCE)
    reading.assume(f"torch.compile is counted as eager, its norms as the one kernel eager has from torch {since} on")
    return max(release, since, key=lambda text: tuple(map(int, text.split("."))))


def _gpu(reading: Reading) -> str | None:
    row = reading.row
    text = re.sub(r"[-_]", " ", row["gpu_type"]).upper()
    sizes = next((sizes for pattern, sizes in _CARDS if re.search(pattern, text)), None)
    size = float(row["gpu_gib"]) if re.fullmatch(r"\d+(\.\d+)?", row["gpu_gib"]) else None
    if sizes is None:
        if row.meter == "boundary":
            reading.lack(f"a card memcalc does not know: {row['gpu_type']}" if text else "card is not stated")
        return None
    nominal = min(sizes, key=lambda known: abs(known - (size or max(sizes))))
    if row.meter == "boundary" and (size is None or abs(size - nominal) > 0.1 * nominal):
        reading.lack(f"a card memcalc does not know: {row['gpu_type']} of {row['gpu_gib'] or 'unknown'} GiB")
    elif size is None and len(sizes) > 1:
        reading.assume(f"{sizes[nominal]}: the card's memory is not stated")
    return sizes[nominal]


def _context(reading: Reading) -> Bounds | None:
    text = reading.default("context")
    if not text:
        return None
    low, high = (int(part) * 2**20 for part in text.split("-"))
    return Bounds(low, high)
