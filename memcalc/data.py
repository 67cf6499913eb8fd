"""What a run trains on, as fixed samples that every rank sees in the same order.

none given      the text of the Python installation's own source files
text            a file or a folder of them; bytes are tokens, or a ``tokenizers`` JSON makes them
NAME.bin        token ids as uint16, as nanoGPT's prepare scripts write them
images          for the mlp: a folder of class folders (.npy or pictures), or with images.npy and labels.npy
"""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from math import prod
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from memcalc.errors import FileError, InputError, shorten
from memcalc.files import read_json
from memcalc.images import find_images, holds_images
from memcalc.plan import Plan
from memcalc.units import things

__all__ = ["EVALUATED", "Samples", "check", "load", "split"]

_DEFAULT_BYTES = 4 * 2**20
_IGNORED = -100  # ignore_index of torch.nn.functional.cross_entropy
EVALUATED = 128  # samples at most; enough for a stable mean, few enough to be quick
_LOOKED_AT = 64 * 2**20
"""Bytes of text that become tokens, and of pictures that are decoded, before a run starts: a few seconds' work."""

Pair = tuple[NDArray[np.generic], NDArray[np.int64]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Samples:
    """``count`` samples; ``take(indices)`` gives their inputs and targets as arrays with a batch dimension."""

    count: int
    take: Callable[[NDArray[np.int64]], Pair]
    source: str


def check(plan: Plan, data: Path | None, tokenizer: Path | None) -> None:
    """Refuse before any process starts what the ranks could not train on. Raises FileError and InputError, in one line.

    A text is made tokens, and pictures are decoded, up to 64 MiB of them; what is damaged after that the ranks find out.
    """
    if plan.model.module.sample:
        for name, path in (("data", data), ("tokenizer", tokenizer)):
            if path is not None:
                raise InputError(
                    f"--{name} {path} is not read: batches come from {plan.model.module.sample}; leave it out"
                )
        return
    try:
        split(load(plan, data, tokenizer, looked_at=_LOOKED_AT), plan)
    except InputError:
        split(load(plan, data, tokenizer), plan)  # of a longer text the rest may be what lacks


def load(plan: Plan, data: Path | None, tokenizer: Path | None = None, *, looked_at: int = 0) -> Samples:
    """The samples of a plan from the files a user points at. Raises FileError and InputError, in one line.

    With ``looked_at`` what takes long is done for so many bytes only: samples of the beginning of a text that a tokenizer
    reads, and so many bytes of pictures decoded at once. Without it all pictures are decoded when the first is taken.
    """
    if data is not None and not data.exists():
        raise FileError(f"data {data} does not exist")
    if data is not None and data.is_dir() and not os.access(data, os.R_OK | os.X_OK):
        raise FileError(f"data {data} cannot be read: no permission")
    if plan.family.reads != "tokens" and not plan.model.features:
        raise InputError(
            f"what {plan.model.name} reads is not known: make its plan with --input-shape, --seq-len or --sample"
        )
    if plan.family.reads != "tokens" and data is not None and holds_images(data):
        if tokenizer is not None:
            raise InputError(f"{data} holds images, which no tokenizer reads; leave --tokenizer out")
        return _images(plan, data, looked_at)
    source = str(data) if data is not None else "the source files of this Python installation"
    tokens = _tokens(data, tokenizer, source, looked_at)
    return _windows(plan, tokens, source) if plan.family.reads == "tokens" else _bytes_as_features(plan, tokens, source)


def split(samples: Samples, plan: Plan) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Training and evaluation samples, by index: the last tenth, at most 128, is never trained on.

    Raises InputError where what is trained on does not fill one step, with how the number comes about.
    """
    held_out, per_step = min(max(samples.count // 10, 1), EVALUATED), plan.global_batch
    training = samples.count - held_out
    if training < per_step:
        what = f"micro batch {plan.micro_batch} x accumulation {plan.accumulation} x ranks {plan.data_parallel}"
        raise InputError(
            f"{samples.source} gives {things(max(training, 0), 'sample')} to train on; one step needs {per_step} ({what}): "
            "more data, fewer ranks or a smaller batch would do"
        )
    indices = np.arange(samples.count, dtype=np.int64)
    return indices[:training], indices[training:]


# -- tokens ----------------------------------------------------------------------------------------


def _tokens(data: Path | None, tokenizer: Path | None, source: str, looked_at: int) -> NDArray[np.generic]:
    if data is not None and data.suffix == ".bin":
        if tokenizer is not None:
            raise InputError(f"{data} holds token ids already; leave --tokenizer out")
        return _read_bin(data)
    text = _python_text() if data is None else _text(data)
    if tokenizer is None:
        return np.frombuffer(text, dtype=np.uint8)
    return _encode(text[: looked_at or None], tokenizer, source)


def _read_bin(path: Path) -> NDArray[np.generic]:
    try:
        size = path.stat().st_size
        if not size or size % 2:
            raise FileError(f"{path} has {size} bytes; a .bin of uint16 token ids has an even number above 0")
        return np.memmap(path, dtype=np.uint16, mode="r")
    except OSError as error:
        raise FileError(f"{path} cannot be read: {(error.strerror or str(error)).lower()}") from None


def _python_text() -> bytes:
    """The standard library's top-level modules in alphabetical order, up to 4 MiB."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    text = _join(sorted(folder.glob("*.py")), _DEFAULT_BYTES)
    if not text:
        raise FileError(f"this Python installation has no source files in {folder}; give a text with --data")
    return text


def _text(data: Path) -> bytes:
    """One file, or all text files below a folder in alphabetical order."""
    if data.is_file():
        text = _join([data])
        if not text:
            raise FileError(f"{data} is empty")
        if b"\0" in text:
            raise FileError(f"{data} is not text; give text, a .bin of uint16 token ids or a folder")
        return text
    if not data.is_dir():
        raise FileError(f"{data} is neither a file nor a folder")
    hidden = [path for path in data.rglob("*") if any(part.startswith(".") for part in path.relative_to(data).parts)]
    text = _join(sorted({path for path in data.rglob("*") if path.is_file()} - set(hidden)), binary=False)
    if not text:
        raise FileError(f"{data} holds no text files; give text, or for a model of images one folder per class")
    return text


def _join(paths: list[Path], limit: int | None = None, *, binary: bool = True) -> bytes:
    """What is in the files, one after the other; what is no text is left out unless ``binary``."""
    parts, size = [], 0
    for path in paths:
        try:
            content = path.read_bytes()
        except OSError as error:
            raise FileError(f"{path} cannot be read: {(error.strerror or str(error)).lower()}") from None
        if b"\0" in content and not binary:
            continue
        parts.append(content)
        size += len(content)
        if limit is not None and size >= limit:
            break
    return b"".join(parts)[:limit]


def _encode(text: bytes, path: Path, source: str) -> NDArray[np.generic]:
    said = read_json(path, f"tokenizer {path}")
    if not isinstance(said, dict) or "model" not in said:
        raise FileError(
            f"tokenizer {path} is none of the library tokenizers, whose JSON says a model; give its tokenizer.json"
        )
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise InputError("--tokenizer needs the package tokenizers: pip install tokenizers") from None
    try:
        ids = Tokenizer.from_file(str(path)).encode(text.decode("utf-8", errors="replace")).ids
    except Exception as error:  # the library raises bare Exception
        raise FileError(
            f"tokenizer {path} cannot be used by the library tokenizers: {shorten(str(error), 100)}"
        ) from None
    if not ids:
        raise FileError(f"tokenizer {path} makes no tokens of {source}")
    return np.array(ids, dtype=np.int64)


def _windows(plan: Plan, tokens: NDArray[np.generic], source: str) -> Samples:
    length, vocab = plan.tokens, plan.model.vocab
    largest = int(tokens.max())
    if largest >= vocab:
        raise InputError(
            f"{source} holds token {largest}, but {plan.model.name} has a vocabulary of {vocab} (0 to {vocab - 1})"
        )
    span = length * plan.family.sequences
    count = (len(tokens) - 1) // span
    if count < 2:
        raise InputError(
            f"{source} has {len(tokens):,} tokens; at least {2 * span + 1:,} are needed for samples of {span}"
        )
    offsets = np.arange(span)

    def take(indices: NDArray[np.int64]) -> Pair:
        places = indices[:, None] * span + offsets
        if plan.family.objective == "continue":  # the encoder reads one half, the decoder goes on with the other
            return tokens[places].astype(np.int64), tokens[places[:, length:] + 1].astype(np.int64)
        if plan.family.objective == "masked":
            return _masked(tokens[places].astype(np.int64), indices, vocab - 1)
        return tokens[places].astype(np.int64), tokens[places + 1].astype(np.int64)

    return Samples(count=count, take=take, source=source)


def _masked(tokens: NDArray[np.int64], indices: NDArray[np.int64], mask: int) -> Pair:
    """Hide 15 % of each sample (Devlin et al. 2019, section 3.1) behind the vocabulary's last token.

    Always the same tokens of a sample and equally many of each, so that a mean over samples does not depend on how
    they are spread over ranks.
    """
    inputs, targets = tokens.copy(), np.full_like(tokens, _IGNORED)
    hidden = max(round(0.15 * tokens.shape[1]), 1)
    for row, index in enumerate(indices):
        places = np.random.default_rng(int(index)).choice(tokens.shape[1], hidden, replace=False)
        targets[row, places] = tokens[row, places]
        inputs[row, places] = mask
    return inputs, targets


# -- features --------------------------------------------------------------------------------------


def _bytes_as_features(plan: Plan, tokens: NDArray[np.generic], source: str) -> Samples:
    """Text for a model that reads features: some tokens as numbers, and the class of the token that follows."""
    length, classes = plan.model.features, max(plan.model.classes, 1)
    scale = np.float32(max(int(tokens.max()), 1))
    count = (len(tokens) - 1) // length
    if count < 2:
        raise InputError(
            f"{source} has {len(tokens):,} tokens; at least {2 * length + 1:,} are needed for samples of {length}"
        )
    offsets = np.arange(length)

    def take(indices: NDArray[np.int64]) -> Pair:
        inputs = tokens[indices[:, None] * length + offsets].astype(np.float32) / scale
        return inputs, tokens[(indices + 1) * length].astype(np.int64) % classes

    return Samples(count=count, take=take, source=source)


def _images(plan: Plan, data: Path, looked_at: int) -> Samples:
    """Images flattened to features, values of whole numbers scaled from 0..255 to 0..1."""
    images = find_images(data, looked_at)
    labels, shape = images.labels, images.shape
    features, classes = plan.model.features, plan.model.classes
    if images.count != len(labels) or labels.ndim != 1:
        raise InputError(
            f"{data} has {images.count} images and labels of shape {list(labels.shape)}; one label each is needed"
        )
    if images.count < 2:
        raise InputError(f"{data} has {images.count} images; at least 2 are needed")
    colours, own = plan.model.channels if plan.family.reads == "images" else 0, plan.model.module.shape
    # Files keep colours last, convolutions want them first.
    last = len(shape) == 3 and (shape[-1] == colours or (len(own) == 3 and shape == (*own[1:], own[0])))
    if prod(shape) != features:
        raise InputError(
            f"{data} has images of {'x'.join(map(str, shape))} = {prod(shape)} values, but {plan.model.name} reads "
            f"{features} features"
        )
    if not np.issubdtype(labels.dtype, np.integer) or labels.min() < 0 or 0 < classes <= labels.max():
        raise InputError(f"{data} has labels outside 0 to {classes - 1}, the classes of {plan.model.name}")
    # Class folders come one after the other; a fixed shuffle puts every class on both sides of the split.
    order = np.random.default_rng(0).permutation(images.count)

    @cache
    def flat() -> NDArray[np.generic]:
        read = images.read()
        return (np.moveaxis(read, -1, 1) if last else read).reshape(images.count, -1)

    def take(indices: NDArray[np.int64]) -> Pair:
        chosen, values = order[indices], flat()
        scale = np.float32(255 if np.issubdtype(values.dtype, np.integer) else 1)
        return values[chosen].astype(np.float32) / scale, labels[chosen].astype(np.int64)

    return Samples(count=images.count, take=take, source=str(data))
