"""Models of images: torchvision's ResNets, alone or as TSN, and timm's Vision Transformers."""

from __future__ import annotations

import dataclasses
import re

from memcalc.bench.reading import Reading
from memcalc.models import FAMILIES, MODELS
from memcalc.spec import Model

__all__ = ["images_of", "resnet", "vit"]

_VIT = re.compile(r"vit_(tiny|small|base|large|huge)_patch(\d{1,2})_(\d{2,4})")
_CLASSES = re.compile(r"(\d{1,5}) classes")
# mmaction2, configs/recognition: labels of the data set whose name a configuration ends with.
_DATASETS = {"kinetics400": 400, "mit": 339, "mmit": 313, "sthv1": 174, "sthv2": 174, "ucf101": 101, "hmdb51": 51}
_VIDEOS = re.compile(r"(\d{1,4}) videos x (\d{1,3}) segments x (\d{1,2}) frames")
_DEPTHS = {"18", "34", "50", "101", "152"}


def vit(reading: Reading) -> Model | None:
    """A Vision Transformer by timm's name: ``vit_huge_patch14_224``."""
    name = reading.row["model"]
    match = _VIT.search(name)
    if match is None:
        reading.lack("model family: vision transformers")
        return None
    layers, hidden, heads, ffn = (reading.number(column) for column in ("layers", "hidden", "heads", "ffn"))
    classes = _CLASSES.search(name)
    patch, image = int(match[2]), int(match[3])
    built = Model(
        name=name, family="vit", layers=layers, hidden=hidden, heads=heads, kv_heads=heads, ffn=ffn, image=image,
        channels=3, patch=patch, features=3 * image**2, classes=int(classes[1]) if classes else 1000,
    )  # fmt: skip
    return _checked(reading, built)


def resnet(reading: Reading) -> Model | None:
    """A ResNet of ImageNet's classes, or TSN's: the same network over single frames."""
    name = reading.row["model"]
    depth = re.sub(r"\D", "", name)
    if depth not in _DEPTHS:
        reading.lack("model family: convolutional nets")
        return None
    row = MODELS[f"resnet-{depth}"]
    classes = row.classes
    if name.startswith("TSN"):
        words = re.search(r"config (\w+)", reading.row["notes"])
        sets = [count for key, count in _DATASETS.items() if words and f"_{key}_" in words[1]]
        classes = sets[0] if sets else 400
        reading.assume(f"{classes} classes; clips are single frames through a plain ResNet")
    channels = row.channels
    if "flow" in name:  # mmaction2, configs/recognition/tsn: in_channels=10, two of each of five frames
        clip = _VIDEOS.search(reading.row["notes"])
        channels = 2 * int(clip[3]) if clip else 10
    features = channels * row.image**2
    built = dataclasses.replace(row, name=name, channels=channels, features=features, classes=classes)
    return _checked(reading, built)


def _checked(reading: Reading, built: Model) -> Model:
    stated = reading.row.whole("n_params")
    counted = sum(weight.numel for weight in FAMILIES[built.family].weights(built))
    # Tables of timm's benchmarks round to ten thousand.
    if stated is not None and counted != stated and round(counted, -4) != stated:
        reading.lack(f"model family: {built.family} has {counted:,} parameters here, not {stated:,}")
    return built


def images_of(reading: Reading) -> int:
    """Images of one micro batch: of a video's clips, each frame is one."""
    batch = reading.number("micro_batch_per_gpu")
    videos = _VIDEOS.search(reading.row["notes"])
    return batch * int(videos[2]) if videos and int(videos[1]) == batch else batch
