"""What other programs call by words of their own, and how memcalc says it; no word of memcalc's is near enough to be guessed."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import click

__all__ = ["ELSEWHERE", "elsewhere"]

ELSEWHERE: Mapping[str, str] = MappingProxyType(
    {
        "lora": "--adapter lora",
        "qlora": "--adapter lora --quantize nf4-double",
        "peft": "--adapter lora",
        "bf16": "--precision amp-bf16",
        "fp16": "--precision amp-fp16",
        "gradient-checkpointing": "--checkpointing full",
        "activation-checkpointing": "--checkpointing full",
    }
)
"""By the word, without the dashes of an option."""


def elsewhere(word: str, ctx: click.Context | None) -> str:
    """How memcalc says it, where the command has that option; else blank.

    >>> context = click.Context(click.Command("estimate", params=[click.Option(["--adapter"])]))
    >>> elsewhere("--use-lora", context), elsewhere("--QLoRA", context)
    ('', '--adapter lora --quantize nf4-double')
    """
    said = ELSEWHERE.get(word.lstrip("-").replace("_", "-").lower(), "")
    known = {name for param in ctx.command.params for name in param.opts} if ctx else set()
    return said if said and said.split()[0] in known else ""
