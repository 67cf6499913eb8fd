"""How a row's loss was computed: what its notes say, else its framework's default."""

from __future__ import annotations

import re
from typing import Any

from memcalc.bench.reading import Reading
from memcalc.loss import Loss
from memcalc.precision import PRECISIONS

__all__ = ["GPT_BIGCODE", "loss_of"]

# (pattern in the notes, the word of _FORMS), the first that fits.
_NOTED = (
    (r"cut.cross.entropy", "cut"),
    (r"fused linear (cross.entropy|CE\b)|Liger kernels", "fused linear"),
    (r"fused Triton .*cross-entropy", "in place"),
    (r"chunked (cross.entropy|CE\b|loss)", "head in 8 chunks"),
    # torchtune's table of flags adds them one by one: these come before its chunked loss.
    (r"cumulative step: \+ (packed dataset|compile)", "float32"),
)
# Models of transformers up to 4.49 that do not make logits float32 (modeling_gpt_bigcode.py).
GPT_BIGCODE = r"santacoder|starcoder|bigcode"
# litgpt/utils.py, chunked_cross_entropy: chunk_size=128.
_LITGPT_CHUNK = 128
# A word → the plan's fields, and what is assumed with it.
_FORMS: dict[str, tuple[dict[str, Any], str]] = {
    "float32": ({}, ""),
    "logits, kept": (
        {"loss_dtype": "logits", "keep_logits": True},
        "the loss is taken of the 16-bit logits, which are kept",
    ),
    "float32 output": ({"loss": Loss(float32_output=True)}, ""),
    "float32, kept": ({"loss": Loss(float32_output=True), "keep_logits": True}, ""),
    "compiled": ({"loss": Loss(form="compiled")}, "the loss is compiled"),
    "fused": ({"loss": Loss(form="fused")}, ""),
    "fused linear": ({"loss": Loss(form="fused-linear")}, "fused linear cross-entropy is counted as Liger's"),
    "cut": ({"loss": Loss(form="cut")}, ""),
    "shifted": ({"loss": Loss(shift_copy=True)}, ""),
    "shifted, in place": (
        {"loss": Loss(form="in-place", shift_copy=True)},
        "the Triton kernel writes over a float32 copy of the shifted logits",
    ),
    "float32, shifted": ({"loss": Loss(float32_output=True, shift_copy=True)}, ""),
    "float32, shifted, in place": ({"loss": Loss(form="in-place", float32_output=True, shift_copy=True)}, ""),
    "16-bit, shifted": (
        {"loss_dtype": "logits", "loss": Loss(converted=True, shift_copy=True)},
        "modeling_gpt_bigcode.py takes the loss of 16-bit logits; accelerate makes its output float32",
    ),
    "16-bit, shifted, in place": (
        {"loss_dtype": "logits", "loss": Loss(form="in-place", converted=True, shift_copy=True)},
        "modeling_gpt_bigcode.py takes the loss of 16-bit logits; accelerate makes its output float32",
    ),
    "head in 8 chunks": (
        {"loss": Loss(chunks=8, chunk_head=True)},
        "a chunked loss is counted as torchtune's and torchtitan's: 8 chunks, the head's product too",
    ),
}


def loss_of(reading: Reading, precision: str, tokens: int) -> dict[str, Any]:
    """The plan's fields; blank for a model without a vocabulary, whose scores are few."""
    row = reading.row
    if not row["vocab"] or not tokens:
        return {}
    default = reading.default("loss")
    if default == "shifted" and re.search(GPT_BIGCODE, row["model"], re.IGNORECASE):
        default = "16-bit, shifted"
    word = next((word for pattern, word in _NOTED if re.search(pattern, row["notes"])), default)
    if word == "in place":
        word = f"{default}, in place" if f"{default}, in place" in _FORMS else "shifted, in place"
    if word == "compiled" and reading.said("compile") != "yes":
        word = "float32"
    if word == "chunked":
        return _litgpt(precision, tokens, finetuned=bool(row["lora_rank"]))
    if word == "float32" and reading.said("compile") == "yes" and reading.default("compiled loss") == "yes":
        return {"loss": Loss(form="compiled")}
    fields, said = _FORMS.get(word, ({}, ""))
    if said:
        reading.assume(said)
    if "loss" in fields and fields["loss"].chunks > tokens:
        return {}
    if "loss" in fields and fields["loss"].chunk_head and reading.said("compile") == "yes":
        return {"loss": Loss(form="compiled", chunks=8, chunk_head=True)}
    return fields


def _litgpt(precision: str, tokens: int, *, finetuned: bool) -> dict[str, Any]:
    """128 tokens a chunk; adapters are tuned with the head in chunks too (lm_head_chunk_size of litgpt/finetune/lora.py)."""
    loss = Loss(chunks=-(-tokens // _LITGPT_CHUNK), chunk_head=finetuned)
    return {"loss": loss} | ({} if PRECISIONS[precision].autocast else {"loss_dtype": "logits"})
