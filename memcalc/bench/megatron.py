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
from memcalc.spec import Model

__all__ = ["flags_of", "megatron_model", "megatron_run"]

_FLAGS = re.compile(r"flags: ([^;]*)")
# Flags that change nothing that is counted, or that other columns say as well.
_NEUTRAL = {
    "attention-backend", "attention-softmax-in-fp32", "overlap-grad-reduce", "overlap-param-gather",
    "no-gradient-accumulation-fusion", "calculate-per-token-loss", "ffn-hidden-size", "num-distributed-optimizer-instances",
    "no-create-attention-mask-in-dataloader", "recompute-granularity", "recompute-method", "recompute-num-layers",
    "num-query-groups",
}  # fmt: skip
_MODEL = {
    "swiglu", "untie-embeddings-and-output-weights", "disable-bias-linear", "position-embedding-type", "kv-channels",
    "normalization", "make-vocab-size-divisible-by", "hidden-dropout", "attention-dropout",
}  # fmt: skip
# The vocabulary of a tokenizer where the column is blank.
_VOCABS = {"BertWordPieceCase": 28996, "BertWordPieceLowerCase": 30522}


def flags_of(reading: Reading) -> dict[str, str]:
    """Command-line flags the notes name, without their dashes.

    >>> from memcalc.bench.rows import Row
    >>> cells = {"notes": "tier A; flags: swiglu, kv-channels=64; local layers"}
    >>> flags_of(Reading(Row(id="a", source="b", metric="OOM", measured=None, cells=cells)))
    {'swiglu': '', 'kv-channels': '64'}
    """
    found = _FLAGS.search(reading.row["notes"])
    parts = found[1].split(", ") if found else []
    return {name: value for name, _, value in (part.strip().partition("=") for part in parts)}


def megatron_model(reading: Reading, numbers: dict[str, Any]) -> Model:
    """The model of a row whose shapes are known."""
    flags = flags_of(reading)
    for name in flags:
        if name not in _NEUTRAL and name not in _MODEL:
            reading.lack(f"Megatron's --{name}")
    bigscience = reading.row["model"].startswith("Megatron-DeepSpeed") and "bigscience" in reading.row.source
    large = bigscience and numbers["vocab"] > 200_000
    if bigscience:
        reading.assume("the embedding is normalised, and tr11 adds ALiBi to its scores: the project's scripts")
    positions = {"rope": "rotary", "none": "rotary"}.get(flags.get("position-embedding-type", ""), "learned")
    return Model(
        name=reading.row["model"],
        family="megatron",
        context=reading.row.whole("seq_len") or 1,
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
    reading.assume(f"dropout {min(rates)}: megatron/training/arguments.py, or the row's own flag")
    multiple = int(flags.get("make-vocab-size-divisible-by", "128")) * tensor
    # Megatron's and DeepSpeed's checkpoints are autograd functions of their own that run whole blocks again.
    reentrant = reading.said("activation_checkpointing") == "full"
    layers = "transformer-engine" if "transformer_engine layers" in reading.row["notes"] else "core"
    return {
        "dropout": min(rates),
        "loss": Loss(vocab_multiple=multiple),
        "reentrant": reentrant,
        "implementation": Implementation(megatron="auto" if reading.default("zero") == "deepspeed" else layers),
    }
