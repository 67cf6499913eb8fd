"""The column ``model`` and the shapes beside it: which family builds that model, to the parameter."""

from __future__ import annotations

import dataclasses
import re
from math import isqrt
from typing import Any

from memcalc.bench.megatron import megatron_model
from memcalc.bench.reading import Reading
from memcalc.models import FAMILIES
from memcalc.spec import Model

__all__ = ["model_of"]

# In order, the first that fits: names of models whose architecture a family has.
_FAMILY_OF = (
    (r"^MLP input:", "mlp"),
    (r"^nn\.Transformer demo", "size"),
    (r"moe|mixtral|scout|maverick|megatron (bert|t5|hybrid)", ""),
    (r"^megatron(-deepspeed)? gpt", "megatron"),
    (r"^(meta-)?(code)?llama([-_ ]?[23](\.\d)?)?[-_ ]|^llama-", "llama"),
    (r"^(tiny-?llama|mistral-7b|vicuna|longchat)", "llama"),
    (r"^gpt-?2\b|^mpt-", "gpt2"),
)
# Names of models no family has, by what is missing.
_LACKING = (
    (r"mixtral|moe|experts", "Mixture of Experts"),
    (r"bert", "BERT-type encoders"),
    (r"\bt5\b|mt0|flan|enc \+", "T5-type encoder-decoders"),
    (r"resnet|\br-?\d\d\d?\b|inception|vgg|mobilenet|densenet|efficientnet|tsn|pspnet|rcnn|fcn|xception|retinanet|deeplab|danet", "convolutional nets"),
    (r"vit|swin|deit|clip|beit|segmenter|upernet", "vision transformers"),
    (r"megatron", "Megatron's GPT layers"),
    (r"gemma", "Gemma's layers (soft caps, its own norm)"),
    (r"phi-|falcon", "attention and MLP in parallel"),
    (r"stablelm|stablecode|pythia|neox", "GPT-NeoX layers"),
    (r"santacoder|starcoder|bigcode", "multi-query attention with biases"),
    (r"powerlm|granite", "Granite's layers (scaled residuals, tied head)"),
    (r"qwen|chatglm|baichuan|internlm|internvl|yi-|llada", "relatives of Llama (biases, norms of q and k, tied heads)"),
    (r"opt-|bloom|gpt-?j|gpt-neo|transformer_lm|rugpt", "relatives of GPT (OPT, BLOOM, GPT-Neo, fairseq)"),
    (r"deepseek", "Mixture of Experts"),
    (r"u-net|diffusion|mmdit|sdxl|flux|cogvideo|dreambooth|amused", "diffusion models"),
    (r"loss only", "a single operator is no training run"),
)  # fmt: skip
_MLP = re.compile(
    r"MLP input:(\d{1,9})_output:(\d{1,9})_depth:([1-9]\d{0,3})_arch:(\w+?)_batch:\d+_act:(\w+)_dropout:[\d.]+_dropout:(\w+)_batchnorm:(\w+)"
)
_LAYERS = re.compile(r"(\d{1,4}) enc \+ (\d{1,4}) dec")
# Korthikanti et al. 2022, equation 2: bytes a layer keeps per token and unit of width, without attention scores.
_KEPT = 34
_SMALL = 0.02
_MOST_POSITIONS = 2**20
_MOST_LAYERS = 10**4  # as in Plan; counting the weights of more would take minutes
# 16 B per parameter: weights, gradients and two moments in float32 (Rajbhandari et al. 2020, ZeRO, section 3.1).
_STATES = 16


def model_of(reading: Reading) -> Model | None:
    """The model of a row, or None after the lack was noted."""
    name = reading.row["model"]
    family = next((family for pattern, family in _FAMILY_OF if re.search(pattern, name, re.IGNORECASE)), "")
    if not family:
        missing = (reason for pattern, reason in _LACKING if re.search(pattern, name, re.IGNORECASE))
        reading.lack(f"model family: {next(missing, 'none for ' + repr(name))}")
        return None
    return {"mlp": _mlp, "size": _size}.get(family, _tokens)(reading, family)


