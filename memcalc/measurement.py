"""What a real run measured, and the files it is kept in.

    OUT/run.json                the Measurement without its ranks: plan, versions, losses, speed, how it ended
    OUT/measured/rank-R.json    one RankMeasurement for each rank

A reading without its instrument is worth nothing, so each rank names the instrument that took its.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from memcalc.errors import FileError, InputError, UnknownNameError, shorten
from memcalc.files import read_json, write_text
from memcalc.plan import Plan
from memcalc.records import build
from memcalc.timeline import CATEGORIES, MOMENTS, Timeline

__all__ = ["MEASUREMENT_VERSION", "Measurement", "RankMeasurement"]

MEASUREMENT_VERSION = 1
_STATUSES = ("running", "preempted", "stopped", "failed", "done")
_ARRAYS = {"ident": np.int64, "category": np.int8, "moment": np.int8, "delta": np.int64}


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RankMeasurement:
    """The memory of one rank, in bytes; peaks are those of the steady state (from the second step on).

    ``parameters``, ``gradients`` and ``optimizer`` are the exact sizes of the storages on this rank. None
    stands for a meter that the instrument does not have.
    """

    rank: int
    instrument: str
    moment: str
    """Where the allocated peak lies."""
    allocated_peak: int
    by_moment: dict[str, int]
    """Fullest point within each moment of a steady step; what stays alive through a moment counts in it."""
    parameters: int
    gradients: int
    """At the end of backward, before the optimizer's step."""
    optimizer: int
    init_peak: int | None = None
    """Fullest point before the steady state: building, sharding, and the first step's lazy states."""
    reserved_peak: int | None = None
    device_peak: int | None = None
    host_peak: int | None = None
    steps: int | None = None
    """How many steps were metered. With one alone there was no steady state, and the peaks are the first step's."""
    timeline: Timeline | None = None
    """The last metered step; what was alive when it began comes first, at the moment ``start``."""

    def __post_init__(self) -> None:
        for moment in (self.moment, *self.by_moment):
            if moment not in MOMENTS:
                raise UnknownNameError("moment", moment, MOMENTS)
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, int) and value < 0:
                raise InputError(f"{field.name} {value} is below 0")

    def to_json(self) -> str:
        """The measurement as JSON text.

        >>> rank = RankMeasurement(rank=0, instrument="", moment="step", allocated_peak=9, by_moment={"step": 9},
        ...                        parameters=2, gradients=2, optimizer=4)
        >>> RankMeasurement.from_json(rank.to_json()).by_moment
        {'step': 9}
        """
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        fields["timeline"] = None if self.timeline is None else _timeline_to_dict(self.timeline)
        return json.dumps({"memcalc_measurement": MEASUREMENT_VERSION} | fields) + "\n"

    @classmethod
    def from_json(cls, source: Path | str, name: str = "measurement") -> RankMeasurement:
        """A measurement from a file or from text. Raises FileError."""
        fields = _fields(source, name, "memcalc_measurement")
        if fields.get("timeline") is not None:
            fields["timeline"] = _timeline_from_dict(fields["timeline"], name)
        return _build(cls, fields, name)

    def save(self, path: Path) -> None:
        """Write it, whole or not at all. Raises FileError."""
        write_text(path, self.to_json())


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Measurement:
    """A whole run: what was run, how it went, and the memory of every rank in the order of ranks."""

    plan: Plan
    status: str
    """``running`` until the last step is ``done``; ``preempted`` when all was saved before, ``stopped`` by a signal, or
    ``failed``. One whose launcher was killed stays ``running``."""
    device: str
    """What it ran on: ``cpu``, or the name of the card."""
    versions: dict[str, str]
    losses: list[float | None]
    """Training loss of each step, mean over all ranks; None where it was not a number."""
    evaluation_loss: float | None = None
    samples_per_second: float | None = None
    """Of all ranks together, over the steps that were not metered."""
    tokens_per_second: float | None = None
    ranks: tuple[RankMeasurement, ...] = ()

    def __post_init__(self) -> None:
        if self.status not in _STATUSES:
            raise UnknownNameError("status", self.status, _STATUSES)

    def to_json(self) -> str:
        """The record of the run as JSON text; the ranks have files of their own."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self) if field.name != "ranks"}
        fields["plan"] = json.loads(self.plan.to_json())
        fields["losses"] = [_finite(loss) for loss in self.losses]
        fields["evaluation_loss"] = _finite(self.evaluation_loss)
        return json.dumps({"memcalc_run": MEASUREMENT_VERSION} | fields, indent=2) + "\n"

    @classmethod
    def from_json(cls, source: Path | str, name: str = "run") -> Measurement:
        """A record from a file or from text, without ranks. Raises FileError."""
        fields = _fields(source, name, "memcalc_run")
        fields["plan"] = Plan.from_dict(fields.get("plan"), f"{name}: plan")
        return _build(cls, {key: value for key, value in fields.items() if key != "ranks"}, name)

    @classmethod
    def load(cls, run: Path) -> Measurement:
        """Read a run's folder. Raises FileError when it is none, or the measurement of a rank is missing."""
        path = run / "run.json"
        if not path.exists():
            if (run / "plan.json").exists() and (run / "logs").is_dir():
                raise FileError(f"the run in {run} ended, or still is, before the steps whose memory is read")
            raise FileError(
                f"{run} holds no run (there is no {path.name} in it); give the folder that launch --out wrote"
            )
        record = cls.from_json(path, str(path))
        found = {
            int(match[1]): file
            for file in (run / "measured").glob("rank-*.json")
            if (match := re.fullmatch(r"rank-(\d{1,6})\.json", file.name))
        }
        missing = [rank for rank in range(record.plan.ranks) if rank not in found]
        if missing:
            raise FileError(
                f"{run / 'measured'} lacks rank {missing[0]} of {record.plan.ranks}: the run was not metered or ended too early"
            )
        files = [found[rank] for rank in range(record.plan.ranks)]
        ranks = tuple(RankMeasurement.from_json(file, str(file)) for file in files)
        for number, (rank, file) in enumerate(zip(ranks, files, strict=True)):
            if rank.rank != number:
                raise FileError(f"{file} is damaged: it says that it is of rank {rank.rank}")
        return dataclasses.replace(record, ranks=ranks)

    def save(self, path: Path) -> None:
        """Write the record, whole or not at all. Raises FileError."""
        write_text(path, self.to_json())


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _fields(source: Path | str, name: str, mark: str) -> dict[str, Any]:
    data = read_json(source, name)
    if not isinstance(data, dict) or mark not in data:
        raise FileError(f"{name} is not what it should be, a JSON object with {mark!r}; launch writes it")
    if data[mark] != MEASUREMENT_VERSION:
        raise FileError(f"{name} is of version {shorten(data[mark])}; this memcalc reads version {MEASUREMENT_VERSION}")
    return {key: value for key, value in data.items() if key != mark}


