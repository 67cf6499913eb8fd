"""From a launch file to a plan's fields: options beside it, the model, and this machine's ranks decide what it left open."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from memcalc.configs.batch import Batch
from memcalc.configs.blocks import check_block
from memcalc.configs.keys import AUTO
from memcalc.configs.launch_file import LaunchFile
from memcalc.errors import InputError, PlanError
from memcalc.models import Model
from memcalc.plan import Plan
from memcalc.precision import PRECISIONS
from memcalc.strategies import STRATEGIES
from memcalc.units import things, undivided

__all__ = ["Settled", "apply", "settle"]

_WIDTHS: Mapping[str, Callable[[int], int]] = {
    "deepspeed.reduce_bucket_size": lambda width: width * width,
    "deepspeed.prefetch_bucket_size": lambda width: int(0.9 * width * width),
    "deepspeed.persistence_threshold": lambda width: 10 * width,
}
"""transformers/integrations/deepspeed.py, trainer_config_finalize: what ``auto`` becomes for a model of so much hidden size."""
_COPIES = ("layout.tensor", "layout.context", "layout.pipeline")


@dataclass(frozen=True, kw_only=True, slots=True)
class Settled:
    """Fields of Plan (with a dot for those of a group) and of Training that a file and what stood beside it decide."""

    fields: dict[str, Any]
    training: dict[str, Any]
    notes: tuple[str, ...]
    """What was ignored, overruled, filled in or scaled, a line each."""


def settle(
    file: LaunchFile,
    said: Mapping[str, Any],
    model: Model,
    *,
    scale: int = 0,
    gpus: bool = True,
    blocks: tuple[str, ...] = (),
) -> Settled:
    """Decide what the file leaves open. ``said`` are fields given beside it: they win, and a note says so.

    ``scale`` runs it on so many ranks of one machine; ``gpus`` says whether that has any; ``blocks``
    are the classes of the model's blocks where a config.json tells them. The world size of a file can
    be changed by that alone. Raises InputError, and PlanError for a batch that does not divide.
    """
    unknown = check_block(file, model, blocks)
    notes, name = [*file.notes, *([unknown] if unknown else [])], file.name
    fields = {key: value for key, value in file.fields.items() if value != AUTO}
    said = dict(said)
    ranks = _ranks(file, said, scale)
    if scale:
        _scale(fields, said, notes, file, scale, gpus)
    for key, value in said.items():
        if key in fields and fields[key] != value and key != "ranks":
            notes.append(f"{name}: {_spelled(key)} {value} given beside it wins over {fields[key]}")
    fields |= said
    for key, value in file.fields.items():
        if value == AUTO and key not in said:
            fields[key] = _auto(key, model, name)
            notes.append(f'{name}: {_spelled(key)} "auto" is taken as {fields[key]}{_otherwise(key)}')
    copies = prod(fields.get(key, 1) for key in _COPIES)
    batch = _merged(file.batch, said, name, notes, scale)
    if ranks is None:
        ranks = (batch.ranks() or 1) * copies
        if STRATEGIES[fields.get("strategy", "single")].parallel:
            notes.append(
                f"{name}: the batch is that of {things(ranks, 'GPU')}; --gpus says otherwise"
                if ranks > 1
                else f"{name}: it does not say how many processes there are; one is assumed, which divides nothing: give --gpus N"
            )
    fields["ranks"] = ranks
    _fill(fields, batch, file, model, ranks, copies, notes, said)
    return Settled(fields=fields, training=_training(file, fields, notes), notes=tuple(notes))


def _training(file: LaunchFile, fields: Mapping[str, Any], notes: list[str]) -> dict[str, Any]:
    """How the file trains, without what is of no use to the plan that it became."""
    found = dict(file.training)
    precision = PRECISIONS.get(fields.get("precision", "fp32"))
    if "scaling" in found and not (precision and precision.loss_scaling):
        notes.append(
            f"{file.name}: no losses are scaled in {fields.get('precision', 'fp32')}; left out: {found.pop('scaling')}"
        )
    if "coefficients" in found and fields.get("optimizer") != file.fields.get("optimizer"):
        notes.append(f"{file.name}: coefficients of another optimizer are left out: {found.pop('coefficients')}")
    return found


def apply(plan: Any, fields: Mapping[str, Any]) -> Any:
    """The plan with fields replaced, those with a dot inside their groups."""
    groups: dict[str, dict[str, Any]] = {}
    flat: dict[str, Any] = {}
    for key, value in fields.items():
        group, _, field = key.rpartition(".")
        if group:
            groups.setdefault(group, {})[field] = value
        else:
            flat[field] = value
    changed = {group: dataclasses.replace(getattr(plan, group), **values) for group, values in groups.items()}
    return dataclasses.replace(plan, **flat, **changed)


def _ranks(file: LaunchFile, said: Mapping[str, Any], scale: int) -> int | None:
    typed = said.get("ranks")
    if scale:
        if typed not in (None, scale):
            raise InputError(f"--gpus {typed} and --scale-to-ranks {scale} contradict each other; leave one out")
        return scale
    if file.world and typed not in (None, file.world):
        raise InputError(
            f"{file.name} is for {file.world} processes, not --gpus {typed}; to run it on fewer or more, say "
            f"--scale-to-ranks {typed}"
        )
    return typed or file.world


def _scale(
    fields: dict[str, Any], said: Mapping[str, Any], notes: list[str], file: LaunchFile, ranks: int, gpus: bool
) -> None:
    """The file's run on this machine: fewer copies of a divided model, one node, and its CPUs where it has no GPU."""
    changes: dict[str, Any] = {}
    left = ranks
    for degree in ("layout.tensor", "layout.context", "fsdp.replicas"):
        stands = fields.get(degree, 1)
        if stands > 1:
            most = max(1, stands * ranks // (file.world or ranks))
            changes[degree] = max(n for n in range(1, min(stands, most) + 1) if left % n == 0 and stands % n == 0)
            left //= changes[degree]
    if fields.get("nodes", 1) > 1:
        changes["nodes"] = 1
    if not gpus and fields.get("device", "cuda") == "cuda" and "device" not in said:
        changes["device"] = "cpu"
    whole = {**fields, **changes, **said}
    if whole.get("device", "cuda") == "cpu":
        if (
            whole.get("precision") == "fp16-master" and "precision" not in said
        ):  # "Type fp16 is not supported on your device." (runtime/engine.py)
            changes["precision"] = "bf16-master"
        changes |= {
            key: "none" for key in ("offload.optimizer", "offload.parameters") if fields.get(key, "none") != "none"
        }
    shown = [f"{_spelled(key)} {fields.get(key, 'cuda')} -> {value}" for key, value in changes.items()
             if fields.get(key) != value]  # fmt: skip
    world = f"{file.world} -> {things(ranks, 'rank')}" if file.world else things(ranks, "rank")
    notes.append(f"{file.name}: scaled to this machine: {', '.join([world, *shown])}")
    fields |= changes


def _auto(key: str, model: Model, name: str) -> Any:
    if key in _WIDTHS:
        if not model.hidden:
            raise PlanError(
                f'{name}: {_spelled(key)} "auto" follows from a hidden size, which {model.name} lacks; write a number'
            )
        return _WIDTHS[key](model.hidden)
    return "fp32"  # transformers' TrainingArguments without fp16 and bf16


def _otherwise(key: str) -> str:
    """The option that says it in the file's place."""
    group, _, name = key.rpartition(".")
    if not group:
        return f"; --{name} says otherwise"
    knobs = next(field.default for field in dataclasses.fields(Plan) if field.name == group)
    option = next(knob.metadata["option"] for knob in dataclasses.fields(knobs) if knob.name == name)  # type: ignore[arg-type]
    return f"; {option} says otherwise"


def _merged(batch: Batch, said: Mapping[str, Any], name: str, notes: list[str], scale: int) -> Batch:
    micro, rounds = said.get("micro_batch"), said.get("accumulation")
    for called, typed, stood in (("micro batch", micro, batch.micro), ("accumulation", rounds, batch.accumulation)):
        if typed and stood and typed != stood:
            notes.append(f"{name}: {called} {typed} given beside it wins over {stood}")
    stood = batch.accumulation
    if scale and batch.train and batch.micro and stood and not rounds:
        notes.append(f"{name}: scaled, the accumulation follows from the batch and is no longer {stood}")
        stood = None
    return Batch(train=batch.train, micro=micro or batch.micro, accumulation=rounds or stood)


def _fill(
    fields: dict[str, Any], batch: Batch, file: LaunchFile, model: Model, ranks: int, copies: int, notes: list[str],
    said: Mapping[str, Any],
) -> None:  # fmt: skip
    """Micro batch and accumulation, where the file or an option says any number of a batch."""
    if batch == Batch() and not file.batch_autos:
        return
    if ranks % copies:
        raise PlanError(f"{file.name}: {undivided(ranks, 'rank')} over {copies} that hold parts of the model")
    whole = batch.settled(ranks // copies, file.name, copies)
    fields |= {"micro_batch": whole.micro, "accumulation": whole.accumulation}
    if not model.context and not model.features and batch == Batch():  # known by its size alone
        del fields["micro_batch"]
    if file.batch_autos:
        taken = ", ".join(f'{key} "auto" is taken as {getattr(whole, part)}' for key, part in file.batch_autos.items())
        size = f"{whole.train} samples = {whole.micro} x {whole.accumulation} x {ranks // copies} ranks"
        notes.append(f"{file.name}: {taken} (a step of {size}); --batch-size and --accumulation say otherwise")


def _spelled(key: str) -> str:
    return key.replace(".", " ").replace("_", " ")
