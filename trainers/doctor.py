"""What torch says of this machine, as one line of JSON on the standard output: the part of ``memcalc doctor`` that needs torch.

``python -m trainers.doctor`` looks at this process alone; with ``--cluster``, under torchrun, all ranks exchange what they
see through gloo, which needs no GPU, and each prints the list of all.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import socket
import sys
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["exchanged", "facts"]


def facts() -> dict[str, Any]:
    """Versions and GPUs; what cannot be asked is None, and why stands under ``error``."""
    found: dict[str, Any] = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "nccl": None,
        "distributed": dist.is_available(),
        "gloo": dist.is_available() and dist.is_gloo_available(),
        "architectures": [],
        "gpus": [],
        "error": None,
    }
    try:
        if torch.version.cuda is not None and dist.is_available() and dist.is_nccl_available():
            found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
        found["architectures"] = torch.cuda.get_arch_list()
        found["gpus"] = [_gpu(index) for index in range(torch.cuda.device_count())]
    except Exception as error:  # a broken driver raises whatever it likes, and is what a doctor is asked about
        found["error"] = f"{type(error).__name__}: {error}".split("\n")[0][:300]
    return found


def _gpu(index: int) -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(index)
    free, total = torch.cuda.mem_get_info(index)
    capability = [properties.major, properties.minor]
    return {"name": properties.name, "capability": capability, "total": total, "free": free}


def exchanged(timeout: float) -> list[dict[str, Any]]:
    """The facts of all ranks, in their order. Raises what torch raises when a rank does not answer in time."""
    rank, local = int(os.environ["RANK"]), int(os.environ.get("LOCAL_RANK", 0))
    mine = {**facts(), "rank": rank, "host": socket.gethostname(), "settings": _settings()}
    mine["driver"] = os.environ.get("MEMCALC_DRIVER")
    gpus = mine["gpus"]
    mine["gpu"] = gpus[local]["name"] if local < len(gpus) else None
    dist.init_process_group("gloo", timeout=timedelta(seconds=timeout))
    try:
        found: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(found, mine)
    finally:
        dist.destroy_process_group()
    return found


def _settings() -> dict[str, str]:
    """Environment variables that must agree between ranks."""
    names = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
    return {name: value for name, value in os.environ.items() if name.startswith("NCCL_") or name in names}


if __name__ == "__main__":
    cluster = len(sys.argv) == 3 and sys.argv[1] == "--cluster"
    with contextlib.redirect_stdout(sys.stderr):  # the answer stands alone on the standard output
        answer = exchanged(float(sys.argv[2])) if cluster else facts()
    print(json.dumps(answer))
