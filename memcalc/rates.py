"""Learning-rate schedules of DeepSpeed's files, step by step (deepspeed/runtime/lr_schedules.py, release 0.19.8).

DeepSpeed moves its schedule on after each optimizer step, so that step 0 runs at the value a schedule starts with.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from typing import Any

from memcalc.errors import FileError, InputError, UnknownNameError, shorten
from memcalc.files import read_json

__all__ = ["SCHEDULES", "read_schedule", "schedule_text"]

_AUTO = "auto"
_WARMUP = {"warmup_num_steps": 1000, "warmup_type": "log"}
SCHEDULES: Mapping[str, Mapping[str, Any]] = {
    "WarmupLR": {"warmup_min_lr": 0.0, "warmup_max_lr": None, **_WARMUP},
    "WarmupDecayLR": {"total_num_steps": None, "warmup_min_lr": 0.0, "warmup_max_lr": 0.001, **_WARMUP},
    "WarmupCosineLR": {"total_num_steps": None, "warmup_min_ratio": 0.0, "cos_min_ratio": 0.0001, **_WARMUP},
    "OneCycle": {
        "cycle_min_lr": None, "cycle_max_lr": None, "decay_lr_rate": 0.0, "cycle_first_step_size": 2000,
        "cycle_second_step_size": None, "cycle_first_stair_count": 0, "cycle_second_stair_count": None, "decay_step_size": 0,
    },
    "LRRangeTest": {
        "lr_range_test_min_lr": 1e-3, "lr_range_test_step_size": 2000, "lr_range_test_step_rate": 1.0,
        "lr_range_test_staircase": False,
    },
}  # fmt: skip
"""By type, the parameters of each with DeepSpeed's defaults; None where there is none, or another parameter is taken."""

Rate = Callable[[int], float]
_NEEDED = {"WarmupDecayLR": ("total_num_steps",), "WarmupCosineLR": ("total_num_steps",), "OneCycle": ("cycle_min_lr", "cycle_max_lr")}  # fmt: skip
_FLAGS = ("lr_range_test_staircase",)
_POSITIVE = ("warmup_num_steps", "total_num_steps", "cycle_first_step_size", "lr_range_test_step_size")


def schedule_text(kind: str, params: Mapping[str, Any]) -> str:
    """A schedule as one line of text, which Training keeps and ``read_schedule`` reads."""
    return json.dumps({"type": kind, **params})


def read_schedule(text: str, learning_rate: float, steps: int) -> Rate:
    """The learning rate by step. ``"auto"`` is the run's own rate or number of steps, as transformers fills it in.

    Raises InputError for an unknown type or parameter, and for one that is missing or makes no sense.

    >>> rate = read_schedule('{"type": "WarmupLR", "warmup_num_steps": 4, "warmup_type": "linear"}', 1.0, 10)
    >>> [rate(step) for step in range(7)]
    [0.0, 0.0, 0.25, 0.5, 0.75, 1.0, 1.0]
    """
    try:
        found = read_json(text, "schedule")
    except FileError as error:
        raise InputError(str(error)) from None
    if not isinstance(found, dict) or not isinstance(found.get("type"), str):
        raise InputError(f"schedule {shorten(text)} is not a JSON object with a type")
    kind, given = found["type"], {name: value for name, value in found.items() if name != "type" and value is not None}
    if kind not in SCHEDULES:
        raise UnknownNameError("schedule", kind, SCHEDULES)
    for name in given:
        if name not in SCHEDULES[kind]:
            raise InputError(f"schedule {kind}: {UnknownNameError('parameter', name, SCHEDULES[kind])}")
    filled = {name: _filled(name, value, learning_rate, steps) for name, value in given.items()}
    for name, value in filled.items():
        _check(kind, name, value)
    if missing := [name for name in _NEEDED.get(kind, ()) if name not in filled]:
        raise InputError(f"schedule {kind} needs {missing[0]}")
    params = {**SCHEDULES[kind], **filled}
    if kind == "OneCycle":
        return _one_cycle(params)
    return _range_test(params) if kind == "LRRangeTest" else _warmup(kind, params, learning_rate)


