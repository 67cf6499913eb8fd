"""The model of memory held against one real GPU; sharded strategies too, as rank 0 of 8 that are not there.

python -m trainers.gpu_check --out docs/validation           # needs torch and numpy, no install, no network
python -m trainers.gpu_check --device cpu --out /tmp/check   # the same on tiny models, to try the program itself

Torch's fake process group makes collectives return at once and do nothing, while every buffer around them is
allocated for real: one GPU shows what a rank of eight takes. Each case is one run of the trainers' own loop.
Results are written after each case, so a check that is cut off keeps what it measured.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import platform
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("KINETO_LOG_LEVEL", "5")  # read when torch is imported

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from memcalc.compare import Comparison, compare
from memcalc.errors import MemcalcError
from memcalc.estimate import estimate
from memcalc.files import write_text
from memcalc.hardware import GPUS
from memcalc.plan import Plan
from memcalc.units import format_bytes
from trainers.backends import ddp
from trainers.gpu_cases import cases
from trainers.loop import train
from trainers.process import Rank, join
from trainers.settings import Settings

__all__ = ["main"]

TOLERANCE = 1.0
"""Percent of the allocated peak."""
STEPS = 3


class Timeout(Exception):
    """A case took longer than it may."""


def main(words: list[str] | None = None) -> int:
    """Run the cases that fit the time; 1 when an estimate is beyond tolerance or a case broke."""
    parser = argparse.ArgumentParser(prog="trainers.gpu_check", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--out", type=Path, default=Path("docs/validation"), help="folder of the report")
    parser.add_argument("--seconds", type=float, default=420, help="for all cases together")
    parser.add_argument("--case-seconds", type=int, default=60, help="for one case")
    parser.add_argument("--only", default="", help="only cases whose name contains this")
    options = parser.parse_args(words)
    if options.device == "cuda" and not torch.cuda.is_available():
        print(f"gpu-check: torch {torch.__version__} finds no CUDA device here; --device cpu tries the program itself")
        return 2
    started = time.monotonic()
    report: dict[str, Any] = {"facts": facts(options.device), "cases": []}
    name = report["facts"]["device"]
    version = ".".join(torch.__version__.split(".")[:2])
    gpu = GPUS[name].name if name in GPUS else None
    plans = {k: v for k, v in cases(device=options.device, gpu=gpu, torch=version).items() if options.only in k}
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / f"{re.sub(r'[^a-z0-9]+', '-', name.lower()).strip('-')}.json"
    print(f"{name}, torch {torch.__version__}: {len(plans)} cases", flush=True)
    for case, plan in plans.items():
        left = options.seconds - (time.monotonic() - started)
        if left > 0:
            result = measure(plan, min(options.case_seconds, int(left) + 1))
        else:
            result = {"status": "skipped", "message": "no time left"}
        report["cases"].append({"name": case, **result})
        write_text(path, json.dumps(report, indent=1) + "\n")
        write_text(path.with_suffix(".md"), markdown(report))
        print(" | ".join(line(report["cases"][-1])), flush=True)
    print(f"{path} and {path.with_suffix('.md').name} written in {time.monotonic() - started:.0f} s")
    return int(any(result["status"] in ("off", "error") for result in report["cases"]))


# -- one case --------------------------------------------------------------------------------------


def measure(plan: Plan, seconds: int) -> dict[str, Any]:
    """Run one plan and compare; an OOM, a timeout or an error is a result too."""
    started = time.monotonic()
    estimated = estimate(plan)
    result: dict[str, Any] = {"plan": json.loads(plan.to_json()), "estimated_peak": estimated.peak.bytes}
    try:
        with tempfile.TemporaryDirectory() as folder, fake_group(plan.ranks), alarm(seconds):
            settings = Settings(steps=STEPS, measure_steps=STEPS, data=text_for(plan, Path(folder)))
            with join(Rank(rank=0, local=0, world=plan.ranks), plan.device, settings.seed) as process:
                measurement = train(plan, settings, process)
        result |= described(compare(estimated, measurement))
    except torch.OutOfMemoryError as error:
        result |= {"status": "oom", "message": first_line(error)}
    except Timeout:
        result |= {"status": "timeout", "message": f"took longer than {seconds} s"}
    except (MemcalcError, RuntimeError, ValueError, TypeError, AttributeError, ImportError, AssertionError) as error:
        result |= {"status": "error", "message": f"{type(error).__name__}: {first_line(error)}"}
    result["workspace"] = clean_up(plan.device)
    result["seconds"] = round(time.monotonic() - started, 1)
    return result


def described(comparison: Comparison) -> dict[str, Any]:
    """Everything measured, as plain values."""
    peak = comparison.peak
    percent = peak.error_percent
    good = percent is not None and abs(percent) <= TOLERANCE and comparison.states_equal()
    rows = [
        {
            "meter": row.meter, "category": row.category, "moment": row.moment, "low": row.low, "high": row.high,
            "measured": row.measured, "error": row.error_bytes,
        }
        for row in comparison.rows
    ]  # fmt: skip
    return {
        "status": "ok" if good else "off",
        "measured_peak": peak.measured,
        "error_percent": None if percent is None else round(percent, 4),
        "states_equal": comparison.states_equal(),
        "instrument": peak.instrument,
        "losses": comparison.measurement.losses,
        "rows": rows,
    }


@contextlib.contextmanager
def fake_group(world: int) -> Iterator[None]:
    """A process group of ``world`` ranks of which only rank 0 exists."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
    before = ddp.DistributedDataParallel
    ddp.DistributedDataParallel = _HookedDdp  # type: ignore[misc]
    try:
        yield
    finally:
        ddp.DistributedDataParallel = before  # type: ignore[misc]
        dist.destroy_process_group()


