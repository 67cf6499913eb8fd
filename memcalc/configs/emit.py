"""Writing a plan's launch files into a folder: all of them or none, and nothing that is there is replaced unasked."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from memcalc.configs.scripts import PLAN_FILE, sbatch, torchrun
from memcalc.configs.write import FORMATS, suited, write
from memcalc.errors import FileError
from memcalc.files import write_text
from memcalc.plan import Plan
from memcalc.training import Training

__all__ = ["EMITTED", "check_target", "emit", "text_of"]

_SCRIPTS = {"torchrun": ("run.sh", torchrun), "sbatch": ("run.sbatch", sbatch)}
EMITTED = (*FORMATS, *_SCRIPTS)
"""What can be written."""


def emit(plan: Plan, kind: str, folder: Path, training: Training, *, replace: bool = False) -> tuple[str, ...]:
    """Write the plan and its launch file into ``folder``; what was written and left out comes back, a line each.

    Raises PlanError for what the format cannot say, FileError for what cannot be written or is there already.
    """
    plan, name, text, notes = text_of(plan, kind, training)
    files = {folder / name: text, folder / PLAN_FILE: plan.to_json()}
    check_target(kind, folder, replace=replace)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FileError(f"{folder} cannot be made: {(error.strerror or str(error)).lower()}") from None
    for path, content in files.items():
        write_text(path, content)
    return (f"wrote {folder / name} and {folder / PLAN_FILE}", *notes)


def text_of(plan: Plan, kind: str, training: Training) -> tuple[Plan, str, str, tuple[str, ...]]:
    """The plan as it is written, its launch file's name and text, and a line for each thing that changed or was left out.

    Raises PlanError for what the format cannot say.
    """
    if kind not in FORMATS:
        name, script = _SCRIPTS[kind]
        return plan, name, script(plan, training), ()
    plan, notes = suited(plan, kind)
    found = write(plan, kind, training)
    left = (f"left to the training script: {', '.join(found.left)}",) if found.left else ()
    return plan, FORMATS[kind].file, found.text, (*notes, *left)


def check_target(kind: str, folder: Path, *, replace: bool = False) -> None:
    """Raises FileError where the files of a kind cannot be put into the folder; leaves nothing there."""
    name = FORMATS[kind].file if kind in FORMATS else _SCRIPTS[kind][0]
    files = (folder / name, folder / PLAN_FILE)
    place = next(each for each in (folder.absolute(), *folder.absolute().parents) if os.path.lexists(each))
    if not place.is_dir():
        raise FileError(f"{folder} cannot be made: {place} is no folder")
    try:  # root has permission for folders that take no file, such as /proc
        os.rmdir(tempfile.mkdtemp(prefix=".memcalc-", dir=place))
    except OSError as error:
        raise FileError(f"{folder} cannot be written: {(error.strerror or str(error)).lower()}") from None
    there = [str(path) for path in files if path.exists() or path.is_symlink()]
    if there and not replace:
        stand = "is" if len(there) == 1 else "are"
        raise FileError(f"{', '.join(there)} {stand} there already; add --replace, or name another folder")
