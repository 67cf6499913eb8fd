"""How a run is trained: everything that is no matter of memory and so not in its Plan."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from memcalc.errors import FileError, InputError, shorten
from memcalc.files import read_json, write_text
from memcalc.hyperparameters import read_coefficients, read_scaling
from memcalc.rates import read_schedule

__all__ = ["LIMITS", "TRAINING_VERSION", "Training"]

TRAINING_VERSION = 1

_MOST_STEPS = 10**9
LIMITS = {
    "steps": (1, _MOST_STEPS),
    "seed": (0, 2**31 - 1),
    "eval_every": (0, _MOST_STEPS),
    "checkpoint_every": (0, _MOST_STEPS),
    "measure_steps": (0, _MOST_STEPS),
    "keep_checkpoints": (0, _MOST_STEPS),
}
"""Least and most of whole numbers; past the most a number is a slip."""
_FASTEST = 1e3  # learning rate; past these limits a number is a slip


@dataclass(frozen=True, kw_only=True, slots=True)
class Training:
    """How to train, where Plan says what: the options of ``python -m trainers``. Raises InputError."""

    data: Path | None = None
    """Text, tokens or images; None reads the source files of the Python installation itself."""
    tokenizer: Path | None = None
    """A ``tokenizers`` JSON; without one the bytes of a text are its tokens."""
    steps: int = 20
    seed: int = 0
    learning_rate: float = 3e-4
    clip: float = 1.0
    """Largest norm of all gradients together; 0 leaves them as they are."""
    eval_every: int = 0
    """Steps between evaluations; 0 evaluates at the end only."""
    checkpoint_every: int = 0
    """Steps between checkpoints; 0 saves at the end only."""
    measure_steps: int = 3
    """How many first steps are metered; 0 meters nothing. One alone lacks what lives from the second step on."""
    keep_checkpoints: int = 0
    """How many of the newest checkpoints stay; 0 keeps all."""
    schedule: str = ""
    """The learning rate by step, as DeepSpeed's files say it, in JSON: ``{"type": "WarmupLR", "warmup_num_steps": 500}``.
    Blank is the loop's own: up in a line, then down in a cosine."""
    coefficients: str = ""
    """Numbers of the optimizer, as DeepSpeed's files say them, in JSON: ``{"betas": [0.9, 0.95], "weight_decay": 0.1}``.
    What is not among them is torch's default."""
    scaling: str = ""
    """How a 16-bit loss is scaled, as the block ``fp16`` of DeepSpeed's files says it, in JSON."""
    nvme_path: Path | None = None
    """A folder on a disk for what DeepSpeed offloads to NVMe; a run makes one of its own in it, and removes it at the end."""
    accelerate: bool = False
    """The strategy is put around the model by accelerate."""
    resume: bool = False
    """Continue from the newest complete checkpoint of the same folder."""

    def __post_init__(self) -> None:
        for name, (least, most) in LIMITS.items():
            value = getattr(self, name)
            if not least <= value <= most:
                limit = f"at least {least}" if value < least else f"at most {most}"
                raise InputError(f"{name.replace('_', ' ')} {shorten(value)} must be {limit}")
        if self.measure_steps == 1 < self.steps:
            raise InputError(
                "measure steps 1 would meter the first step only, which lacks what lives from the second on; "
                "give 0 or at least 2"
            )
        if not 0 < self.learning_rate <= _FASTEST:
            raise InputError(f"learning rate {self.learning_rate} must be above 0 and at most {_FASTEST:g}, like 3e-4")
        if not 0 <= self.clip < math.inf:
            raise InputError(f"clip {self.clip} must be at least 0 (0 switches it off) and finite")
        if self.schedule:
            read_schedule(self.schedule, self.learning_rate, self.steps)
        if self.coefficients:
            read_coefficients(self.coefficients)
        if self.scaling:
            read_scaling(self.scaling)
        if self.data is not None and not self.data.exists():
            raise FileError(f"data {self.data} does not exist; give a text file, a folder, or leave --data out")
        if self.data is not None and not (self.data.is_file() or self.data.is_dir()):
            raise FileError(f"data {self.data} is a device, a pipe or a socket; give a text file or a folder")
        if self.tokenizer is not None and not self.tokenizer.is_file():
            what = "is no file" if self.tokenizer.exists() else "does not exist"
            raise FileError(f"tokenizer {self.tokenizer} {what}; give a tokenizer.json, or leave --tokenizer out")

    def arguments(self) -> list[str]:
        """The options as the trainers take them.

        >>> Training(steps=5).arguments()[:4]
        ['--steps', '5', '--seed', '0']
        """
        names = (
            "steps", "seed", "learning_rate", "clip", "eval_every", "checkpoint_every", "measure_steps", "keep_checkpoints",
        )  # fmt: skip
        words = [word for name in names for word in (f"--{name.replace('_', '-')}", str(getattr(self, name)))]
        for name in ("data", "tokenizer", "nvme_path"):
            if getattr(self, name) is not None:
                words += [f"--{name.replace('_', '-')}", str(getattr(self, name))]
        for name in ("schedule", "coefficients", "scaling"):
            words += [f"--{name}", getattr(self, name)] if getattr(self, name) else []
        return words + [f"--{name}" for name in ("accelerate", "resume") if getattr(self, name)]

    def as_saved(self) -> dict[str, Any]:
        """What a run's folder keeps: everything but ``resume``, with paths that hold wherever one stands."""
        found = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "resume"}
        return {name: value.absolute() if isinstance(value, Path) else value for name, value in found.items()}

    def save(self, path: Path) -> None:
        """Write it, whole or not at all. Raises FileError."""
        write_text(
            path, json.dumps({"memcalc_training": TRAINING_VERSION} | self.as_saved(), indent=2, default=str) + "\n"
        )

    @staticmethod
    def saved(path: Path) -> dict[str, Any]:
        """What ``save`` wrote, as ``as_saved`` had it; values are not judged yet. Raises FileError."""
        found = read_json(path, str(path))
        if not isinstance(found, dict) or found.pop("memcalc_training", None) != TRAINING_VERSION:
            raise FileError(f"{path} does not say how a run is trained; launch writes it")
        paths = {
            name: Path(found[name]) for name in ("data", "tokenizer", "nvme_path") if isinstance(found.get(name), str)
        }
        return found | paths

    def rate_at(self, step: int) -> float:
        """Learning rate: that of the schedule, or up in a line over the first tenth, at most 100 steps, then down in a
        cosine to a tenth.

        >>> [round(Training(steps=20, learning_rate=1.0).rate_at(step), 2) for step in (0, 1, 2, 11, 20)]
        [0.5, 1.0, 1.0, 0.55, 0.1]
        """
        if self.schedule:
            return read_schedule(self.schedule, self.learning_rate, self.steps)(step)
        warmup = min(self.steps // 10, 100)
        if step < warmup:
            return self.learning_rate * (step + 1) / warmup
        done = (step - warmup) / max(self.steps - warmup, 1)
        return self.learning_rate * (0.1 + 0.45 * (1 + math.cos(math.pi * done)))
