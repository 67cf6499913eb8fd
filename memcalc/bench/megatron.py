"""Rows of Megatron: the flags in their notes, and what Megatron's arguments mean for the model and the run.

Defaults are those of NVIDIA/Megatron-LM megatron/training/arguments.py; of bigscience, the scripts
train/tr3-1B3-baseline/tr3m-1B3-emb-norm-pile.slurm and train/tr11-176B-ml/tr11-176B-ml.slurm.
"""

from __future__ import annotations

import re
from typing import Any

from memcalc.bench.reading import Reading
from memcalc.implementation import Implementation
from memcalc.loss import Loss
from memcalc.models import FAMILIES
from memcalc.spec import Model

__all__ = ["flags_of", "megatron_model", "megatron_run", "tokens_of"]

_FLAGS = re.compile(r"flags: ([^;]*)")
# Flags that change nothing that is counted, or that other columns say as well.
_NEUTRAL = {
    "attention-backend", "attention-softmax-in-fp32", "overlap-grad-reduce", "overlap-param-gather",
    "no-gradient-accumulation-fusion", "calculate-per-token-loss", "ffn-hidden-size", "num-distributed-optimizer-instances",
    "no-create-attention-mask-in-dataloader", "recompute-granularity", "recompute-method", "recompute-num-layers",
    "num-query-groups", "decoder-num-layers", "decoder-first-pipeline-num-layers", "decoder-last-pipeline-num-layers",
}  # fmt: skip
_MODEL = {
    "swiglu", "untie-embeddings-and-output-weights", "disable-bias-linear", "position-embedding-type", "kv-channels",
    "normalization", "make-vocab-size-divisible-by", "hidden-dropout", "attention-dropout",
}  # fmt: skip
# Words of a tokenizer where the column is blank: bert-large-cased has 28996, to which megatron/training/tokenizer adds
# [BOS], [EOS], and 100 for T5.
_VOCABS = {"BertWordPieceCase": 28996 + 2 + 100}
_SIDES = re.compile(r"(\d{1,4}) enc \+ (\d{1,4}) dec; (\d{1,7}) enc / (\d{1,7}) dec")


def flags_of(reading: Reading) -> dict[str, str]:
    """Command-line flags the notes name, without their dashes.

    >>> from memcalc.bench.rows import Row
    >>> cells = {"notes": "tier A; flags: swiglu, kv-channels=64; local layers"}
    >>> flags_of(Reading(Row(id="a", source="b", metric="OOM", measured=None, cells=cells)))
    {'swiglu': '', 'kv-channels': '64'}
    """
    found = _FLAGS.search(reading.row["notes"])
    parts = re.sub(r",? ?virtual pipeline.*", "", found[1]).split(", ") if found else []
    return {name: value for name, _, value in (part.strip().partition("=") for part in parts)}


def tokens_of(reading: Reading, built: Model | None) -> int:
    """Tokens of a sample; of the encoder where the cell has both sides'."""
    if built is None or FAMILIES[built.family].reads != "tokens":
        return 0
    return built.context if built.decoder_layers else reading.number("seq_len")


def megatron_model(reading: Reading, family: str) -> Model | None:
    """The model of a row, or None after the lack was noted."""
    flags, row = flags_of(reading), reading.row
    numbers: dict[str, Any] = {name: reading.number(name) for name in ("hidden", "heads", "kv_heads", "ffn")}
    sides = _SIDES.fullmatch(row["layers"] + "; " + row["seq_len"])
    if family == "megatron-t5" and sides:
        numbers |= dict(
            zip(("layers", "decoder_layers", "context", "decoder_tokens"), map(int, sides.groups()), strict=True)
        )
    else:
        numbers |= {"layers": reading.number("layers"), "context": row.whole("seq_len") or 1}
    tokenizer = next((count for name, count in _VOCABS.items() if name in row["notes"]), 0)
    if row["vocab"] == "250k":
        numbers["vocab"] = 250880  # tr11-176B-ml.slurm: --pad-vocab-size-to
    elif not row["vocab"] and tokenizer:
        numbers["vocab"] = tokenizer
        reading.assume(
            f"a vocabulary of {tokenizer:,}: the tokenizer's words, its two own and 100 of --vocab-extra-ids"
        )
    else:
        numbers["vocab"] = reading.number("vocab")
    if not all(numbers.values()):
        return None
    for name in flags:
        if name not in _NEUTRAL and name not in _MODEL:
            reading.lack(f"Megatron's --{name}")
    bigscience = reading.row["model"].startswith("Megatron-DeepSpeed") and "bigscience" in reading.row.source
    large = bigscience and numbers["vocab"] > 200_000
    if bigscience:
        reading.assume("the embedding is normalised, and tr11 adds ALiBi to its scores: the project's scripts")
    if "swiglu" in flags and "ffn-hidden-size" not in flags:
        # megatron/training/arguments.py, validate_args: two products of two thirds of the width, in multiples of 64.
        numbers = numbers | {"ffn": 8 * numbers["hidden"] // 3 // 64 * 64}
    positions = {"rope": "rotary", "none": "rotary"}.get(flags.get("position-embedding-type", ""), "learned")
    return Model(
        name=reading.row["model"],
        family=family,
        tied="untie-embeddings-and-output-weights" not in flags,
        gated="swiglu" in flags,
        norm="rms" if flags.get("normalization") == "RMSNorm" else "layer",
        biases=() if "disable-bias-linear" in flags else ("qkv", "out", "mlp"),
        positions="alibi" if large else positions,
        embedding_norm=bigscience,
        head_dim=int(flags.get("kv-channels", "0")),
        **numbers,
    )


def megatron_run(reading: Reading, tensor: int) -> dict[str, Any]:
    """Dropout, padding of the vocabulary and the form of checkpoints, as fields of the plan."""
    flags = flags_of(reading)
    rates = {float(flags.get(f"{part}-dropout", "0.1")) for part in ("hidden", "attention")}
    if len(rates) > 1:
        reading.lack("dropout of attention that differs from that of the rest")
    if int(flags.get("num-distributed-optimizer-instances", "1")) > 1:
        reading.lack("several instances of Megatron's distributed optimizer")
    reading.assume(f"dropout {min(rates)}: megatron/training/arguments.py, or the row's own flag")
    multiple = int(flags.get("make-vocab-size-divisible-by", "128")) * tensor
    # Megatron's and DeepSpeed's checkpoints are autograd functions of their own that run whole blocks again.
    reentrant = reading.said("activation_checkpointing") == "full"
    layers = "transformer-engine" if "transformer_engine layers" in reading.row["notes"] else "core"
    return {
        "dropout": min(rates),
        "loss": Loss(vocab_multiple=multiple, float32_output=reading.default("loss") == "made float32 by the model"),
        "reentrant": reentrant,
        "implementation": Implementation(megatron="auto" if reading.default("zero") == "deepspeed" else layers),
    }
