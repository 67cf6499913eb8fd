"""The columns ``lora_rank`` and ``param_dtype`` of a row that trains adapters beside frozen weights, and its notes on them."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

from memcalc.adapters import Adapter
from memcalc.bench.reading import Reading

__all__ = ["adapter_of", "settle_base"]

# What a dtype cell says of the frozen weights → how they are stored.
_BASES = (
    (r"\bnf4-dq\b", "nf4-double"),
    (r"\bnf4\b", "nf4"),
    (r"int4 \(gptq\)", "gptq"),
    (r"\bint8\b", "int8"),
)
_UNKNOWN = re.compile(r"awq|hqq|4-bit|int4 base")
_FROZEN = re.compile(r"^(bf16|fp16|fp32) \(frozen\)$")
_BESIDE = re.compile(r"base(?: \+ (bf16|fp16|fp32))?$|\((bf16|fp16) storage\)$")
# (pattern in the notes, targets), the first that fits.
_TARGETS = (
    (r"all linear|all layers|\bon all\b", "all-linear"),
    (r"\bq, ?k, ?v, ?o\b|q_proj, ?k_proj, ?v_proj, ?o_proj|attention", "attention"),
    (r"\bq, ?v\b", "query-value"),
)
_DROPOUT = re.compile(r"\bdropout (0?\.\d{1,4})\b")


def settle_base(reading: Reading) -> str:
    """How the frozen weights are stored; in the place of the cell comes the dtype of all that is not quantised."""
    text = reading.row["param_dtype"]
    if frozen := _FROZEN.match(text):
        _put(reading, frozen[1])
        return "none"
    kind = next((kind for pattern, kind in _BASES if re.search(pattern, text)), "")
    if not kind or _UNKNOWN.search(text):
        return "none"
    beside = _BESIDE.search(text)
    rest = (beside[1] or beside[2] if beside else "") or re.sub(r" .*", "", reading.row["compute_dtype"])
    if not rest:
        return "none"
    if kind == "nf4" and reading.default("quantisation") == "double":
        kind = "nf4-double"
    # On one GPU trl/trainer/sft_trainer.py calls peft's prepare_model_for_kbit_training, which makes all that is not
    # quantised float32; fms-acceleration leaves it out where it loads the adapters itself (framework_plugin_bnb.py).
    if "baseline-peft-bnb" in reading.row["notes"] and reading.row.whole("n_gpus") == 1:
        reading.assume("what is not quantised is float32: prepare_model_for_kbit_training")
        rest = "fp32"
    _put(reading, rest)
    return kind


def _put(reading: Reading, dtype: str) -> None:
    reading.row = dataclasses.replace(reading.row, cells={**reading.row.cells, "param_dtype": dtype})


def adapter_of(reading: Reading, quantize: str, *, checkpointed: bool) -> Adapter:
    """What is trained: LoRA where a rank stands, litgpt's adapters where the notes name them, else all weights."""
    row, notes = reading.row, reading.row["notes"]
    library = reading.default("adapters")
    if not row["lora_rank"]:
        kind = (
            "adapter-v2"
            if re.search(r"\bAdapter v2\b", notes)
            else "adapter"
            if re.search(r"\bAdapter\b", notes)
            else ""
        )
        if not kind:
            if re.search(r"\bQ?LoRA\b", notes) or quantize != "none":
                reading.lack("LoRA of a rank that is not stated")
            return Adapter()
        return Adapter(kind=kind, **_quantised(reading, quantize))
    rank = row.whole("lora_rank")
    if not rank:
        reading.lack(f"LoRA of a rank that is not stated: {row['lora_rank']}")
        return Adapter()
    if re.search(r"\bDoRA\b|unsloth", notes):
        reading.lack("LoRA of another kind")
    targets = next((targets for pattern, targets in _TARGETS if re.search(pattern, notes)), "")
    if not targets:
        targets = reading.default("lora_targets") or "query-value"
        reading.assume(f"LoRA on {targets}: the row does not say")
    dropout = _DROPOUT.search(notes)
    share = float(dropout[1]) if dropout else float(reading.default("lora_dropout") or 0)
    fused = "fused LoRA" in notes and not share
    if "fused LoRA" in notes:
        how = "to keep the input of each layer only" if fused else "as PEFT's own operations, which keep more"
        reading.assume(f"fused LoRA kernels are counted {how}")
    autocast = "autocast" in row["compute_dtype"] or _cast_by_policy(reading)
    return Adapter(
        kind="lora",
        rank=rank,
        targets=targets,
        fused=fused,
        dropout=share,
        dtype="float32" if library == "peft" else "weights",
        autocast=library == "peft" and autocast,
        input_gradients=library == "peft" and checkpointed,
        scattered=library == "litgpt" and targets == "query-value",
        trains_rest=library == "deepspeed-chat" and row["grad_dtype"] != "adapter only",
        **_quantised(reading, quantize),
    )


def _cast_by_policy(reading: Reading) -> bool:
    """FSDP computes all units in the dtype of its mixed-precision policy, as autocast would."""
    if "fsdp" not in reading.row["strategy"] or reading.default("policy") != "compute":
        return False
    return re.match(r"(bf|fp)16", reading.row["compute_dtype"]) is not None


def _quantised(reading: Reading, quantize: str) -> dict[str, Any]:
    if quantize == "none":
        return {}
    words = reading.default("quantised")
    return {
        "quantize": quantize,
        "quantize_head": "head" in words,
        # MatMul8bitLt made the transposed input as well until bitsandbytes 0.45, of the end of 2024.
        "quantized_saves_input": quantize == "int8" or ("input" in words and quantize.startswith("nf4")),
    }