def _filled(name: str, value: Any, learning_rate: float, steps: int) -> Any:
    """transformers/integrations/deepspeed.py, trainer_config_process and trainer_config_finalize."""
    autos = {"warmup_min_lr": 0.0, "warmup_max_lr": learning_rate, "warmup_num_steps": 1, "total_num_steps": steps}
    return autos.get(name, value) if value == _AUTO else value


def _check(kind: str, name: str, value: Any) -> None:
    said = f"schedule {kind}: {name} {shorten(value)}"
    if name == "warmup_type":
        if value not in ("log", "linear"):
            raise InputError(f"{said} is none of: log, linear")
    elif name in _FLAGS:
        if not isinstance(value, bool):
            raise InputError(f"{said} is not true or false")
    elif isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
        raise InputError(f"{said} is not a number of at least 0")
    elif name in _POSITIVE and value < 1:
        raise InputError(f"{said} must be at least 1")


def _warmup(kind: str, params: Mapping[str, Any], learning_rate: float) -> Rate:
    """Up over ``warmup_num_steps``, along a logarithm or a line; then flat, down in a line, or down in a cosine."""
    warmup = max(2, int(params["warmup_num_steps"]))
    total = params.get("total_num_steps") or 0

    def climbed(done: int) -> float:
        return math.log(done + 1) / math.log(warmup) if params["warmup_type"] == "log" else done / warmup

    def cosine(step: int) -> float:
        done = step - 1
        if done < 0:
            return 0.0
        if done < warmup:
            return float(
                learning_rate * (params["warmup_min_ratio"] + climbed(done) * (1 - params["warmup_min_ratio"]))
            )
        progress = min(1.0, (done - warmup + 1) / max(1, total - warmup))
        least = params["cos_min_ratio"]
        return float(learning_rate * max(0.0, least + (1 - least) * (1 + math.cos(math.pi * progress)) / 2))

    def line(step: int) -> float:
        done, low = step - 1, params["warmup_min_lr"]
        high = learning_rate if params["warmup_max_lr"] is None else params["warmup_max_lr"]
        if done < 0:
            return float(low)
        share = climbed(done) if done < warmup else 1.0
        if kind == "WarmupDecayLR" and done >= warmup:
            share = max(0.0, (total - done) / max(1.0, total - warmup))
        return float(low + (high - low) * share)

    return cosine if kind == "WarmupCosineLR" else line


def _one_cycle(params: Mapping[str, Any]) -> Rate:
    """Up and down once, in stairs where their number is given; then down for good. Momentum is left as it is."""
    first = float(params["cycle_first_step_size"])
    second = first if params["cycle_second_step_size"] is None else float(params["cycle_second_step_size"])
    stairs = (params["cycle_first_stair_count"], params["cycle_second_stair_count"])
    stairs = (stairs[0], stairs[0] if stairs[1] is None else stairs[1])
    low, high, every = params["cycle_min_lr"], params["cycle_max_lr"], params["decay_step_size"]

    def rate(step: int) -> float:
        if step - 1 < first + second:
            place = step % (first + second)
            rising = place <= first
            share = place / first if rising else (first + second - place) / second
            count = stairs[0] if rising else stairs[1]
            return float(low + (high - low) * (math.floor(share * count) / count if count else share))
        if not every or not params["decay_lr_rate"]:
            return float(low)
        return float(low / (1 + params["decay_lr_rate"] * (step - first - second) / every))

    return rate


def _range_test(params: Mapping[str, Any]) -> Rate:
    """Up without end, in a line or in stairs."""

    def rate(step: int) -> float:
        passed = step / params["lr_range_test_step_size"]
        passed = math.floor(passed) if params["lr_range_test_staircase"] else passed
        return float(params["lr_range_test_min_lr"] * (1 + params["lr_range_test_step_rate"] * passed))

    return rate
