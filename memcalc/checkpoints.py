"""The checkpoints of a run: which are complete, and whether what is in one is what was written.

OUT/checkpoints/step-N/           every rank's part, written by torch.distributed.checkpoint
OUT/checkpoints/step-N/done.json  written last, by rename: without it the folder does not count
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
import shutil
from dataclasses import dataclass, field
from pathlib import Path

from memcalc.errors import FileError, MemcalcError, PlanError, shorten
from memcalc.files import read_json, write_text
from memcalc.models import Model
from memcalc.plan import Plan
from memcalc.records import build

__all__ = ["COMPLETE", "INDEX", "Marker", "cure", "cut_off", "digest", "drop_old", "newest_checkpoint", "read_marker"]

COMPLETE = "done.json"
"""The file that a checkpoint's folder gets last; without it the folder does not count."""
INDEX = ".metadata"
"""torch's own list of which tensor is where."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Marker:
    """What ``done.json`` says: where a resumed run goes on, of what job the checkpoint is, and its files."""

    step: int
    """The next step, counted from 0: so many are done."""
    losses: list[float | None]
    """Of each step so far."""
    scaler: dict[str, float]
    """State of the loss scaler; empty where none scales."""
    model: Model
    optimizer: str
    precision: str = ""
    """Blank in older checkpoints, which did not say."""
    files: dict[str, int] = field(default_factory=dict)
    """Bytes of each rank's file by its name, at least; empty in older checkpoints, which did not say."""
    index: str = ""
    """SHA-256 of torch's list of tensors; blank in those, too."""

    def save(self, path: Path) -> None:
        """Complete a checkpoint's folder. Raises FileError."""
        write_text(path / COMPLETE, json.dumps(dataclasses.asdict(self)) + "\n")


def digest(path: Path) -> str:
    """SHA-256 of a checkpoint's list of tensors, which of many ranks is large. Raises FileError."""
    found = hashlib.sha256()
    try:
        with (path / INDEX).open("rb") as file:
            while part := file.read(2**20):
                found.update(part)
    except OSError as error:
        raise FileError(f"{path / INDEX} cannot be read: {(error.strerror or str(error)).lower()}") from None
    return found.hexdigest()


def newest_checkpoint(out: Path) -> tuple[int, Path] | None:
    """Step and folder of the latest complete checkpoint, if there is one."""
    return max(_complete(out / "checkpoints").items(), default=None)


def cut_off(out: Path) -> list[Path]:
    """Folders of checkpoints that do not count, because they were not written to the end."""
    found = [path for path in (out / "checkpoints").glob("step-*") if path.is_dir()]
    return sorted(path for path in found if not (path / COMPLETE).exists())


def _complete(checkpoints: Path) -> dict[int, Path]:
    return {
        int(match[1]): path
        for path in checkpoints.glob("step-*")
        if (match := re.fullmatch(r"step-(\d+)", path.name)) and (path / COMPLETE).exists()
    }


def drop_old(checkpoints: Path, kept: int) -> None:
    """Remove what was cut off while it was written and, unless ``kept`` is 0, all complete checkpoints but the newest
    so many. Nothing goes before there is a complete one; what cannot be removed stays."""
    complete = _complete(checkpoints)
    if not complete:
        return
    for step in sorted(complete)[:-kept] if kept else []:
        (complete[step] / COMPLETE).unlink(missing_ok=True)  # first, so that it never counts with files missing
        shutil.rmtree(complete[step], ignore_errors=True)
    for path in checkpoints.glob("step-*"):
        if path.name.removeprefix("step-").isdigit() and not (path / COMPLETE).exists():
            shutil.rmtree(path, ignore_errors=True)


def read_marker(path: Path, plan: Plan) -> Marker:
    """Where to go on from the checkpoint in ``path``, whose files are all there.

    Raises FileError with what is damaged and what to do about it, PlanError when it is of another job.
    """
    try:
        marker: Marker = _marker(path)
        _check_files(path, marker)
    except MemcalcError as error:
        raise FileError(f"{error}; {cure(path)}") from None
    if (marker.model, marker.optimizer) != (plan.model, plan.optimizer):
        raise PlanError(f"{path} was saved by a run with another model or optimizer; a resumed run keeps both")
    if marker.precision not in ("", plan.precision):
        raise PlanError(
            f"{path} was saved by a run in {marker.precision}, not {plan.precision}; a resumed run keeps it"
        )
    return marker


def cure(path: Path) -> str:
    """What to do about a checkpoint that is damaged."""
    others = [step for step, other in _complete(path.parent).items() if other != path]
    said = f"goes on from step {max(others)}" if others else "has no other checkpoint, and must start anew"
    return f"remove {path}: the run {said}"


def _marker(path: Path) -> Marker:
    source = path / COMPLETE
    marker: Marker = build(Marker, read_json(source, str(source)), str(source))
    if path.name != f"step-{marker.step}" or len(marker.losses) != marker.step:
        raise FileError(f"{source} is of step {marker.step} with {len(marker.losses)} losses, not of {path.name}")
    return marker


def _check_files(path: Path, marker: Marker) -> None:
    for name, size in marker.files.items():
        file = path / name
        if file.parent != path or not file.is_file():
            raise FileError(f"{path / shorten(name)[1:-1]} is missing")
        if (found := file.stat().st_size) < size:
            raise FileError(f"{file} is cut off: it has {found:,} bytes of {size:,}")
    if digest(path) != marker.index and marker.index:
        raise FileError(f"{path / INDEX} is not the one that was written")
