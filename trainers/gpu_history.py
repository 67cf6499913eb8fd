"""The allocator's own history of whole runs on a real GPU, held against the replay of its requests and frees."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from memcalc.allocator_history import load_history, replay_history
from memcalc.estimate import estimate
from memcalc.files import write_text
from memcalc.plan import Plan

__all__ = ["MOST_ENTRIES", "record", "set_allocator"]

MOST_ENTRIES = 1_000_000
_KEPT = ("action", "addr", "size", "stream")


def set_allocator(options: str) -> None:
    """Give the allocator other options while the program runs; what is held already stays as it is."""
    torch.cuda.memory._set_allocator_settings(options or "expandable_segments:False")


def record(plan: Plan, run: Callable[[], object], path: Path) -> dict[str, Any]:
    """Run with the history on, write it to ``path``, and say what torch and the replay of it reserved, in bytes.

    Nothing may be on the GPU before; the file holds no stacks, and reads like any other snapshot.
    """
    set_allocator(plan.allocator)
    torch.cuda.reset_peak_memory_stats()
    torch.cuda.memory._record_memory_history(enabled="all", context=None, max_entries=MOST_ENTRIES)
    try:
        run()
        snapshot = torch.cuda.memory._snapshot()
        counted = {
            "allocated": torch.cuda.max_memory_allocated(),
            "active": torch.cuda.memory_stats()["active_bytes.all.peak"],
            "reserved": torch.cuda.max_memory_reserved(),
        }
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)
        set_allocator("")
    write_text(path, json.dumps(_lean(snapshot, plan.allocator)) + "\n")
    history = load_history(path)
    replayed = replay_history(history)
    found = {
        "allocated": replayed.peak_allocated,
        "active": replayed.peak_active,
        "reserved": replayed.peak_reserved,
    }
    return {
        "status": "ok" if counted == found else "off",
        "entries": len(history.entries),
        "differs_at": replayed.differs_at,
        "counted": counted,
        "replayed": found,
        "estimated_reserved": estimate(plan).reserved.point,
    }


def _lean(snapshot: dict[str, Any], options: str) -> dict[str, Any]:
    """The snapshot without stacks and times."""
    return {
        "allocator_settings": {"PYTORCH_CUDA_ALLOC_CONF": options},
        "segments": [{key: segment[key] for key in ("device", "total_size")} for segment in snapshot["segments"]],
        "device_traces": [
            [{key: entry[key] for key in _KEPT} for entry in trace] for trace in snapshot["device_traces"]
        ],
    }