def _build(cls: type, fields: dict[str, Any], name: str) -> Any:
    """``cls(**fields)``, with wrong types, unknown and missing keys refused by name."""
    try:
        return build(cls, fields, f"{name} is damaged")
    except InputError as error:
        raise FileError(f"{name}: {error}") from None


def _timeline_to_dict(timeline: Timeline) -> dict[str, Any]:
    return {"names": list(timeline.names)} | {key: getattr(timeline, key).tolist() for key in _ARRAYS}


def _timeline_from_dict(data: Any, name: str) -> Timeline:
    """Arrays of one length whose indices point into what they index. Raises FileError."""
    try:
        names = tuple(str(entry) for entry in data["names"])
        arrays = {key: np.array(data[key], dtype=np.int64) for key in _ARRAYS}
        limits = {"ident": len(names), "category": len(CATEGORIES), "moment": len(MOMENTS)}
        sound = {array.shape for array in arrays.values()} == {(len(arrays["delta"]),)} and all(
            ((arrays[key] >= 0) & (arrays[key] < limit)).all() for key, limit in limits.items()
        )
    except (KeyError, TypeError, ValueError, OverflowError):
        sound = False
    if not sound:
        raise FileError(f"{name} is damaged: its timeline does not fit together")
    typed: dict[str, Any] = {key: arrays[key].astype(dtype) for key, dtype in _ARRAYS.items()}
    return Timeline(names=names, **typed)
