"""The columns on how a row was trained: dtypes, optimizer, checkpointing, attention."""

from __future__ import annotations

import re

from memcalc.bench.reading import Reading
from memcalc.checkpointing import Checkpointing
from memcalc.compute import Compute
from memcalc.models import FAMILIES
from memcalc.optimizers import OPTIMIZERS
from memcalc.precision import PRECISIONS
from memcalc.spec import Model
from memcalc.update import Update

__all__ = [
    "ACTIVATIONS_AWAY",
    "attention_of",
    "checkpointing_of",
    "compute_of",
    "optimizer_of",
    "precision_of",
    "update_of",
]

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
    ("bf16+fp32 master", "bf16"): "bf16-master",
    ("fp16+fp32 master", "fp16"): "fp16-master",
    ("fp16", "fp16"): "fp16",
}
_EVERY = re.compile(r"selective ?\(every (\d{1,3})(?:st|nd|rd|th) layer\)")
_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
# What a dtype cell holds → what is missing for it.
_DTYPE_LACKS = (
    (r"fp8|nvfp4|mxfp8", "8-bit and 4-bit matrix products"),
    (r"nf4|int4|4-bit|gptq|bnb", "quantised weights"),
    (r"cpu", "weights on the CPU"),
)
# optimizer → (name, kind); a blank kind is the framework's default.
_OPTIMIZERS = {
    "adamw": ("adamw", ""),
    "adam": ("adam", ""),
    "adamw (fused)": ("adamw", "fused"),
    "adam (fused)": ("adam", "fused"),
    "sgd": ("sgd", ""),
    "sgd momentum": ("sgd-momentum", ""),
    # colossalai/nn/optimizer/hybrid_adam.py updates what is on the GPU with one fused kernel.
    "hybridadam (fused)": ("adamw", "fused"),
    "cpu_adam": ("adam", "fused"),
    # composer/optim/decoupled_weight_decay.py: one weight at a time, with torch's own two temporaries.
    "decoupled_adamw": ("adamw", "for-loop"),
    "adam8bit (bnb)": ("adamw-8bit", "fused"),
    "adamw8bit (bnb)": ("adamw-8bit", "fused"),
    "adamw 8-bit": ("adamw-8bit", "fused"),
    "adamw_8bit": ("adamw-8bit", "fused"),
    "adamw (8-bit bitsandbytes)": ("adamw-8bit", "fused"),
    "pagedadamw": ("paged-adamw", "fused"),
    "pagedadamw8bit": ("paged-adamw-8bit", "fused"),
    "pagedadamw (bitsandbytes)": ("paged-adamw", "fused"),
    "adamw8bit (torchao)": ("adamw-8bit-ao", "fused"),
    "adamw4bit (torchao)": ("adamw-4bit-ao", "fused"),
    "adamwfp8 (torchao)": ("adamw-fp8-ao", "fused"),
    "fusedadam": ("fused-adam", "fused"),
    "fusedadam (apex)": ("fused-adam", "fused"),
    "adafactor": ("adafactor-hf", "for-loop"),
    "adafactor (torch)": ("adafactor", ""),
    "lion": ("lion", ""),
    "adagrad": ("adagrad", ""),
    "rmsprop": ("rmsprop", ""),
    "nadam": ("nadam", ""),
    "radam": ("radam", ""),
    "adamax": ("adamax", ""),
    "muon": ("muon", "for-loop"),
}
# What the cell may say beside an optimizer's name, without changing it.
_BESIDE = re.compile(r",? (step in backward|\(low memory config\))")
# Compute → the same without its 8-bit products, and how those are made; torchao's of before 2025 was by tensor.
_FLOAT8 = re.compile(r"fp8linear\+bf16|mxfp8(\+bf16)?")
# torchtune's "low memory" recipes say optimizer_in_bwd: True (recipes/configs/llama2/7B_full_low_memory.yaml), and its
# table of flags adds them one by one: what comes after the step in backward has it too.
_IN_BACKWARD = re.compile(
    r"fused in backward|step in backward|(?<!no )optimizer_in_bwd|low memory config"
    r"|cumulative step: \+ (activation offloading|8-bit)"
)
_TE_FLOAT8 = "amp_fp8"
ACTIVATIONS_AWAY = "activations->cpu"
_ATTENTION = {
    "sdpa": "auto",
    "sdpa/flash": "auto",
    "default (sdpa)": "auto",
    "flash": "flash",
    "flash/triton": "flash",
    "triton flash": "flash",
    # xformers.ops.memory_efficient_attention is torch's efficient kernel, where the card has no other.
    "xformers": "efficient",
    "flash/xformers": "efficient",
    "eager": "eager",
    "eager (fused softmax)": "eager",
    "unfused": "eager",
    "local unfused": "eager",
    "fused": "flash",
    "te default": "flash",
}


