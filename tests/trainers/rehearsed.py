"""Small models of every family that has a torch twin, for rehearsals."""

from __future__ import annotations

import dataclasses
from typing import Any

from memcalc.models import MODELS, Model
from memcalc.plan import Plan

__all__ = ["SMALL", "planned"]

_TEXT = {"hidden": 128, "heads": 4, "kv_heads": 4, "ffn": 512, "vocab": 1000, "context": 64}
SMALL = {
    "mlp": MODELS["mlp-tiny"],
    "gpt2": dataclasses.replace(MODELS["gpt2-tiny"], layers=3),
    "llama": Model(name="small-llama", family="llama", layers=3, **{**_TEXT, "kv_heads": 2}),
    "bert": Model(name="small-bert", family="bert", layers=3, types=2, tied=True, **_TEXT),
    "moe": Model(name="small-moe", family="moe", layers=2, experts=4, top_k=2, shared_ffn=96, **_TEXT),
    "t5": Model(name="small-t5", family="t5", layers=2, decoder_layers=2, buckets=32, tied=True, **_TEXT),
    "vit": Model(
        name="small-vit", family="vit", layers=3, hidden=128, heads=4, kv_heads=4, ffn=512, image=64, channels=3,
        patch=8, features=3 * 64 * 64, classes=10,
    ),
    "resnet": Model(
        name="small-resnet", family="resnet", stages=(1, 2), bottleneck=True, hidden=32, image=64, channels=3,
        features=3 * 64 * 64, classes=10,
    ),
}  # fmt: skip


def planned(family: str, **fields: Any) -> Plan:
    """A plan of eight samples of a small model."""
    model = SMALL[family]
    tokens = min(model.context, 64)
    return Plan(**{"model": model, "tokens": tokens, "micro_batch": 8, "device": "cpu", **fields})
