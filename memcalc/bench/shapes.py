"""The column ``model`` and the shapes beside it: which family builds that model, to the parameter."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from functools import partial
from typing import Any

from memcalc.bench.megatron import megatron_model
from memcalc.bench.perceptrons import perceptron
from memcalc.bench.pictures import resnet, vit
from memcalc.bench.reading import Reading
from memcalc.models import FAMILIES
from memcalc.models.relatives import ARCHITECTURES
from memcalc.spec import Model

__all__ = ["model_of"]

# In order, the first that fits: names of models, and the architectures they may be; the parameter count decides.
_NAMES = (
    (r"^megatron (moe|mixtral|hybrid|bert)", ()),
    (r"deepseek|scout|maverick|gpt-oss|granite.*moe|moe-7b", ()),
    (r"mixtral", ("mixtral",)),
    (r"qwen-?3.*-a\d", ("qwen3-moe",)),
    (r"^(meta-)?(code)?llama([-_ ]?[23](\.\d)?)?[-_ ]|^llama-|^llama-like", ("llama",)),
    (r"^(tiny-?llama|mistral-7b|vicuna|longchat|baichuan-7b|yi-|llama2\.c)|phi-?3", ("llama", "llama-fused")),
    (r"qwen-?3(?!\.)", ("qwen3",)),
    (r"qwen-?(1\.5|2(\.5)?)(?!.*(moe|vl))", ("qwen2",)),
    (r"^qwen-\d", ("qwen",)),
    (r"internlm", ("internlm", "llama")),
    (r"chatglm-?[23]", ("chatglm2",)),
    (r"gemma-?2(-|$)|gemma-2b|gemma-7b", ("gemma", "gemma2", "gemma2-27b")),
    (r"powerlm|granite-3(?!.*moe)", ("granite",)),
    (r"pythia|neox|stablelm.*alpha|stablecode.*alpha", ("neox",)),
    (r"phi-(1|2)", ("phi",)),
    (r"falcon", ("falcon", "falcon-two-norms")),
    (r"gpt-?j", ("gpt-j",)),
    (r"gpt-?neo", ("gpt-neo",)),
    (r"^opt-", ("opt",)),
    (r"bloom", ("bloom",)),
    (r"^mpt-", ("gpt2", "mpt")),
    (r"santacoder|starcoder|bigcode", ("starcoder",)),
    (r"^gpt-?2\b|^rugpt", ("gpt2",)),
)
# Families that are no decoders of tokens.
_OTHERS = (
    (r"^MLP input:|^\d+ x Linear\(", "mlp"),
    (r"^nn\.Transformer demo", "size"),
    (r"^megatron(-deepspeed)? gpt", "megatron"),
    (r"^megatron t5", "megatron-t5"),
    (r"^bert(?!.*megatron)", "bert"),
    (r"^t5-", "t5"),
    (r"(^|\b)vit_", "vit"),
    (r"^(torchvision )?resnet-?\d+$|^TSN ResNet\d+( optical flow input)?$", "resnet"),
)
# Names of models no family has, by what is missing.
_LACKING = (
    (r"moe|experts|deepseek", "this Mixture of Experts"),
    (r"bert", "relatives of BERT"),
    (r"mt0|t0_|flan|enc \+|blenderbot", "relatives of T5"),
    (r"resnet|\br-?\d\d\d?\b|inception|vgg|mobilenet|densenet|efficientnet|tsn|pspnet|rcnn|fcn|xception|retinanet|deeplab|danet", "convolutional nets"),
    (r"vit|swin|deit|clip|beit|segmenter|upernet", "vision transformers"),
    (r"megatron", "Megatron's GPT layers"),
    (r"gemma", "newer Gemma layers"),
    (r"internvl|llava|llada", "models of more than text, or without causal masks"),
    (r"transformer_lm", "relatives of GPT (fairseq)"),
    (r"u-net|diffusion|mmdit|sdxl|flux|cogvideo|dreambooth|amused", "diffusion models"),
    (r"loss only", "a single operator is no training run"),
)  # fmt: skip
# Numbers that a source leaves out, from the published config.json.
_PUBLISHED = (
    (r"stablelm.*alpha.*3 ?b", {"vocab": 50688}),
    (r"^bert-(base|large)", {"vocab": 30522}),
)
_LAYERS = re.compile(r"(\d{1,4}) enc \+ (\d{1,4}) dec")
_SIDES = re.compile(r"(<=)?(\d{1,6}) src / (<=)?(\d{1,6}) tgt")
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
    other = next((family for pattern, family in _OTHERS if re.search(pattern, name, re.IGNORECASE)), "")
    if other:
        readers: dict[str, Callable[[Reading], Model | None]] = {
            "mlp": perceptron,
            "size": _size,
            "bert": _bert,
            "t5": _t5,
            "vit": vit,
            "resnet": resnet,
            "megatron": partial(megatron_model, family="megatron"),
            "megatron-t5": partial(megatron_model, family="megatron-t5"),
        }
        return readers[other](reading)
    chosen = next((found for pattern, found in _NAMES if re.search(pattern, name, re.IGNORECASE)), ())
    if not chosen:
        missing = (reason for pattern, reason in _LACKING if re.search(pattern, name, re.IGNORECASE))
        reading.lack(f"model family: {next(missing, 'none for ' + repr(name))}")
        return None
    return _decoder(reading, chosen)


def _numbers(reading: Reading, *names: str) -> dict[str, Any]:
    """The numbers of a row; what it leaves out and a published config says is filled in. Empty after a lack."""
    known = next((more for pattern, more in _PUBLISHED if re.search(pattern, reading.row["model"], re.IGNORECASE)), {})
    found: dict[str, Any] = {}
    for name in names:
        if not reading.row[name] and name in known:
            reading.assume(f"{name} {known[name]}: the model's published config")
            found[name] = known[name]
        else:
            found[name] = reading.number(name)
    if found.get("layers", 0) > _MOST_LAYERS:
        reading.lack(f"layers {found['layers']} is no number of layers")
        return {}
    return found if all(found.values()) else {}


def _decoder(reading: Reading, chosen: tuple[str, ...]) -> Model | None:
    """Of the architectures that the name may mean, the one with the stated parameters, its head tied or not."""
    names = ("layers", "hidden", "heads", "kv_heads", "ffn", "vocab")
    per_expert = re.fullmatch(r"(\d{1,6}) \(per expert, (\d{1,4}) experts top-(\d{1,3})\)", reading.row["ffn"])
    numbers = _numbers(reading, *(name for name in names if name != "ffn" or not per_expert))
    if not numbers:
        return None
    if per_expert:
        numbers |= {field: int(per_expert[part]) for part, field in ((1, "ffn"), (2, "experts"), (3, "top_k"))}
    stated = reading.row.whole("n_params")
    candidates = [_built(reading, architecture, numbers) for architecture in chosen]
    candidates += [dataclasses.replace(model, tied=not model.tied) for model in candidates if model.family == "llama"]
    if stated is None:
        return _as_written(reading, candidates[0])
    more = ARCHITECTURES[chosen[0]].get("more_positions", 0)
    for model in candidates:
        found = _with_positions(model, stated, more)
        if _count(found) == stated:
            return _as_written(reading, found)
    counted, found = _count(candidates[0]), candidates[0]
    reading.lack(f"model family: {found.family} ({chosen[0]}) has {counted:,} parameters here, not {stated:,}")
    return found


def _built(reading: Reading, architecture: str, numbers: dict[str, int]) -> Model:
    fields: dict[str, Any] = dict(ARCHITECTURES[architecture])
    share = fields.pop("rotary_share", 0)
    context = (reading.row.whole("seq_len") or 1) + fields.pop("more_positions", 0)
    model = Model(**{"name": reading.row["model"], "context": context, **numbers, **fields})
    return dataclasses.replace(model, rotary_dim=int(model.head_width * share)) if share else model


def _count(model: Model) -> int:
    return sum(weight.numel for weight in FAMILIES[model.family].weights(model))


def _with_positions(model: Model, stated: int, more: int) -> Model:
    """The table of positions may be longer than the samples; what is left over says how long."""
    learned = model.family == "gpt2" or model.positions == "learned"
    rest, over = divmod(stated - _count(model), model.hidden)
    rows = model.context + rest - more
    if not learned or over or rest <= 0 or rows > _MOST_POSITIONS or rows & (rows - 1):
        return model
    return dataclasses.replace(model, context=model.context + rest)


def _as_written(reading: Reading, model: Model) -> Model:
    """With the products and the head that the framework's own code has, which the published config does not say."""
    if model.family not in ("llama", "decoder"):
        return model
    # inductor makes views into tensors of their own
    compiled = reading.said("compile").startswith("yes")
    if not compiled and not model.fused_qkv and reading.default("qkv") == "fused":
        model = dataclasses.replace(model, fused_qkv=True)
    if model.tied and reading.default("head") == "own":
        model = dataclasses.replace(model, tied=False)
    return model