def _tokens(reading: Reading, family: str) -> Model | None:
    names = ["layers", "hidden", "heads", "kv_heads", "ffn", "vocab"]
    if family == "megatron" and reading.row["vocab"] == "250k":
        names.remove("vocab")
    numbers: dict[str, Any] = {name: reading.number(name) for name in names}
    if "vocab" not in names:
        numbers["vocab"] = 250880  # tr11-176B-ml.slurm: --pad-vocab-size-to
    tokens = reading.row.whole("seq_len") or 1
    if not all(numbers.values()):
        return None
    if numbers["layers"] > _MOST_LAYERS:
        reading.lack(f"layers {numbers['layers']} is no number of layers")
        return None
    if family == "megatron":
        return megatron_model(reading, numbers)
    built = Model(name=reading.row["model"], family=family, context=tokens, tied=family == "gpt2", **numbers)
    stated = reading.row.whole("n_params")
    if stated is None:
        return built
    counted = sum(weight.numel for weight in FAMILIES[family].weights(built))
    if family == "gpt2":
        # The table of positions may be longer than the samples; what is left over says how long.
        rows = tokens + (stated - counted) // built.hidden
        if tokens < rows <= _MOST_POSITIONS and not rows & (rows - 1):
            built = dataclasses.replace(built, context=rows)
            counted += (rows - tokens) * built.hidden
    if counted - stated == built.vocab * built.hidden and family == "llama":
        reading.lack("model family: Llama with its head tied to the embedding")
    elif counted != stated:
        reading.lack(f"model family: {family} has {counted:,} parameters here, not {stated:,}")
    return built


def _size(reading: Reading, family: str) -> Model | None:
    """Known by its size alone, where states are all that counts."""
    layers, size, hidden = (
        _LAYERS.fullmatch(reading.row["layers"]),
        reading.number("n_params"),
        reading.number("hidden"),
    )
    tokens = (reading.row.whole("seq_len") or 0) * (reading.row.whole("micro_batch_per_gpu") or 0)
    if not (layers and size and hidden and tokens):
        reading.lack("model family: none, and its shapes are not stated")
        return None
    count = int(layers[1]) + int(layers[2])
    kept = _KEPT * tokens * hidden * count
    if kept > _SMALL * _STATES * size / (reading.row.whole("n_gpus") or 1):
        reading.lack("model family: none, and its activations are not negligible")
        return None
    reading.assume(f"activations left out: about {kept / 2**20:.0f} MiB (34 B per token, width and layer)")
    return Model(name=reading.row["model"], family=family, parameters=size, layers=count)


def _mlp(reading: Reading, family: str) -> Model | None:
    """The name holds the shape, all but the width, which the parameter count fixes."""
    match = _MLP.fullmatch(reading.row["model"])
    size = reading.number("n_params")
    if match is None or not size:
        reading.lack(f"model {reading.row['model']!r} cannot be read")
        return None
    features, classes, depth = (int(match[i]) for i in (1, 2, 3))
    arch, act, dropout, batchnorm = match[4], match[5], match[6], match[7]
    if arch != "uniform":
        reading.lack(f"model family: an MLP of {arch} widths")
        return None
    if batchnorm == "True":
        reading.lack("model family: an MLP with batch normalisation")
    if dropout == "True":
        reading.lack("model family: an MLP with dropout")
    if act == "tanh":
        reading.assume("tanh is counted as ReLU: both keep their output (tools/autograd/derivatives.yaml)")
    elif act != "relu":
        reading.lack(f"model family: an MLP with {act}")
    if batchnorm == "True":
        return None  # whose own parameters hide the width
    width = _width(size, features, classes, depth)
    if width is None:
        reading.lack("model family: no width of the MLP gives the stated parameters")
        return None
    reading.assume(f"width {width}, the only one that gives {size:,} parameters")
    return Model(name="mlp", family="mlp", layers=depth, hidden=width, features=features, classes=classes)


def _width(size: int, features: int, classes: int, depth: int) -> int | None:
    """The width w with (depth - 1) w^2 + (features + classes + depth) w + classes = size.

    >>> _width(5329098, 1565, 273, 2)
    1565
    """
    square, linear, rest = depth - 1, features + classes + depth, max(size - classes, 0)
    width = (isqrt(linear * linear + 4 * square * rest) - linear) // (2 * square) if square else rest // linear
    found = [w for w in (width, width + 1) if square * w * w + linear * w == rest and w > 0]
    return found[0] if found else None
