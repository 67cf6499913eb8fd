"""A run's folder: whether a run may use it, what it is given first, and where a run in it goes on.

OUT/lock                    empty; locked while a run goes on in the folder (lock-node-R by machine R)
OUT/plan.json               the plan
OUT/training.json           how it is trained: data, steps, seed, learning rate, ...
OUT/logs/torchrun.log       what torchrun said (torchrun-node-R.log on machine R); rank-R.log is what rank R said
OUT/errors/rank-R.json      why rank R failed, when it did
OUT/next-plan.json          after an OOM: a plan that should fit
OUT/rehearsal.json          of a module: its estimate
OUT/measured/, run.json     memory by rank and moment; losses, speed, versions
OUT/checkpoints/step-N/     sharded checkpoints
OUT/weights/model.safetensors   the final weights
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from memcalc.checkpoints import cut_off, newest_checkpoint, read_marker
from memcalc.errors import FileError, MemcalcError, PlanError
from memcalc.foreign import foreign
from memcalc.measurement import Measurement
from memcalc.plan import Plan
from memcalc.precision import DTYPE_BYTES
from memcalc.records import build
from memcalc.training import LIMITS, Training
from memcalc.units import format_bytes

__all__ = [
    "REHEARSAL", "check_folder", "check_space", "continued", "ended", "held", "load_plan", "prepare", "sweep",
]  # fmt: skip

REHEARSAL = "rehearsal.json"
"""What a module's own code takes, where the run is of one."""

_BEFORE_A_STEP = re.compile(
    r"lock(-node-\d+)?|(plan|next-plan|training)\.json|logs(/(torchrun(-node-\d+)?|rank-\d+)\.log)?|errors(/rank-\d+\.json)?"
)
"""What a run leaves that failed before its first step was finished: nothing that could be missed."""

_AGAIN = "give its options again, such as --data, --steps and --seed: what is not given is the default"
_SHOWN = ("data", "steps", "seed", "learning_rate")

_FOLDERS = ("logs", "errors", "measured", "weights")
_FILES = re.compile(
    r"lock(-node-\d+)?|(plan|next-plan|training|run|rehearsal)\.json|logs/(torchrun(-node-\d+)?|rank-\d+)\.log|"
    r"(errors|measured)/rank-\d+\.json|weights/model\.safetensors"
)

_UNFINISHED = re.compile(r"\.((plan|next-plan|training|run|rehearsal|rank-\d+)\.json|model\.safetensors)\.\w+")
"""A file that has not got its name yet (memcalc.files.write_text, trainers.weights.save_weights)."""


def ended(out: Path, status: str) -> None:
    """Note in ``run.json``, if there is one, how a run ended that is not done."""
    with contextlib.suppress(MemcalcError):  # damaged, or the disk is full: what failed first is what is said
        record = Measurement.from_json(out / "run.json", "run.json")
        if record.status == "running":
            replace(record, status=status).save(out / "run.json")


def sweep(out: Path) -> None:
    """Remove files that a killed process left before they had their names; of weights one is as large as the model.
    Only when no process of the run is left, or none has been started."""
    for folder in (out, *(out / name for name in ("errors", "measured", "weights"))):
        for path in folder.glob(".*"):
            if _UNFINISHED.fullmatch(path.name):
                with contextlib.suppress(OSError):
                    path.unlink()


