"""The columns on how a row was trained: precision, checkpointing, optimizer, offload, adapters, loss."""

from __future__ import annotations

import re
from typing import Any

from memcalc.adapters import Adapter
from memcalc.bench.reading import Reading
from memcalc.checkpointing import Checkpointing
from memcalc.compute import Compute
from memcalc.loss import Loss
from memcalc.offload import Offload
from memcalc.spec import Model
from memcalc.strategies import Strategy
from memcalc.update import Update

__all__ = ["adapter_of", "checkpointing_of", "compute_of", "offload_of", "optimizer_of", "precision_of"]

# Words of the column ``precision`` → (16-bit type, how: pure, mixed, or as the engine does), float8 of products.
_PRECISIONS = (
    (r"fp32", "fp32", "", "none"),
    (r"bf16 pure", "bf16", "pure", "none"),
    (r"((amp|mixed)[_ ])?bf16.*", "bf16", "", "none"),
    (r"((amp|mixed)[_ ])?fp16.*", "fp16", "", "none"),
    (r"amp_fp8|FP8(-CS)?|float8 linears", "bf16", "", "tensorwise"),
    (r"MXFP8|FP8-MX", "bf16", "", "mxfp8"),
)
# Words of the column ``activation_checkpointing`` → blocks a checkpoint spans, and what is computed again.
_CHECKPOINTS = (
    (r"none", 0, Checkpointing(), ""),
    (r"full", 1, Checkpointing(), ""),
    (r"selective\(op\)", 1, Checkpointing(policy="matrix-products"), ""),
    (r"selective\(moe_act,layernorm\)", 0, Checkpointing(), "recomputed activation functions and norms take no time"),
    (r"selective\(moe\)", 1, Checkpointing(), "whole blocks are recomputed, most of which are experts"),
)
# What ``selective`` alone means.
_SELECTIVE = (
    # fms_fsdp/policies/ac_handler.py: every second block, as its README's best runs of 13B
    ("foundation-model-stack/fms-fsdp", Checkpointing(one_in=2), "every second block is checkpointed"),
    # megatron/core/transformer/attention.py: core attention
    ("", Checkpointing(policy="core-attention"), "attention alone is computed again"),
)
_OPTIMIZERS = (
    (r"decoupled_adamw.*", "adamw", "for-loop"),
    (r"adam(w)? \(fused\)|adam \(distributed optimizer\)|fusedadam.*", "adamw", "fused"),
    (r"cpu_adam", "adamw", "fused"),
    (r"adamw? ?8bit.*|adamw8bit.*", "adamw-8bit-ao", "fused"),
    (r"adam(w)?( \(in backward\))?|", "adamw", ""),
    (r"adamw? \(apex.*\)", "adamw", "fused"),
    # Two states, like Adam: RMSprop with momentum, and LAMB, which takes norms besides.
    (r"rmsprop", "adam", ""),
    (r"lamb|fusedlamb|lamb \(fused\)|lamb \(apex.*\)", "adamw", "fused"),
    (r"sgd", "sgd", ""),
    (r"sgd.*momentum.*", "sgd-momentum", ""),
    (r"adafactor", "adafactor", ""),
    (r"lion", "lion", ""),
)
_OFFLOADS = (
    (r"none|activations->cpu|", ("none", "none")),
    (r"cpu \(param\)", ("none", "cpu")),
    (r"cpu \(optimizer\)", ("cpu", "none")),
    (r"cpu( \((param\+optimizer|optimizer\+param)(, fused)?\))?", ("cpu", "cpu")),
)


