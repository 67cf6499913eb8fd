"""What ``trainers.gpu_check`` says: the facts of the machine, one line for each case, and a page of the docs."""

from __future__ import annotations

import platform
import subprocess
from collections.abc import Sequence
from typing import Any

import torch

from memcalc.units import format_bytes

__all__ = ["TOLERANCE", "facts", "line", "markdown"]

TOLERANCE = 1.0
"""Percent of the allocated peak."""


def facts(device: str) -> dict[str, Any]:
    """What was measured on: names, versions, and what a CUDA context takes before anything is allocated."""
    found: dict[str, Any] = {"device": "cpu", "torch": torch.__version__, "python": platform.python_version()}
    if device != "cuda":
        return found
    driver, used_before = _nvidia_smi()
    torch.cuda.init()
    free, total = torch.cuda.mem_get_info()
    return found | {
        "device": torch.cuda.get_device_name(),
        "cuda": torch.version.cuda,
        "driver": driver,
        "capacity": torch.cuda.get_device_properties(0).total_memory,
        "used_before": used_before,
        "context": None if used_before is None else total - free - used_before,
        "used_with_context": total - free,
    }


def _nvidia_smi() -> tuple[str | None, int | None]:
    """Driver version, and bytes in use before this process has a context; None where the tool is not there."""
    query = ["nvidia-smi", "--query-gpu=driver_version,memory.used", "--format=csv,noheader,nounits", "--id=0"]
    try:
        driver, used = subprocess.run(query, capture_output=True, text=True, timeout=30, check=True).stdout.split(",")
        return driver.strip(), int(used) * 2**20
    except (OSError, subprocess.SubprocessError, ValueError):
        return None, None


COLUMNS = ("case", "estimated", "measured", "error %", "reserved", "device", "states", "result")


def line(result: dict[str, Any]) -> tuple[str, ...]:
    """One row of the report."""

    def size(key: str) -> str:
        return format_bytes(result[key], binary=True) if key in result else "-"

    def meter(name: str) -> str:
        row = next((row for row in result.get("rows", ()) if row["meter"] == name), None)
        return "-" if row is None else format_bytes(row["measured"], binary=True)

    error = result.get("error_percent")
    states = {True: "equal", False: "differ", None: "-"}[result.get("states_equal")]
    said = result["status"] if "message" not in result else f"{result['status']}: {result['message']}"
    percent = "-" if error is None else f"{error:+.3f}"
    return (
        result["name"],
        size("estimated_peak"),
        size("measured_peak"),
        percent,
        meter("reserved"),
        meter("device"),
        states,
        said,
    )


def markdown(report: dict[str, Any]) -> str:
    """The report as a page of the docs."""
    found = report["facts"]
    measured = [result for result in report["cases"] if "measured_peak" in result]
    good = sum(result["status"] == "ok" for result in measured)
    about = "\n".join(
        f"- {name.replace('_', ' ')}: {_fact(name, value)}" for name, value in found.items() if value is not None
    )
    head = " | ".join(COLUMNS)
    rows = "\n".join(f"| {' | '.join(cell.replace('|', '/') for cell in line(result))} |" for result in report["cases"])
    return (
        f"# Measured on {found['device']}\n\n"
        f"{good} of {len(measured)} measured cases within {TOLERANCE:g} % of the allocated peak, with parameters, gradients and\n"
        "optimizer states equal to the byte. Written by `make gpu-check`; ranks above 1 are the fullest rank of a fake process group.\n\n"
        f"{about}\n\n| {head} |\n|{'---|' * len(COLUMNS)}\n{rows}\n{_histories(report.get('histories', ()))}"
    )


def _histories(found: Sequence[dict[str, Any]]) -> str:
    """What torch counted and what the replay of its own requests and frees holds, at their peaks."""
    if not found:
        return ""
    lines = ["", "## The allocator's history, replayed", "", "| run | entries | meter | counted | replayed | result |"]
    lines.append("|---|---|---|---|---|---|")
    for run in found:
        if "counted" not in run:
            lines.append(f"| {run['name']} | - | - | - | - | {run['message']} |")
            continue
        for meter, counted in run["counted"].items():
            sizes = f"{counted:,} | {run['replayed'][meter]:,}"
            lines.append(f"| {run['name']} | {run['entries']} | {meter} | {sizes} | {run['status']} |")
    return "\n".join(lines) + "\n"


def _fact(name: str, value: object) -> str:
    sizes = ("capacity", "context", "used_before", "used_with_context")
    return format_bytes(int(str(value)), binary=True) if name in sizes else str(value)
