"""What a figure or a page is of: a model in words, a saved plan, or the folder of a run."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from memcalc.cli.options import said_by_file
from memcalc.cli.progress import waiting
from memcalc.errors import FileError, InputError, UnknownNameError
from memcalc.files import read_json
from memcalc.hf.paths import FILES

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

    from memcalc.compare import Comparison
    from memcalc.estimate import Estimate
    from memcalc.measurement import RankMeasurement
    from memcalc.timeline import Timeline

__all__ = ["RunFolder", "Saved", "Subject", "is_plan", "subject", "takes"]


@dataclass(frozen=True, slots=True)
class Saved:
    """A MODEL that is the file of a saved plan."""

    path: Path


@dataclass(frozen=True, slots=True)
class RunFolder:
    """A MODEL that is the folder of a run."""

    path: Path


@dataclass(frozen=True, kw_only=True, slots=True)
class Subject:
    """An estimate, and what a run of the same plan measured where it is of one."""

    estimate: Estimate
    run: Comparison | None = None

    @property
    def rank(self) -> RankMeasurement | None:
        """What was measured on the fullest rank; of a pipeline, on the fullest of the stage that is estimated."""
        if self.run is None:
            return None
        layout, stage = self.estimate.plan.layout, self.estimate.stage
        ranks = [rank for rank in self.run.measurement.ranks if layout.stage_of(rank.rank) == stage]
        return max(ranks, key=lambda rank: (rank.allocated_peak, -rank.rank))


def is_plan(path: Path) -> bool:
    """A file that says it is a plan of memcalc; what else is wrong with it is said when it is read."""
    try:
        data = read_json(path, str(path)) if path.is_file() else None
    except (FileError, OSError, ValueError):
        return False
    return isinstance(data, dict) and "memcalc_plan" in data


def _bare(path: Path) -> bool:
    """A folder that says no model."""
    try:
        return path.is_dir() and not any((path / name).is_file() for name in FILES)
    except (OSError, ValueError):  # too long for a path, or in a folder that may not be read
        return False


def _without(folder: Path) -> FileError:
    return FileError(f"{folder} is a folder without the run.json of a run or the config.json of a model")


class _Model(click.ParamType):  # type: ignore[type-arg]
    """The file of a saved plan, the folder of a run, or whatever else names a model."""

    name = "text"

    def __init__(self, model: click.ParamType, kinds: tuple[type, ...]) -> None:  # type: ignore[type-arg]
        self.model, self.kinds = model, kinds

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        path = Path(value)
        with contextlib.suppress(OSError, ValueError):
            if RunFolder in self.kinds and (path / "run.json").is_file():
                return RunFolder(path)
            if is_plan(path):
                return Saved(path)
        try:
            found = self.model.convert(value, param, ctx)
        except UnknownNameError:
            if RunFolder in self.kinds and _bare(path):
                raise _without(path) from None
            raise
        if RunFolder in self.kinds and isinstance(found, Path) and _bare(found):
            raise _without(path)
        return found

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        return self.model.shell_complete(ctx, param, incomplete)


def takes(command: click.Command, *kinds: type) -> None:
    """Let a command's MODEL be one of these as well: Saved, RunFolder."""
    for param in command.params:
        if param.name == "model":
            param.type = _Model(param.type, kinds)


def subject(words: dict[str, Any], config: Path | None, scale: int | None, command: str) -> Subject:
    """What was said in words, estimated. Raises InputError and FileError."""
    from memcalc.cli.estimate import planned, rehearsed
    from memcalc.estimate import estimate

    model = words.get("model")
    if isinstance(model, RunFolder):
        from memcalc.compare import compare_run

        said_by_file(str(model.path), {**words, "model": None, "config": config, "scale": scale})
        found = compare_run(model.path)
        return Subject(estimate=found.estimate, run=found)
    file = model.path if isinstance(model, Saved) else None
    if file is not None:
        words = {**words, "model": None}
    plan = planned(file, config, scale, words, command)
    return Subject(estimate=estimate(plan, rehearsal=rehearsed(plan, words) if plan.model.module.factory else None))


def rehearsal_of(found: Subject) -> Timeline:
    """Another source's step: the trainers' own code, run without its GPUs. Raises RunError and InputError."""
    from memcalc.rehearsal import rehearse, unrehearsed

    plan = found.estimate.plan
    if why := unrehearsed(plan):
        raise InputError(f"--rehearse: this plan cannot be rehearsed, because {why}; leave it out")
    click.echo("memcalc: rehearses two steps of the fullest rank", err=True)
    with waiting("still rehearses"):
        return rehearse(plan).timeline
