"""What ``memcalc calibrate`` measures on this machine, as coefficients of the time model."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from memcalc.coefficient_table import COEFFICIENTS
from memcalc.errors import RunError
from memcalc.files import read_json, read_text
from memcalc.hardware import GPUS
from memcalc.launch import command, environment, require_torch
from memcalc.rank_hardware import generation
from memcalc.supervise import stop_signals, supervise

__all__ = ["coefficients", "measure", "record"]


def measure(device: str, ranks: int, said: Callable[[str], None] = lambda what: None) -> dict[str, Any]:
    """Run ``trainers.speeds`` under torchrun and return what it measured.

    Raises RunError, Stopped on a signal (no process and no folder is left), or what a missing torch raises.
    """
    require_torch()
    with stop_signals(), tempfile.TemporaryDirectory(prefix="memcalc-") as folder:
        out = Path(folder) / "speeds.json"
        call = command(ranks, "trainers.speeds", str(out), device)
        said(f"measuring with {ranks} rank{'s' * (ranks > 1)} on {device}")
        # There is nothing to save, so a signal kills the ranks at once.
        log = Path(folder) / "errors.log"
        code = supervise(call, environment=environment(os.environ), errors=log, show=said, grace_seconds=0)
        if code or not out.is_file():
            lines = [line.strip() for line in read_text(log).splitlines() if line.strip()]
            last = next((line for line in reversed(lines) if "Error" in line), "; ".join(lines[-1:]))
            raise RunError(f"measuring this machine failed with exit code {code}: {last or 'nothing was said'}")
        found = read_json(out, "the measurement")
    if not isinstance(found, dict):
        raise RunError("the measurement is no JSON object; is there another package named trainers?")
    return found


def coefficients(found: Mapping[str, Any]) -> dict[str, float]:
    """The coefficients that a measurement says, by name.

    >>> products = [{"dtype": "float32", "width": w, "flops": f} for w, f in ((64, 3e10), (1024, 9e10))]
    >>> reduced = [{"bytes": 2**20, "seconds": 1e-3}, {"bytes": 100 * 2**20, "seconds": 0.1}]
    >>> seen = {"device": "cpu", "ranks": 2, "products": products, "copy": 2e10, "operation": 5e-6, "reduced": reduced}
    >>> coefficients(seen)["cpu-core-flops"], round(coefficients(seen)["cpu-link"])
    (90000000000.0, 1048576000)
    """
    best: dict[str, float] = {}
    for each in found["products"]:
        best[each["dtype"]] = max(best.get(each["dtype"], 0.0), each["flops"])
    values = {("cpu-launch-seconds" if found["device"] == "cpu" else "launch-seconds"): found["operation"]}
    sent = 2 * (found["ranks"] - 1) / found["ranks"]  # of an all-reduce's bytes, by each rank (memcalc/traffic.py)
    rates = [sent * each["bytes"] / each["seconds"] for each in found["reduced"]]
    if found["device"] == "cpu":
        values |= {"cpu-core-flops": best["float32"], "cpu-memory-bandwidth": found["copy"]}
        return values | ({"cpu-link": max(rates)} if rates else {})
    gpu = GPUS.get(found["gpu"])
    if gpu is None:
        return values
    half = "bfloat16" if gpu.bfloat16 else "float16"
    values[f"efficiency-{generation(gpu)}"] = min(best[half] / gpu.flops(half), 1.0)
    values["efficiency-float32"] = min(best["float32"] / gpu.flops_fp32, 1.0)
    if rates:
        values["link-efficiency"] = min(max(rates) / gpu.link_bandwidth, 1.0)
    return values


def record(found: Mapping[str, Any], made: str) -> str:
    """The file's text: coefficients of this machine, what they are of, and all that was measured."""
    gpu = GPUS.get(found.get("gpu") or "")
    data = {
        "memcalc_calibration": 1,
        "made": made,
        "device": found["device"],
        "gpu": gpu.name if gpu else found.get("gpu"),
        "torch": found["torch"],
        "python": ".".join(map(str, sys.version_info[:3])),
        "context": found.get("context"),
        "coefficients": {name: float(f"{value:.4g}") for name, value in coefficients(found).items() if name in COEFFICIENTS},
        "measured": {key: found[key] for key in ("ranks", "products", "copy", "operation", "reduced")},
    }  # fmt: skip
    return json.dumps(data, indent=2) + "\n"