class _HookedDdp(DistributedDataParallel):
    """DDP takes the averaged bucket from its collective's future, which the fake group leaves empty.

    This hook hands the bucket back as it is; it allocates nothing.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.register_comm_hook(None, _as_it_is)


def _as_it_is(state, bucket):  # type: ignore[no-untyped-def]  # DDP refuses annotations that are text
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


@contextlib.contextmanager
def alarm(seconds: int) -> Iterator[None]:
    """Raise Timeout in the main thread after so many seconds."""

    def ring(number: int, frame: object) -> None:
        raise Timeout

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def text_for(plan: Plan, folder: Path) -> Path:
    """A text with enough samples for one step, and few to evaluate on: that is not what is checked here."""
    length = plan.tokens or plan.model.features
    path = folder / "text.txt"
    path.write_text("0123456789abcdef" * ((plan.global_batch * 5 // 4 + 3) * length // 16 + 1))
    return path


def clean_up(device: str) -> int | None:
    """Free what a case left, so that the next starts from nothing; returns what cuBLAS had kept as workspace."""
    gc.collect()
    if device != "cuda":
        return None
    before = torch.cuda.memory_allocated()
    clear: Callable[[], None] = getattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: None)
    clear()
    workspace = before - torch.cuda.memory_allocated()
    torch.cuda.empty_cache()
    return workspace


def first_line(error: BaseException) -> str:
    return (str(error).strip().split("\n") or [""])[0][:300]


# -- facts and report ------------------------------------------------------------------------------


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
        "optimizer states equal to the byte. Written by `make gpu-check`; ranks above 1 are rank 0 of a fake process group.\n\n"
        f"{about}\n\n| {head} |\n|{'---|' * len(COLUMNS)}\n{rows}\n"
    )


def _fact(name: str, value: object) -> str:
    sizes = ("capacity", "context", "used_before", "used_with_context")
    return format_bytes(int(str(value)), binary=True) if name in sizes else str(value)


if __name__ == "__main__":
    sys.exit(main())
