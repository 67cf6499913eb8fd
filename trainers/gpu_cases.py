"""The plans ``trainers.gpu_check`` runs, the most telling first: a check that runs out of time loses the last."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from memcalc.errors import PlanError
from memcalc.models import MODELS, Model
from memcalc.plan import Plan

__all__ = ["WORLD", "cases"]

WORLD = 8
CHECKPOINTING = {"none": 0, "full": 1}

# The shape of a 1.5 billion Llama: grouped queries and a large vocabulary (Llama 3.2 1B with its head untied).
LLAMA = Model(
    name="llama-1.5b", family="llama", layers=16, hidden=2048, heads=32, kv_heads=8, ffn=8192, vocab=128256, context=8192,
)  # fmt: skip

# What differs from the first case in one thing each: how a step is done, not what is trained.
VARIANTS: dict[str, dict[str, Any]] = {
    "fused": {"optimizer_kind": "fused"},
    "for-loop": {"optimizer_kind": "for-loop"},
    "math": {"attention": "math"},
    "eager": {"attention": "eager"},
    "efficient": {"attention": "efficient"},
    "dropout": {"attention": "eager", "dropout": 0.1},
    "every-4": {"checkpoint_every": 4},
    "reentrant": {"checkpoint_every": 1, "reentrant": True},
    "accumulation": {"accumulation": 2},
    "keep-gradients": {"set_to_none": False},
}


def cases(*, device: str, gpu: str | None, torch: str) -> dict[str, Plan]:
    """Plans by name. On the CPU the models are tiny, because there the check only tries itself out."""
    plans: dict[str, Plan] = {}
    for name, fields in _fields(tiny=device == "cpu"):
        try:
            plans[name] = Plan(**fields, device=device, gpu=gpu, torch=torch)
        except PlanError:
            continue  # an attention kernel that this device does not have
    return plans


def _fields(*, tiny: bool) -> Iterator[tuple[str, dict[str, Any]]]:
    small, batch = ("gpt2-tiny", 2) if tiny else ("gpt2", 8)
    for strategy in ("single", "fsdp-full-shard", "fsdp-shard-grad-op"):
        for precision in ("fp32", "bf16", "amp-bf16"):
            for checkpointing in CHECKPOINTING:
                yield _case(MODELS[small], strategy, precision, checkpointing, batch, tiny=tiny)
    for strategy in ("ddp", "zero-1"):
        for precision in ("fp32", "amp-bf16"):
            yield _case(MODELS[small], strategy, precision, "none", batch, tiny=tiny)
    yield _case(MODELS[small], "fsdp-no-shard", "fp32", "none", batch, tiny=tiny)
    for model, size in _larger(tiny=tiny):
        for strategy, precision, checkpointing in (
            ("single", "amp-bf16", "full"),
            ("fsdp-full-shard", "amp-bf16", "none"),
            ("fsdp-full-shard", "bf16", "full"),
            ("fsdp-shard-grad-op", "amp-bf16", "full"),
        ):
            yield _case(model, strategy, precision, checkpointing, size, tiny=tiny)
    for variant, changes in VARIANTS.items():
        name, fields = _case(MODELS[small], "single", "bf16", "none", batch, tiny=tiny)
        yield f"{name}.{variant}", fields | changes
    for strategy in ("ddp", "fsdp-full-shard"):
        name, fields = _case(MODELS[small], strategy, "fp32", "none", batch, tiny=tiny)
        yield f"{name}.accumulation", fields | {"accumulation": 2}


def _larger(*, tiny: bool) -> list[tuple[Model, int]]:
    if tiny:
        return [(MODELS["llama-tiny"], 2), (MODELS["mlp-tiny"], 16)]
    return [(MODELS["gpt2-xl"], 4), (LLAMA, 2), (MODELS["gpt2-large"], 4), (MODELS["gpt2-medium"], 8)]


def _case(
    model: Model, strategy: str, precision: str, checkpointing: str, batch: int, *, tiny: bool
) -> tuple[str, dict[str, Any]]:
    ranks = 1 if strategy == "single" else WORLD
    fields = {
        "model": model,
        "strategy": strategy,
        "ranks": ranks,
        "precision": precision,
        "checkpoint_every": CHECKPOINTING[checkpointing],
        "micro_batch": batch,
        "tokens": min(model.context, 64 if tiny else 1024),
    }
    return f"{model.name}.{strategy}.{ranks}.{precision}.{checkpointing}", fields
