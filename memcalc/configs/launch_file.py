"""What a launch file says, in the words of Plan and Training, before options beside it and the model are known."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from memcalc.configs.batch import Batch

__all__ = ["LaunchFile"]


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchFile:
    """One file as it was read; ``memcalc.configs.settle`` makes a plan's fields of it."""

    name: str
    """The path as it was given, for messages."""
    format: str
    fields: Mapping[str, Any]
    """Fields of Plan by name, those of a group with a dot: ``offload.optimizer``. A value may be ``"auto"``."""
    batch: Batch
    batch_autos: Mapping[str, str] = field(default_factory=dict)
    """Keys of the batch that say ``"auto"``, with the fields of Batch that they are."""
    world: int | None = None
    """Processes in all, where the file says so."""
    training: Mapping[str, Any] = field(default_factory=dict)
    """Fields of Training by name, and ``out``, the folder of the run."""
    block_class: str = ""
    """The class that FSDP shall wrap; blank where the file names none."""
    notes: tuple[str, ...] = ()
    """Keys that were not taken as they stand, each in one line with the file's name."""
