"""The model that was said in words: a named one with other numbers, one known by its size, a file, or a module."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from memcalc.errors import InputError
from memcalc.models import FAMILIES, MODELS, Model

if TYPE_CHECKING:
    from memcalc.hf.record import HfModel

__all__ = ["Words", "build_model", "given", "said_by_file"]

Words = Mapping[str, Any]
"""What was typed, by parameter name; None where nothing was."""
_RESHAPE = ("layers", "hidden", "heads", "kv_heads", "ffn", "vocab", "context", "features", "classes", "layer_bytes")
_SIZE_KNOWS = ("layers", "features", "layer_bytes")
_READS = {"features": "--input-shape", "tokens": "--seq-len", "sample": "--sample"}
_SPELLED = {"features": "--input-shape", "layer_bytes": "--activation-per-layer", "kv_heads": "--kv-heads"}


def given(words: Words) -> dict[str, Any]:
    """Only what was typed."""
    return {name: value for name, value in words.items() if value is not None}


def said_by_file(said: str, words: Words, *beside: str) -> None:
    """Raises InputError for whatever is typed beside a file that says the whole plan, but for the parameters ``beside``."""
    context = click.get_current_context(silent=True)
    params = context.command.params if context else []
    spelled = {
        each.name: each.human_readable_name if isinstance(each, click.Argument) else each.opts[0] for each in params
    }
    if more := [spelled.get(name, name) for name in given(words) if name not in beside]:
        raise InputError(f"{said} says the whole plan; leave out {' and '.join(more)}")


def build_model(words: Words) -> Model:
    """The named model with the numbers that were given instead of its own, or one known by its size.

    >>> build_model({"model": "gpt2", "hidden": 1024}).ffn, build_model({"parameters": 1000}).family
    (4096, 'size')
    """
    words = given(words)
    if "module" in words:
        return _own(words)
    for only in ("sample", "wrap"):
        if only in words:
            raise InputError(f"--{only} is for a module of your own; give --module FILE:NAME")
    if "features" in words:
        words["shape"], words["features"] = words["features"], prod(words["features"])
    name, parameters = words.get("model"), words.get("parameters")
    if (name is None) == (parameters is None):
        both = f"not both the model {name} and --params" if name else f"one of: {', '.join(MODELS)}; or --params COUNT"
        raise InputError(f"give a model, {both}")
    base = _read(name, words) if name else _sized(int(parameters or 0))
    if "module_timeout" in words and not base.module.factory:
        raise InputError(
            "--module-timeout is for code that is run: a module of your own (--module FILE:NAME), or a config.json that "
            f"only transformers knows; {base.name} runs none"
        )
    changes = {field: words[field] for field in _RESHAPE if field in words}
    for field in changes:
        if not (getattr(base, field) or (name is None and field in _SIZE_KNOWS)):
            spelled = _SPELLED.get(field, f"--{field}")
            raise InputError(f"{spelled} does not apply to {base.name} ({FAMILIES[base.family].summary})")
    if name is None or not changes:
        return dataclasses.replace(base, **changes)
    said = ", ".join(f"{field} {value}" for field, value in changes.items())
    return dataclasses.replace(base, **{**_followers(base, changes), **changes}, name=f"{base.name} ({said})")


def _own(words: dict[str, Any]) -> Model:
    """The module that was named, built and counted in a process of its own."""
    from memcalc.module import TIMEOUT_SECONDS, describe  # starts processes, which nothing else here needs

    if others := [name for name in ("model", "parameters") if name in words]:
        raise InputError(
            f"give a model or --module, not both: leave out {' and '.join(str(words[name]) for name in others)}"
        )
    for field in _RESHAPE:
        if field in words and field != "features":
            raise InputError(f"{_SPELLED.get(field, f'--{field}')} does not apply to --module, whose code says it")
    if len(ways := [spelled for word, spelled in _READS.items() if word in words]) > 1:
        raise InputError(f"{' and '.join(ways)} both say what the module reads; leave one out")
    return describe(
        words["module"],
        sample=words.get("sample", ""),
        wrap=words.get("wrap", ""),
        shape=words.get("features", ()),
        tokens=words.get("tokens", 0),
        timeout=words.get("module_timeout", TIMEOUT_SECONDS),
    )


def _read(name: str | Path | HfModel, words: Mapping[str, Any]) -> Model:
    if isinstance(name, str):
        return MODELS[name]
    if not isinstance(name, Path):  # a config.json that was read before
        return name.model
    from memcalc.hf.reading import UnknownModelType, read_model  # a named model needs no rows

    try:
        return read_model(name)
    except UnknownModelType as error:
        from memcalc.module import TIMEOUT_SECONDS, by_transformers

        return by_transformers(
            error,
            shape=words.get("shape", ()),
            tokens=words.get("tokens", 0),
            timeout=words.get("module_timeout", TIMEOUT_SECONDS),
        )


def _sized(parameters: int) -> Model:
    return Model(name=f"{parameters:,} parameters", family="size", parameters=parameters)


def _followers(base: Model, changes: Words) -> dict[str, int]:
    """Numbers that hang on a changed one: what a family derives, and what was equal stays equal."""
    follow: dict[str, int] = {}
    if "hidden" in changes and base.ffn == 4 * base.hidden:
        follow["ffn"] = 4 * changes["hidden"]
    if "hidden" in changes and base.features == base.hidden:
        follow["features"] = changes["hidden"]
    if "heads" in changes and base.kv_heads == base.heads:
        follow["kv_heads"] = changes["heads"]
    return follow
