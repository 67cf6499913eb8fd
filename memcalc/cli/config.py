"""``--config``: a plan from a launch file and the options beside it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import click

from memcalc.cli.kinds import File, Whole
from memcalc.cli.options import build_model, build_plan, check_effect, given, option
from memcalc.errors import InputError
from memcalc.groups import Group
from memcalc.plan import Plan
from memcalc.tables import printable

__all__ = ["config_options", "configured", "refuse_without_config"]

Function = TypeVar("Function", bound=Callable[..., Any])
_SECTION = "A launch file"


def config_options(command: Function) -> Function:
    """Add ``--config`` and ``--scale-to-ranks``."""
    command = option(
        _SECTION, "--scale-to-ranks", "scale", type=Whole(), metavar="N",
        help="With --config: run it on N ranks of this machine, with as many samples a step; on its CPUs where it has "
        "no GPU. What changes is said.",
    )(command)  # fmt: skip
    return option(
        _SECTION, "--config", "config", type=File(), metavar="FILE",
        help="What a launch file says: DeepSpeed's JSON; accelerate's YAML (distributed_type: FSDP, fsdp_sharding_strategy); or "
        "the plain fsdp_config YAML of tutorials (shard_optimizer_state, mixed_precision). Options given beside "
        "it win, and are named; only the number of processes it states changes by --scale-to-ranks alone.",
    )(command)  # fmt: skip


def configured(path: Path, words: Mapping[str, Any], scale: int | None) -> tuple[Plan, dict[str, Any]]:
    """The plan, and the fields of Training that the file says; what was not taken as it stands is said on stderr."""
    from memcalc.configs import read, settle

    file, model, typed = read(path), build_model(words), given(words)
    fields = {field.name for field in dataclasses.fields(Plan)}
    said = {name.replace("__", "."): value for name, value in typed.items() if name in fields or "__" in name}
    said.pop("model", None)
    if typed.get("adam"):
        said.setdefault("optimizer", "adam")
    gpus = True
    if scale:
        from memcalc.machine import detect

        gpus = bool(detect().gpus)
    settled = settle(file, said, model, scale=scale or 0, gpus=gpus, blocks=_blocks(typed.get("model")))
    plan = build_plan({**words, **{name.replace(".", "__"): value for name, value in settled.fields.items()}})
    check_effect(words, plan)
    for note in (*settled.notes, *_without_effect(plan, settled.fields, said, file.name)):
        click.echo(f"memcalc: {printable(note)}", err=True)
    return plan, settled.training


def _blocks(model: object) -> tuple[str, ...]:
    """Classes of the blocks, where the model is a config.json."""
    if not isinstance(model, Path):
        return ()
    from memcalc.hf.reading import wrapped_as

    return wrapped_as(model)


def _without_effect(plan: Plan, fields: Mapping[str, Any], said: Mapping[str, Any], name: str) -> list[str]:
    """What the file says and the plan has no use for, with the reason."""
    found = []
    for key, value in fields.items():
        group, _, field = key.rpartition(".")
        knobs = getattr(plan, group) if group else None
        if not isinstance(knobs, Group) or key in said:
            continue
        default = next(each.default for each in dataclasses.fields(knobs) if each.name == field)  # type: ignore[arg-type]
        if value != default and field in knobs.idle(plan):
            found.append(f"{name}: {field.replace('_', ' ')} {value} changes nothing: it {knobs.idle(plan)[field]}")
    return found


def refuse_without_config(scale: int | None) -> None:
    """``--scale-to-ranks`` scales a file."""
    if scale is not None:
        raise InputError("--scale-to-ranks scales what a launch file says; give one with --config")
