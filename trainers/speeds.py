"""How fast this machine is, measured under torchrun: the part of ``memcalc calibrate`` that needs torch.

``python -m torch.distributed.run --nproc-per-node 2 -m trainers.speeds OUT.json cpu`` writes what rank 0 measured; every
rank works at the same time, as in training. Each number is the median of several tries.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from memcalc.files import write_text

__all__ = ["measure"]

TRIES = 5
WIDTHS = {"cpu": (64, 256, 1024), "cuda": (256, 512, 1024, 2048, 4096, 8192)}
DTYPES = {"cpu": ("float32", "bfloat16"), "cuda": ("float32", "bfloat16", "float16")}
COPIED = {"cpu": 128 * 2**20, "cuda": 2**30}
REDUCED = (2**10, 2**20, 25 * 2**20, 100 * 2**20)
"""Bytes of an all-reduce: a small one for its fixed time, DDP's bucket, and a long one."""
OPERATIONS = 200


def measure(device: torch.device, said: Callable[[str], None]) -> dict[str, Any]:
    """Products by width and dtype (FLOP/s), a copy (B/s read and written), operations (seconds each), all-reduces (B/s that
    a rank sends), and bytes of the CUDA context."""
    found: dict[str, Any] = {"device": device.type, "torch": torch.__version__, "ranks": 1, "context": None}
    if dist.is_initialized():
        found["ranks"] = dist.get_world_size()
    if device.type == "cuda":
        found |= {"gpu": torch.cuda.get_device_name(device), "context": _context(device)}
    found["products"] = []
    for dtype in DTYPES[device.type]:
        for width in WIDTHS[device.type]:
            said(f"product of {width} x {width} in {dtype}")
            found["products"].append({"dtype": dtype, "width": width, "flops": _product(device, dtype, width)})
    said("copy")
    found["copy"] = _copy(device)
    said("starting operations")
    found["operation"] = _operation(device)
    found["reduced"] = []
    for size in REDUCED if found["ranks"] > 1 else ():
        said(f"all-reduce of {size} B")
        found["reduced"].append({"bytes": size, "seconds": _reduce(device, size)})
    return found


def _seconds(device: torch.device, work: Callable[[], object], repeat: int = 1) -> float:
    """The median of TRIES, after one that is not counted."""
    times = []
    for _ in range(TRIES + 1):
        _wait(device)
        start = time.perf_counter()
        for _ in range(repeat):
            work()
        _wait(device)
        times.append((time.perf_counter() - start) / repeat)
    return statistics.median(times[1:])


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _product(device: torch.device, dtype: str, width: int) -> float:
    a, b = (torch.randn(width, width, device=device).to(getattr(torch, dtype)) for _ in range(2))
    flops = 2 * width**3
    repeat = max(1, min(1000, int(5e8 // flops))) if device.type == "cpu" else max(1, min(200, int(1e13 // flops)))
    return flops / _seconds(device, lambda: a @ b, repeat)


def _copy(device: torch.device) -> float:
    source = torch.zeros(COPIED[device.type], dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * source.numel() / _seconds(device, lambda: target.copy_(source))


def _operation(device: torch.device) -> float:
    """Seconds the host needs to start one operation with autograd: small enough that nothing else takes time."""
    x = torch.ones(8, device=device, requires_grad=True)

    def chain() -> None:
        y = x
        for _ in range(OPERATIONS):
            y = y * 1.0
        del y

    return _seconds(device, chain) / OPERATIONS


def _reduce(device: torch.device, size: int) -> float:
    whole = torch.zeros(size // 4, device=device)
    return _seconds(device, lambda: dist.all_reduce(whole), 20 if size < 2**20 else 1)


def _context(device: torch.device) -> int:
    """What the card lost to this process beside its tensors. Other processes that come or go meanwhile are in it."""
    free, total = torch.cuda.mem_get_info(device)
    others = int(os.environ.get("MEMCALC_USED_BEFORE", "0"))
    return max(0, total - free - others - torch.cuda.memory_reserved(device))


def main(arguments: list[str]) -> None:
    out, kind = Path(arguments[0]), arguments[1]
    rank, local = int(os.environ.get("RANK", "0")), int(os.environ.get("LOCAL_RANK", "0"))
    torch.set_num_threads(1)
    device = torch.device(kind, local) if kind == "cuda" else torch.device("cpu")
    if kind == "cuda":
        torch.cuda.set_device(device)
        torch.zeros(1, device=device)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        dist.init_process_group("nccl" if kind == "cuda" else "gloo")

    def said(what: str) -> None:
        if rank == 0:
            print(what, flush=True)

    found = measure(device, said)
    if rank == 0:
        write_text(out, json.dumps(found, indent=2) + "\n")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