def _bert(reading: Reading) -> Model | None:
    """BERT with a classifier (``seq-cls``, ``classification``), or of masked words."""
    numbers = _numbers(reading, "layers", "hidden", "heads", "ffn", "vocab")
    if not numbers:
        return None
    name, notes = reading.row["model"], reading.row["notes"]
    labels = re.search(r"(\d{1,5}) labels", notes)
    classes = 0
    if re.search(r"seq-cls|classification", name):
        classes = int(labels[1]) if labels else 2
    elif not re.search(r"bert-(base|large)", name):
        reading.lack("model family: relatives of BERT")
        return None
    built = Model(
        name=name, family="bert", kv_heads=numbers["heads"], context=512, types=2, tied=not classes, classes=classes, **numbers,
    )  # fmt: skip
    stated = reading.row.whole("n_params")
    if stated is not None and _count(built) != stated:
        reading.lack(f"model family: bert has {_count(built):,} parameters here, not {stated:,}")
    return built


def _t5(reading: Reading) -> Model | None:
    layers = _LAYERS.match(reading.row["layers"])
    numbers = _numbers(reading, "hidden", "heads", "ffn", "vocab")
    if not layers or not numbers:
        reading.lack("model family: relatives of T5")
        return None
    encoder, decoder = int(layers[1]), int(layers[2])
    tokens = _both_sides(reading)
    stated = reading.row.whole("n_params")
    found = [
        Model(
            name=reading.row["model"], family="t5", layers=encoder, decoder_layers=decoder, kv_heads=numbers["heads"],
            context=tokens, buckets=32, gated=gated, tied=not gated, head_dim=width, **numbers,
        )
        for gated in (False, True) for width in (0, 64, 128)
    ]  # fmt: skip
    built = next((model for model in found if _count(model) == stated), None)
    if built is None:
        reading.lack("model family: relatives of T5")
    return built


def _both_sides(reading: Reading) -> int:
    """Tokens of the encoder, which must be those of the decoder; caps are met by whole runs alone (bench/lengths.py)."""
    text = reading.row["seq_len"]
    sides = _SIDES.fullmatch(text)
    if sides is None:
        return reading.number("seq_len") or 1
    if sides[2] != sides[4] or (sides[1] and reading.row.meter != "boundary"):
        reading.lack(f"seq len is {text!r}, not one number")
    reading.assume(f"length {sides[2]}: {text}")
    return int(sides[2])


def _size(reading: Reading) -> Model | None:
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
    vocab = reading.row.whole("vocab") or 0
    ends = (vocab, hidden) if 2 * vocab * hidden < size // 2 else (0, 0)
    return Model(name=reading.row["model"], family="size", parameters=size, layers=count, vocab=ends[0], hidden=ends[1])
