"""Reading a module of the user's own: its code runs in a process of its own, and only because its name was given.

The child is ``python -m trainers.module``; it leaves one JSON file, and everything its code prints goes to a log.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from memcalc.assumptions import GROWN, GUESSED, HOSTED
from memcalc.errors import FileError, InputError
from memcalc.files import read_json
from memcalc.hf.reading import UnknownModelType
from memcalc.launch import environment, require_torch
from memcalc.measurement import RankMeasurement
from memcalc.models import Model
from memcalc.named_code import check_name
from memcalc.plan import Plan
from memcalc.records import build
from memcalc.sharding import fullest, greedy_partition
from memcalc.supervise import started, stop_signals

__all__ = [
    "TIMEOUT_SECONDS",
    "Rehearsal",
    "by_transformers",
    "describe",
    "fullest_rank",
    "rehearse",
    "run_child",
]

TIMEOUT_SECONDS = 120
"""How long the code of a module may take to build it, if nothing else is said."""

_SAID = {"guessed": GUESSED, "grown": GROWN, "hosted": HOSTED}
"""By what the child counts: the sentence that says it."""
_LENGTHS = ("max_position_embeddings", "n_positions", "max_sequence_length", "seq_length")
_LONGEST = 2**24


class Rehearsal(NamedTuple):
    """What a rehearsal of a module's own code gave."""

    measurement: RankMeasurement
    doubts: tuple[str, ...]
    """Why a run may take more: its code asked for values of tensors and was given a 1, or keeps more with every step."""
    remarks: tuple[str, ...]
    """What else is to be known of the numbers."""


@cache
def describe(
    factory: str,
    *,
    sample: str = "",
    wrap: str = "",
    shape: tuple[int, ...] = (),
    tokens: int = 0,
    timeout: float = TIMEOUT_SECONDS,
) -> Model:
    """Build the module that ``factory`` names, in a child, and count it: every weight once, and what it reads.

    ``shape`` is of one sample of numbers; ``tokens`` are those of one that reads tokens; ``sample`` names a callable that
    makes batches instead. Raises InputError in one line for whatever the code does, FileError for a path.
    """
    require_torch()
    words = ["--factory", check_name(factory), "--wrap", wrap, "--shape", json.dumps(shape), "--tokens", str(tokens)]
    if sample:
        words += ["--sample", check_name(sample, "--sample")]
    with stop_signals():
        found = run_child("trainers.module", words, what=factory, timeout=timeout)
    model = build(Model, found, f"module {factory}")
    assert isinstance(model, Model)
    return model


def by_transformers(
    error: UnknownModelType, *, shape: tuple[int, ...] = (), tokens: int = 0, timeout: float = TIMEOUT_SECONDS
) -> Model:
    """The model of a ``config.json`` whose type memcalc has no row for, as transformers builds it; no code of the file runs.

    Raises the error itself where sizes are missing in the file, or with what to install where transformers is.
    """
    if error.nulls:
        raise error
    if not all(importlib.util.find_spec(name) for name in ("torch", "transformers")):
        raise InputError(f"{error}; transformers may know it: pip install transformers 'torch>=2.6'")
    if not (shape or tokens):
        said = read_json(Path(error.path), error.path)
        tokens = next((said[key] for key in _LENGTHS if isinstance(said.get(key), int)), 0)
        if not 0 < tokens <= _LONGEST:
            raise InputError(f"{error.path} does not say how long a sequence is; give --seq-len, or --input-shape")
    return describe(error.path, shape=shape, tokens=tokens, timeout=timeout)


def fullest_rank(plan: Plan) -> int:
    """The first of those ranks that hold most: shards are cut so that rank 0 has no less than another, but whole tensors
    are dealt out by size.

    >>> from memcalc.models import MODELS
    >>> fullest_rank(Plan(model=MODELS["gpt2"], tokens=8, micro_batch=1, ranks=2, strategy="fsdp-full-shard"))
    0
    """
    row = plan.strategy_row
    if row.shards_parameters or not (row.buckets and row.shards_optimizer):
        return 0
    return fullest(greedy_partition([weight for weight in plan.weights if weight.trainable], plan.shards))


def rehearse(
    plan: Plan, *, rank: int | None = None, device: str = "fake", timeout: float = TIMEOUT_SECONDS
) -> Rehearsal:
    """The second step of the plan's module on one rank, the fullest if none is named, by its own code on tensors without values, in a child.

    Raises InputError in one line where it cannot be rehearsed.
    """
    rank = fullest_rank(plan) if rank is None else rank
    with stop_signals(), tempfile.TemporaryDirectory(prefix="memcalc-plan-") as folder:
        path = Path(folder) / "plan.json"
        plan.save(path)
        found = run_child(
            "trainers.module",
            ["--rehearse", str(path), "--rank", str(rank), "--device", device],
            what=plan.model.name,
            timeout=timeout,
        )
    said = {sentence: int(found[name]) for name, sentence in _SAID.items()}
    doubts = tuple(sentence.format(said[sentence]) for sentence in (GUESSED, GROWN) if said[sentence] > 0)
    remarks = (HOSTED.format(said[HOSTED]),) if said[HOSTED] else ()
    return Rehearsal(RankMeasurement.from_json(found["measurement"], "rehearsal"), doubts, remarks)


def run_child(module: str, words: Sequence[str], *, what: str, timeout: float) -> Any:
    """Run ``python -m module WORDS --result FILE`` in a session of its own and read the JSON it leaves there.

    Raises InputError with the child's own line, or with how it ended; the log's path is in it where there is one.
    Nothing of it is left running.
    """
    folder = Path(tempfile.mkdtemp(prefix="memcalc-module-"))
    result, log = folder / "result.json", folder / "log.txt"
    keep = False
    try:
        command = [sys.executable, "-m", module, *words, "--result", str(result)]
        code: int | None = None
        with (
            log.open("wb") as file,
            started(command, environment=environment(os.environ), stdout=file, stderr=subprocess.STDOUT) as child,
            contextlib.suppress(subprocess.TimeoutExpired),
        ):
            code = child.wait(timeout)
        if result.exists():
            found = read_json(result, str(result))
            if isinstance(found, dict) and "error" not in found:
                return found
            line = str(found["error"]) if isinstance(found, dict) else "it left a file that is none of ours"
            keep = isinstance(found, dict) and bool(found.get("traceback"))
            kind = FileError if isinstance(found, dict) and found.get("kind") == "file" else InputError
            raise kind(f"{line}; see {log}" if keep else line)
        keep = True
        raise InputError(f"{what} {_ended(code, timeout)}; see {log}")
    finally:
        result.unlink(missing_ok=True)
        if not keep:
            shutil.rmtree(folder, ignore_errors=True)


def _ended(code: int | None, timeout: float) -> str:
    if code is None:
        return f"did not return within {timeout:g} s; --module-timeout SECONDS gives it more"
    if code < 0:
        with contextlib.suppress(ValueError):
            return f"was ended by {signal.Signals(-code).name}"
    return f"ended its process with exit code {code} instead of returning"