def precision_of(reading: Reading, built: Model | None) -> str:
    """The name in PRECISIONS; ``fp32``, after a lack was noted, where there is none."""
    weights, compute = reading.said("param_dtype"), _compute(reading)
    if _FLOAT8.fullmatch(compute):
        compute = "bf16"
    if compute == _TE_FLOAT8:
        reading.assume("TransformerEngine's 8-bit inputs are counted as the 16-bit ones they are made of")
        compute = "amp_bf16"
    missing = [reason for pattern, reason in _DTYPE_LACKS if re.search(pattern, f"{weights} {compute}")]
    for reason in missing:
        reading.lack(reason)
    if missing:
        return "fp32"
    if not weights or not compute:
        reading.lack("dtypes are not stated")
        return "fp32"
    plain = built is not None and (built.family == "llama" or (built.family == "decoder" and built.norm != "layer"))
    if (weights, compute) == ("bf16", "bf16 autocast") and plain:
        reading.assume(
            "autocast over bfloat16 weights is counted as plain bfloat16: norm, softmax and loss are float32 either way"
        )
        compute = "bf16"
    if (weights, compute) == ("fp16", "fp16 autocast") and plain:
        reading.assume(
            "autocast over float16 weights is counted as plain float16: norm, softmax and loss are float32 either way"
        )
        compute = "fp16"
    precision = _PRECISION.get((weights, compute))
    if precision is None:
        reading.lack(f"weights in {weights} with compute in {compute}")
        return "fp32"
    if PRECISIONS[precision].master:
        return precision  # which gradients and states go with it is the strategy's to know
    if reading.row["lora_rank"] or reading.row["grad_dtype"] == "adapter only":
        return precision  # gradients and states are the adapters', whose dtype is their library's to know
    kept = PRECISIONS[precision].weights
    for column in ("grad_dtype", "optimizer_state_dtype"):
        text = reading.row[column]
        own = column[0] == "o" and re.match(r"int[48]|fp8|.*(factored|paged)", text)
        if text and _DTYPES.get(text) != kept and not own:
            reading.lack(f"{column.replace('_', ' ')} {text} beside weights in {weights}")
    return precision


def optimizer_of(reading: Reading) -> tuple[str, str]:
    """The name in OPTIMIZERS and the form of its step."""
    text = reading.said("optimizer")
    if not text:
        reading.lack("optimizer is not stated")
        return "adamw", "foreach"
    found = _OPTIMIZERS.get(_BESIDE.sub("", text.lower()))
    if found is None:
        reading.lack(f"optimizer {text}")
        return "adamw", "foreach"
    name, kind = found
    row = OPTIMIZERS[name]
    return name, kind or (reading.default("optimizer_kind") if len(row.kinds) > 1 else row.kinds[0])


def _compute(reading: Reading) -> str:
    return re.sub(r"[()]|, channels_last", "", reading.said("compute_dtype"))


def update_of(reading: Reading) -> Update:
    """Steps inside backward, which torchtune calls optimizer_in_bwd."""
    said = f"{reading.row['notes']} {reading.row['optimizer']}"
    return Update(in_backward=bool(_IN_BACKWARD.search(said)))


def compute_of(reading: Reading) -> Compute:
    """torch.compile, and products in 8 bit by torchao."""
    compile, how = reading.said("compile") == "yes", "none"
    if _FLOAT8.fullmatch(_compute(reading)):
        rowwise = "rowwise" in reading.row["notes"]
        how = "mxfp8" if "mxfp8" in _compute(reading) else "rowwise" if rowwise else "tensorwise"
    if compile:
        reading.assume("torch.compile is counted as eager with fused norms")
    if "float8 all-gather" in reading.row["notes"]:
        reading.assume("parameters gathered in float8 are counted as gathered in bfloat16")
    return Compute(compile=compile, float8=how, offload_activations=reading.row["offload"] == ACTIVATIONS_AWAY)


def checkpointing_of(reading: Reading) -> tuple[int, Checkpointing]:
    """Blocks per activation checkpoint and what one keeps, as in Plan."""
    text = reading.said("activation_checkpointing")
    if text.startswith("full"):
        if text != "full":
            reading.assume(f"activation checkpointing: {text}")
        return 1, Checkpointing()
    if found := _EVERY.fullmatch(text):
        return 1, Checkpointing(one_in=int(found[1]))
    if text.startswith("selective"):
        policy = reading.default("selective") if text == "selective" else text[10:-1]
        if policy == "op":
            return 1, Checkpointing(policy="matrix-products")
        reading.lack("selective activation checkpointing", only_less=True)
    elif text != "none":
        reading.lack(f"checkpointing {text}")
    return 0, Checkpointing()


def attention_of(reading: Reading, built: Model | None) -> str:
    """The attention kernel, as in Plan; families without attention have ``auto``."""
    if built is None or not built.heads or FAMILIES[built.family].written_out:
        return "auto"
    # What a source says it set is not always what its framework then used.
    text = reading.default("attention used") or reading.said("attention").lower()
    if text == "te default":
        reading.assume("Transformer Engine chooses a fused kernel, which keeps what flash attention keeps")
    if text not in _ATTENTION:
        reading.lack(f"attention {text}")
    return _ATTENTION.get(text, "auto")