def continued(out: Path, given: Mapping[str, Any]) -> tuple[Training, str]:
    """How the run in ``out`` goes on: as it was trained, but for what is ``given`` by name.

    The second is one line about what is given and differs, empty when nothing does. Raises FileError when there
    is nothing to resume, or the data is gone and no other was given.
    """
    if newest_checkpoint(out) is None:
        raise _nothing(out)
    source = out / "training.json"
    missing = not (source.exists() or source.is_symlink())
    if missing and not set(given) - {"resume"}:
        raise FileError(f"{source}, which says how the run was trained, is missing; {_AGAIN}")
    try:
        before = {} if missing else Training.saved(source)
    except FileError as error:
        raise FileError(f"{error}; remove it, and {_AGAIN}") from None
    for name in ("data", "tokenizer"):
        path = before.get(name)
        if isinstance(path, Path) and name not in given and not path.exists():
            raise FileError(f"{path}, the {name} of the run in {out}, does not exist any more; give --{name} PATH")
    try:
        training: Training = build(Training, {**before, **given}, str(source))
    except FileError as error:
        raise FileError(f"{error}; remove it, and {_AGAIN}") from None
    now = training.as_saved()
    if missing:
        said = ", ".join(f"{name.replace('_', ' ')} {now[name]}" for name in _SHOWN)
        return training, f"{source} is missing: {said}, and what else was not given, as by default"
    changed = [
        f"{name.replace('_', ' ')} {now[name]} (was {value})" for name, value in before.items() if now[name] != value
    ]
    if not changed:
        return training, ""
    return training, f"changed from the run so far: {', '.join(changed)}{_curve(out, before, training)}"


def _curve(out: Path, before: Mapping[str, Any], now: Training) -> str:
    """Where another number of steps bends the learning rate's curve: both rates of the step that comes next; else blank."""
    checkpoint, steps, (least, most) = newest_checkpoint(out), before.get("steps"), LIMITS["steps"]
    if checkpoint is None or steps == now.steps or type(steps) is not int or not least <= steps <= most:
        return ""
    step = checkpoint[0]
    was = replace(now, steps=steps)
    if all(was.rate_at(each) == now.rate_at(each) for each in (step, was.steps - 1)):
        return ""
    before_it = f"has {was.rate_at(step):.3g}" if step < steps else f"ended with {was.rate_at(steps - 1):.3g}"
    return (
        f"; the learning rate follows the curve of {now.steps} steps from here: {now.rate_at(step):.3g} in step {step + 1}, "
        f"where that of {steps} {before_it}"
    )


def check_folder(plan: Plan, out: Path, *, resume: bool) -> None:
    """Raises FileError when ``out`` cannot be the folder of this run, PlanError when it holds another run."""
    for place in (out.absolute(), *out.absolute().parents):
        if place.is_symlink() and not place.exists():
            raise FileError(f"{place} is a link that leads to nothing, or in a circle; give a folder for the run")
    if out.exists() and not out.is_dir():
        raise FileError(f"{out} is a file; give a folder for the run")
    with contextlib.suppress(OSError):  # no lock, so no run
        os.close(_lock(out, os.O_RDONLY))
    checkpoint = newest_checkpoint(out)
    if not resume:
        if out.is_dir() and not _free(out):
            or_resume = ", or continue the run in it with memcalc launch --resume" if checkpoint else ""
            raise FileError(f"{out} is not empty; give another folder{or_resume}")
    elif checkpoint is None:
        raise _nothing(out)
    else:
        before = load_plan(out / "plan.json")
        for field in ("model", "optimizer", "precision"):
            if getattr(before, field) != getattr(plan, field):
                raise PlanError(f"{out} holds a run with another {field}; a resumed run keeps it")
        read_marker(checkpoint[1], plan)
        _check_kinds(out)
    place = _existing(out)
    if not place.is_dir():
        raise FileError(f"{out} cannot be made: {place} is a file")


def _nothing(out: Path) -> FileError:
    """Why there is nothing to resume."""
    if others := foreign(out):
        return FileError(f"{others}; a run of its own takes another --out, and starts anew")
    torn = cut_off(out)
    why = f": {torn[-1]} was cut off while it was saved" if torn else ""
    return FileError(f"{out} holds no run with a checkpoint; nothing to resume{why}")


def load_plan(path: Path) -> Plan:
    """A plan from a file; in the folder of a run what is wrong with it comes with its cure. Raises FileError."""
    try:
        return Plan.load(path)
    except (FileError, PlanError) as error:
        if newest_checkpoint(path.parent) is None:
            raise
        raise FileError(
            f"{error}; the checkpoints beside it do not say the whole plan: put the one there that the run was started with"
        ) from None


