"""The columns of a model's shape → a Model that does the same products, within a few percent of the stated parameters."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import lru_cache
from typing import Any

from memcalc.bench.pictures import vit
from memcalc.bench.reading import Reading
from memcalc.models import FAMILIES, MODELS
from memcalc.models.relatives import EVERYWHERE
from memcalc.spec import Model

__all__ = ["model_of"]

_GPT: dict[str, Any] = {"family": "decoder", "norm": "layer", "activation": "gelu", "biases": EVERYWHERE}
# In order, the first that fits a name: what its blocks are made of.
_KINDS: tuple[tuple[str, dict[str, Any]], ...] = (
    (r"\bVLA\b|pi0\d|cosmos|SDXL|FLUX|diffusion|whisper|LLaVA", {}),
    (r"deepseek", {}),
    (r"-A\d+B|\bmoe\b|mixtral", {"family": "moe"}),
    (r"bert", {"family": "bert", "types": 2, "tied": True}),
    (r"\b(flan-)?t5|nn\.Transformer", {"family": "t5", "buckets": 32}),
    (r"resnet", {"family": "resnet"}),
    (r"\bvit_", {"family": "vit"}),
    (r"^mpt|gpt-?2|gpt2", {"family": "gpt2", "tied": True}),
    (r"phi-?[12]|gpt|pythia|neox|opt-|bloom|transformer_lm|starcoder|santacoder|codegen", _GPT),
    (r"falcon", _GPT | {"biases": ("norm",), "side_by_side": 1}),
    (r"qwen-?3", {"family": "llama", "qk_norm": True}),
    (r"qwen", {"family": "llama", "biases": ("qkv",)}),
    (r"llama|internlm|granite|yi-|chatglm|mistral|baichuan|vicuna|gemma|phi-?3|olmo", {"family": "llama"}),
)
# Shapes that a row leaves out, from the published config.json of the model that it names.
_PUBLISHED: tuple[tuple[str, dict[str, Any]], ...] = (
    (r"Qwen3-235B-A22B|Qwen3-30B-A3B", {"experts": 128, "top_k": 8, "head_dim": 128}),
    (r"mixtral", {"experts": 8, "top_k": 2}),
)
# bigscience, train/tr11-176B-ml/tr11-176B-ml.slurm: --pad-vocab-size-to 250880.
_VOCABULARIES = {"~250k": 250880, "250k": 250880}
_ROUGH = re.compile(r"\b([0-9]{1,4}(?:\.[0-9]{1,2})?)B\b")
# A model whose parameters are further from those stated is another one.
_FAR = 0.06
_MOST_LAYERS = 10**4  # as in Plan


def model_of(reading: Reading, *, megatron: bool, tokens: int) -> Model | None:
    """The model of a row for samples of so many tokens, as Megatron writes it if asked for; None after a lack was noted."""
    name = reading.row["model"]
    kind = next((fields for pattern, fields in _KINDS if re.search(pattern, name, re.IGNORECASE)), None)
    if not kind:
        what = "has parts whose shape is not stated" if kind is not None else "is of no kind that is known"
        reading.lack(f"model: {name!r} {what}" if name else "model is not stated")
        return None
    if kind["family"] == "resnet":
        return _resnet(reading)
    if kind["family"] == "vit":
        return vit(reading)
    numbers = _numbers(reading, tokens)
    if numbers is None:
        return None
    if megatron and kind["family"] in ("decoder", "gpt2", "llama"):
        gated = kind["family"] == "llama"
        kind = {"family": "megatron", "gated": gated, "norm": "rms" if gated else "layer", "embedding_norm": False}
        kind |= {"positions": "rotary"} if gated else {"biases": ("qkv", "out", "mlp"), "tied": True}
    if kind["family"] == "t5":
        numbers |= _sides(reading, numbers)
    if kind["family"] == "moe":
        numbers |= _experts(reading)
        if not numbers.get("experts"):
            reading.lack("experts are not stated")
            return None
    elif re.search(r"experts", reading.row["model"]):
        reading.lack("model: a mixture of experts of no known kind")
        return None
    return _closest(reading, Model(name=name, **(kind | numbers)))


def _numbers(reading: Reading, tokens: int) -> dict[str, Any] | None:
    """layers, hidden, heads, kv_heads, ffn, vocab and context; heads are assumed where only they are missing."""
    row = reading.row
    found: dict[str, Any] = {name: row.whole(name) for name in ("hidden", "heads", "kv_heads", "ffn", "vocab")}
    found["layers"] = _layers(reading, found["hidden"])
    found["vocab"] = found["vocab"] or _VOCABULARIES.get(row["vocab"], 0)
    for name in ("layers", "hidden", "ffn", "vocab"):
        if not found[name]:
            reading.lack(f"{name} is not stated" if not row[name] else f"{name} is {row[name]!r}, not a number")
    if not all(found[name] for name in ("layers", "hidden", "ffn", "vocab")):
        return None
    if found["layers"] > _MOST_LAYERS:
        reading.lack(f"layers {found['layers']} is no number of layers")
        return None
    if not found["heads"]:
        # Usual widths of a head: 128 (Brown et al. 2020, table 2.1), 150 (bigscience's first 200B), 64 (BERT).
        found["heads"] = next((found["hidden"] // width for width in (128, 150, 64) if not found["hidden"] % width), 1)
        reading.assume(f"{found['heads']} heads: not stated")
    found["kv_heads"] = found["kv_heads"] or found["heads"]
    found["context"] = max(tokens, 1)
    return found


def _layers(reading: Reading, hidden: int | None) -> int | None:
    """As stated; ``32+32`` are one side's of two; else what the size in a GPT's name comes to."""
    text = reading.row["layers"]
    if sides := re.fullmatch(r"([0-9]{1,4})\+\1", text):
        return int(sides[1])
    stated, rough = reading.row.whole("layers"), _ROUGH.search(reading.row["model"])
    if stated or text or not hidden or not rough or "GPT" not in reading.row["model"]:
        return stated
    vocab = reading.row.whole("vocab") or _VOCABULARIES.get(reading.row["vocab"], 0)
    layers = round((float(rough[1]) * 1e9 - vocab * hidden) / (12 * hidden**2))
    reading.assume(f"{layers} layers: what {rough[1]}B parameters of that width come to, 12 hidden^2 a layer")
    return max(layers, 1)


def _sides(reading: Reading, numbers: dict[str, Any]) -> dict[str, Any]:
    """Encoder and decoder are equally deep, and read as much."""
    reading.assume("the decoder has as many layers and tokens as the encoder")
    return {"decoder_layers": numbers["layers"], "kv_heads": numbers["heads"]}


def _experts(reading: Reading) -> dict[str, Any]:
    found = re.search(r"(\d{1,4}) experts top-(\d{1,3})", reading.row["model"])
    if found:
        return {"experts": int(found[1]), "top_k": int(found[2])}
    known = (fields for pattern, fields in _PUBLISHED if re.search(pattern, reading.row["model"], re.IGNORECASE))
    return next(known, {})


def _resnet(reading: Reading) -> Model | None:
    depth = re.search(r"resnet-?(\d{2,3})", reading.row["model"], re.IGNORECASE)
    known = MODELS.get(f"resnet-{depth[1]}") if depth else None
    if known is None:
        reading.lack(f"model: {reading.row['model']!r} is no ResNet that is known")
        return None
    image = reading.row.cells.get("image", "")
    size = int(image) if image.isdecimal() else known.image
    return _closest(reading, replace(known, name=reading.row["model"], image=size, features=known.channels * size**2))


def _closest(reading: Reading, model: Model) -> Model | None:
    """With its head tied or not, whichever comes nearer to the stated parameters; a lack where neither does."""
    stated = reading.row.whole("n_params")
    both = [model]
    if model.family in ("decoder", "llama", "megatron", "t5"):
        both.append(replace(model, tied=not model.tied))
    if model.family == "t5":
        both += [replace(each, gated=True) for each in both]
    if not stated:
        return model
    nearest = min(both, key=lambda each: abs(_count(each) - stated))
    counted = _count(nearest)
    if abs(counted / stated - 1) > _FAR:
        reading.lack(f"model: {model.family} has {counted:,} parameters here, not {stated:,}")
        return None
    if counted != stated:
        reading.assume(f"a model of {counted:,} parameters stands for one of {stated:,}")
    return nearest


@lru_cache(maxsize=64)
def _count(model: Model) -> int:
    return sum(weight.numel for weight in FAMILIES[model.family].weights(model))