def precision_of(reading: Reading, row: Strategy, *, pure: bool) -> tuple[str, str]:
    """(precision, float8 of products): DeepSpeed and Megatron keep masters, torch casts unless weights are of 16 bit."""
    said = reading.row["precision"]
    found = next((rest for pattern, *rest in _PRECISIONS if re.fullmatch(pattern, said, re.IGNORECASE)), None)
    if found is None:
        if said:
            reading.lack(f"precision {said}")
        else:
            reading.assume("fp32: the precision is not stated, and torch computes in it")
        return "fp32", "none"
    base, how, float8 = found
    if base == "fp32":
        return "fp32", "none"
    if row.masters:
        return f"{base}-master", float8
    if how == "pure" or pure:
        return base, float8
    return f"amp-{base}", float8


def checkpointing_of(reading: Reading) -> tuple[int, Checkpointing]:
    """(blocks a checkpoint spans, what is computed again)."""
    said = reading.said("activation_checkpointing")
    if said == "selective":
        policy, sentence = next(
            (policy, sentence) for start, policy, sentence in _SELECTIVE if reading.row.source.startswith(start)
        )
        reading.assume(f"selective checkpointing: {sentence}")
        return 1, policy
    for pattern, every, policy, sentence in _CHECKPOINTS:
        if re.fullmatch(pattern, said):
            if sentence:
                reading.assume(sentence)
            return every, policy
    reading.lack(f"checkpointing {said}")
    return 0, Checkpointing()


def optimizer_of(reading: Reading) -> tuple[str, str, Update]:
    """(optimizer, how it walks the weights, what happens around it)."""
    said = reading.row["optimizer"].lower()
    if not said:
        reading.assume("AdamW: the optimizer is not stated")
    found = next(((name, kind) for pattern, name, kind in _OPTIMIZERS if re.fullmatch(pattern, said)), None)
    if found is None:
        reading.lack(f"optimizer {said}")
        return "adamw", "foreach", Update()
    return found[0], found[1] or reading.default("optimizer_kind"), Update(in_backward="in backward" in said)


def offload_of(reading: Reading, row: Strategy) -> Offload:
    """Where states and weights live; what a strategy cannot offload stays (ZeRO-2's weights)."""
    said = reading.row["offload"].lower()
    places = next((places for pattern, places in _OFFLOADS if re.fullmatch(pattern, said)), None)
    if places is None:
        reading.lack(f"offload {said}")
        return Offload()
    optimizer, parameters = places
    if parameters == "cpu" and row.zero_stage in (0, 1, 2):
        reading.assume(f"{row.name} keeps its weights on the GPU: only stage 3 offloads them")
        parameters = "none"
    return Offload(optimizer=optimizer, parameters=parameters)


def compute_of(reading: Reading, float8: str) -> Compute:
    """Compiled, with activations in host memory, or with products in 8 bit."""
    compiled = reading.said("compile").startswith("yes")
    away = reading.row["offload"] == "activations->cpu"
    return Compute(compile=compiled, offload_activations=away, float8=float8)


def adapter_of(reading: Reading) -> Adapter:
    """LoRA where the model's name says so; its rank too, else PEFT's default of 8."""
    name = reading.row["model"]
    if not re.search(r"\bQ?LoRA\b", name):
        return Adapter()
    rank = re.search(r"\br(\d{1,4})\b", name)
    if rank is None:
        reading.assume("LoRA of rank 8 in all linear layers: peft/tuners/lora/config.py, else not stated")
    quantize = "nf4" if "QLoRA" in name else "none"
    return Adapter(kind="lora", rank=int(rank[1]) if rank else 8, targets="all-linear", quantize=quantize)


def loss_of(reading: Reading, model: Model, tensor: int) -> dict[str, Any]:
    """The form of the loss and the padding of the vocabulary, as far as rows differ in them."""
    notes = reading.row["notes"]
    if model.family == "megatron":
        # megatron/training/arguments.py: --make-vocab-size-divisible-by 128, times the ranks of tensor parallel
        return {"loss": Loss(vocab_multiple=128 * tensor)}
    if "chunked cross entropy" in notes:
        # torchtune/modules/loss/ce_chunked_output_loss.py: num_output_chunks 8
        return {"loss": Loss(chunks=8)}
    return {}