def _check_kinds(out: Path) -> None:
    """Raises FileError where a run would find a folder in a file's place when it writes it, or the other way round."""
    for path in (*out.iterdir(), *(inner for name in _FOLDERS for inner in (out / name).glob("*"))):
        name = path.relative_to(out).as_posix()
        if name in (*_FOLDERS, "checkpoints") and not path.is_dir():
            raise FileError(f"{path} is a file where the run has a folder; move it away")
        if _FILES.fullmatch(name) and path.exists() and not path.is_file():
            raise FileError(f"{path} is a folder where the run writes a file; move it away")


def _free(out: Path) -> bool:
    """Empty, or left by a run that finished no step. A plan alone may be the user's own."""
    names = [path.relative_to(out).as_posix() for path in out.rglob("*")]
    return all(name.startswith("lock") for name in names) or (
        "logs" in names
        and all(_BEFORE_A_STEP.fullmatch(name) or _UNFINISHED.fullmatch(Path(name).name) for name in names)
    )


@contextlib.contextmanager
def held(out: Path, node: int = 0) -> Iterator[None]:
    """Make the folder and keep other runs out of it; the kernel lets go of it when this process is gone.

    Machines that share the folder of one run have a lock each.

    Raises FileError when another run holds it, or it cannot be made.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
        lock = _lock(out, os.O_RDWR | os.O_CREAT, node)
    except OSError as error:
        raise FileError(f"{out} cannot be written: {(error.strerror or str(error)).lower()}") from None
    try:
        yield
    finally:
        os.close(lock)


def _lock(out: Path, flags: int, node: int = 0) -> int:
    """A descriptor that holds the folder's lock until it is closed; ranks do not inherit it. Raises FileError, OSError."""
    lock = os.open(out / (f"lock-node-{node}" if node else "lock"), flags, 0o644)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        raise FileError(f"{out} is in use by another run; give another --out") from None
    except OSError:
        pass  # a file system without locks is no reason not to run
    return lock


def check_space(plan: Plan, out: Path) -> None:
    """Raises FileError when ``out`` cannot be written here, or the disk has no room for one checkpoint and the final weights."""
    place = _existing(out)
    if not os.access(place, os.W_OK | os.X_OK):
        raise FileError(f"{out} cannot be written: no permission in {place}")
    dtype = plan.precision_row.weights
    parameters = sum(weight.numel * DTYPE_BYTES[weight.dtype or dtype] for weight in plan.weights)
    trained = [weight for weight in plan.weights if weight.trainable]
    states = sum(sum(plan.optimizer_row.state_bytes(weight, weight.dtype or dtype)) for weight in trained)
    needed, free = 2 * parameters + states, shutil.disk_usage(place).free
    if free < needed:
        raise FileError(
            f"{out} has {format_bytes(free)} left; one checkpoint and the final weights need {format_bytes(needed)}"
        )


def _existing(path: Path) -> Path:
    """The path or its nearest parent that exists."""
    path = path.absolute()
    return next(place for place in (path, *path.parents) if place.exists())


def prepare(plan: Plan, training: Training, out: Path, *, log: str = "torchrun.log", first: bool = True) -> None:
    """Make the run's folder and put plan and training in it; what an earlier try said about its failure goes.

    Every machine of a run writes the same plan and training; the ``first`` removes what is old.
    """
    try:
        (out / "logs").mkdir(parents=True, exist_ok=True)
        (out / "logs" / log).unlink(missing_ok=True)
        if first:
            shutil.rmtree(out / "errors", ignore_errors=True)
            sweep(out)
    except OSError as error:
        raise FileError(f"{out} cannot be written: {(error.strerror or str(error)).lower()}") from None
    plan.save(out / "plan.json")
    training.save(out / "training.json")
