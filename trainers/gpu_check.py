"""The model of memory held against one real GPU; sharded strategies too, as the fullest rank of 8 that are not there.

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
import re
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

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
from memcalc.sharding import fullest, greedy_partition
from memcalc.training import Training
from trainers import gpu_history
from trainers.backends import ddp
from trainers.gpu_cases import cases
from trainers.gpu_report import TOLERANCE, facts, line, markdown
from trainers.loop import train
from trainers.process import Rank, join

__all__ = ["main"]

STEPS = 3
HISTORIES = ("gpt2.single.1.bf16.none", "gpt2.fsdp-full-shard.8.amp-bf16.none")


class Timeout(Exception):
    """A case took longer than it may."""


def main(words: list[str] | None = None) -> int:
    """Run the cases that fit the time; 1 when an estimate is beyond tolerance, a case broke or none was measured."""
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
    if options.device == "cpu":
        torch.backends.mkldnn.set_flags(False)  # its scratch memory differs between CPUs; see trainers/matrix.py
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
    if options.device == "cuda" and not options.only:
        report["histories"] = histories(plans, options.out, options.seconds - (time.monotonic() - started))
        write_text(path, json.dumps(report, indent=1) + "\n")
        write_text(path.with_suffix(".md"), markdown(report))
    print(f"{path} and {path.with_suffix('.md').name} written in {time.monotonic() - started:.0f} s")
    states = {result["status"] for result in report["cases"]}
    return int("ok" not in states or not states.isdisjoint(("off", "error", "timeout")))


def histories(plans: dict[str, Plan], folder: Path, seconds: float) -> list[dict[str, Any]]:
    """The allocator's history of a few whole runs, with and without expandable segments, while there is time."""
    found, started = [], time.monotonic()
    for name in HISTORIES:
        for options in ("", "expandable_segments:True"):
            left = seconds - (time.monotonic() - started)
            if name not in plans or left < 1:
                continue
            plan = replace(plans[name], allocator=options)
            path = folder / f"history-{name}{'-expandable' * bool(options)}.json"
            try:
                with alarm(int(left)):
                    found.append({"name": path.stem, **gpu_history.record(plan, partial(_bare_run, plan), path)})
            except (Timeout, MemcalcError, RuntimeError, KeyError, AttributeError, TypeError) as error:
                found.append({"name": path.stem, "status": "error", "message": first_line(error)})
            clean_up("cuda")
            print(json.dumps(found[-1]), flush=True)
    return found


def _bare_run(plan: Plan) -> None:
    """Three steps without a meter."""
    place = fullest_rank(plan)
    with tempfile.TemporaryDirectory() as folder, fake_group(place):
        settings = Training(steps=STEPS, measure_steps=0, data=text_for(plan, Path(folder)))
        with join(place, plan.device, settings.seed) as process:
            train(plan, settings, process)


# -- one case --------------------------------------------------------------------------------------


def measure(plan: Plan, seconds: int) -> dict[str, Any]:
    """Run one plan and compare; an OOM, a timeout or an error is a result too."""
    started = time.monotonic()
    estimated, place = estimate(plan), fullest_rank(plan)
    result: dict[str, Any] = {"plan": json.loads(plan.to_json()), "estimated_peak": estimated.peak.bytes}
    try:
        with tempfile.TemporaryDirectory() as folder, fake_group(place), alarm(seconds):
            settings = Training(steps=STEPS, measure_steps=STEPS, data=text_for(plan, Path(folder)))
            with join(place, plan.device, settings.seed) as process:
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


def fullest_rank(plan: Plan) -> Rank:
    """The rank the estimate is for: ZeRO-1 gives whole tensors to ranks; otherwise all ranks hold alike."""
    rank = 0
    if plan.strategy == "zero-1":
        rank = fullest(greedy_partition(plan.family.weights(plan.model), plan.ranks))
    return Rank(rank=rank, local=0, world=plan.ranks)


@contextlib.contextmanager
def fake_group(place: Rank) -> Iterator[None]:
    """A process group of which only the one rank exists."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=place.rank, world_size=place.world)
    try:
        with mock.patch.object(ddp, "DistributedDataParallel", _HookedDdp):
            yield
    finally:
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


if __name__ == "__main__":
    sys.exit(main())
