"""The numbers of the time model in use: the table's, in their place what was fitted on published speeds, and in the place of
both what was measured on this machine.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from memcalc.coefficient_table import COEFFICIENTS
from memcalc.errors import FileError, UnknownNameError, shorten
from memcalc.files import read_json

__all__ = [
    "CALIBRATED", "Own", "Values", "calibration_file", "coverage", "own_calibration", "published", "read_values", "values",
]  # fmt: skip

Values = Mapping[str, float]
"""Every coefficient's value by its name."""

CALIBRATED = Path(__file__).with_name("calibrated.json")


@lru_cache(maxsize=1)
def published() -> Values:
    """What every estimate uses: the table's values, and in their place what was fitted."""
    return {name: row.value for name, row in COEFFICIENTS.items()} | (
        read_values(CALIBRATED) if CALIBRATED.is_file() else {}
    )


def coverage() -> Mapping[str, tuple[int, float]]:
    """What the range of a step time is worth, by half of the sources: runs, and the percentage of them in their range.

    >>> sorted(coverage())
    ['calibration', 'never used']
    """
    lines: list[dict[str, Any]] = read_json(CALIBRATED, str(CALIBRATED))["range"]
    return {line["half"]: (line["rows"], line["in_range_pct"]) for line in lines}


def values(device: str = "", gpu: str = "") -> Values:
    """The same, and in their place what was measured on this machine, where that has such a device: ``cpu``, or ``cuda``
    with a card of that catalog name."""
    own = own_calibration()
    return {**published(), **own.coefficients} if own is not None and own.is_of(device, gpu) else published()


@dataclass(frozen=True, kw_only=True, slots=True)
class Own:
    """What ``memcalc calibrate`` measured on this machine."""

    path: Path
    made: str
    device: str
    gpu: str | None
    context: int | None
    """Bytes of the CUDA context."""
    coefficients: dict[str, float]

    def is_of(self, device: str, gpu: str | None) -> bool:
        return device == self.device and (device == "cpu" or (gpu is not None and gpu == self.gpu))


def calibration_file() -> Path:
    """Where this machine's numbers are kept: MEMCALC_CALIBRATION, else in the user's configuration folder
    (XDG Base Directory Specification)."""
    said = os.environ.get
    return _calibration_file(said("MEMCALC_CALIBRATION", ""), said("XDG_CONFIG_HOME", ""), said("HOME", ""))


@lru_cache(maxsize=4)
def _calibration_file(said: str, base: str, home: str) -> Path:
    """The same; a search asks thousands of times."""
    if said:
        return Path(said)
    return (Path(base) if base else (Path(home) if home else Path.home()) / ".config") / "memcalc" / "calibration.json"


def own_calibration() -> Own | None:
    """This machine's numbers; None where it was never measured. Raises FileError where the file is damaged."""
    path = calibration_file()
    try:
        changed = path.stat().st_mtime_ns
    except (OSError, ValueError):
        return None
    return _own(path, changed)


@lru_cache(maxsize=4)
def _own(path: Path, changed: int) -> Own:
    data, cure = read_json(path, str(path)), "delete it, or run memcalc calibrate again"
    if not isinstance(data, dict) or data.get("memcalc_calibration") != 1 or data.get("device") not in ("cpu", "cuda"):
        raise FileError(f"{path} is no calibration of this memcalc; {cure}")
    context = data.get("context")
    if context is not None and (type(context) is not int or context < 0):
        raise FileError(f"{path}: context {context!r} must be a number of bytes; {cure}")
    return Own(
        path=path, made=str(data.get("made", "")), device=data["device"], gpu=data.get("gpu"), context=context,
        coefficients=read_values(path),
    )  # fmt: skip


def read_values(path: Path) -> dict[str, float]:
    """Coefficients of a file that ``memcalc calibrate`` wrote. Raises FileError."""
    data, cure = read_json(path, str(path)), "delete it, or make it again with memcalc calibrate"
    found = data.get("coefficients") if isinstance(data, dict) else None
    if not isinstance(found, dict) or not found:
        raise FileError(f"{path} is no calibration (a JSON object with 'coefficients'); {cure}")
    for name, value in found.items():
        if name not in COEFFICIENTS:
            raise FileError(f"{path}: {UnknownNameError('coefficient', name, list(COEFFICIENTS))}")
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < 1e18:
            raise FileError(f"{path}: {name} is {shorten(str(value))}, not a number above 0; {cure}")
        low, high = COEFFICIENTS[name].limits
        if not low <= value <= high:
            raise FileError(f"{path}: {name} {value:g} must be between {low:g} and {high:g}; {cure}")
    return {name: float(value) for name, value in found.items()}
