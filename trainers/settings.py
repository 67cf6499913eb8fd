"""How a run is trained: everything that is no matter of memory and so not in its Plan."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Settings"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """How to train, where Plan says what."""

    data: Path | None = None
    tokenizer: Path | None = None
    steps: int = 20
    seed: int = 0
    learning_rate: float = 3e-4
    clip: float = 1.0
    """Largest norm of all gradients together; 0 leaves them as they are."""
    eval_every: int = 0
    """Steps between evaluations; 0 evaluates at the end only."""
    checkpoint_every: int = 0
    resume: bool = False
    measure_steps: int = 3
    """How many first steps are metered; 0 meters nothing."""

    def rate_at(self, step: int) -> float:
        """Learning rate: up in a line over the first tenth, at most 100 steps, then down in a cosine to a tenth.

        >>> [round(Settings(steps=20, learning_rate=1.0).rate_at(step), 2) for step in (0, 1, 2, 11, 20)]
        [0.5, 1.0, 1.0, 0.55, 0.1]
        """
        warmup = min(self.steps // 10, 100)
        if step < warmup:
            return self.learning_rate * (step + 1) / warmup
        done = (step - warmup) / max(self.steps - warmup, 1)
        return self.learning_rate * (0.1 + 0.45 * (1 + math.cos(math.pi * done)))
