"""``memcalc recommend`` in the words of an estimate that does not fit."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import click

__all__ = ["search_instead"]

_JOB = (
    "model", "parameters", "layers", "hidden", "heads", "kv_heads", "ffn", "vocab", "tokens", "ranks", "nodes", "gpu", "precision",
    "optimizer", "adam", "adapter__kind", "adapter__rank", "adapter__quantize",
)  # fmt: skip
"""What says the job and not how it is run: strategy, batch, checkpointing and the rest are what a search chooses."""


def search_instead(command: click.Command, words: Mapping[str, Any]) -> str:
    """What looks for a plan that fits, in a sentence; blank for a module, which is not searched."""
    if words.get("module") is not None or not (words.get("model") or words.get("parameters")):
        return ""
    said = ["memcalc", "recommend"]
    for param in sorted(command.params, key=lambda param: (param.name or "") != "model"):
        value = words.get(param.name or "")
        if param.name not in _JOB or not isinstance(value, str | int | Path):
            continue
        option = [] if param.param_type_name == "argument" else [next(o for o in param.opts if o.startswith("--"))]
        said += option if value is True else [*option, str(value)]
    return f"a plan that does fit is looked for by: {shlex.join(said)}"
